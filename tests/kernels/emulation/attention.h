// Plays the GPU for deepinfer/kernels/cuda/attention.cu on a CPU: the machine's instructions (barriers, copies, matrix
// products, conversions) in plain C++. Stands in place of the kernel's sections before "matrix operands"; the kernel's other text is compiled as it is.

static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---------------------------------------------------------------- fibers

static const int CTA_THREADS = 384, SHARED_BYTES = 227 * 1024;
struct Warp { Meeting meeting; u32 values[32][4]; };
struct AsyncCopy { u8* to; const void* from; int bytes; };
struct Fiber {
  ucontext_t context;
  bool done;
  int thread, cta;
  std::vector<AsyncCopy> copies;               // of the open group
  std::vector<std::vector<AsyncCopy>> groups;  // that were not waited for
};
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Meeting> meetings;     // 16 per CTA
static Meeting cluster_meeting;
static std::vector<u8*> shared_memory;    // per CTA of the cluster
static int num_ctas, first_cta;
static struct { int x; } gridDim;

struct ThreadIndex { int x = fibers[current].thread; };
struct BlockIndex { int x = first_cta + fibers[current].cta; };

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static Warp& my_warp() { return warps[fibers[current].cta * CTA_THREADS / 32 + threadIdx.x / 32]; }
static Meeting& my_meeting(int id) { return meetings[fibers[current].cta * 16 + id]; }

static void __syncwarp() { meet(my_warp().meeting, 32); }
static void __syncthreads() { meet(my_meeting(0), CTA_THREADS); }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __shfl_xor_sync(u32, float value, int mask) {
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  warp.values[lane][0] = __float_as_uint(value);
  __syncwarp();
  const float other = __uint_as_float(warp.values[lane ^ mask][0]);
  __syncwarp();
  return other;
}
static u32 __ballot_sync(u32, bool claim) {
  Warp& warp = my_warp();
  warp.values[threadIdx.x % 32][0] = claim;
  __syncwarp();
  u32 votes = 0;
  for (int i = 0; i < 32; ++i) votes |= warp.values[i][0] << i;
  __syncwarp();
  return votes;
}
static bool __any_sync(u32 mask, bool claim) { return __ballot_sync(mask, claim) != 0; }

// ---------------------------------------------------------------- barriers and memory

static const u32 SHARED_BASE = 1024;  // of a CTA's shared memory in its window; the window's number is above 24 bits
static u8* at(u32 address) {
  const u32 cta = address >> 24, offset = (address & 0xFFFFFF) - SHARED_BASE;
  if ((int)cta >= num_ctas || offset >= SHARED_BYTES) fail("address outside of shared memory");
  return shared_memory[cta] + offset;
}
static u32 shared_address(const void* p) {
  return (u32)fibers[current].cta << 24 | (u32)((const u8*)p - shared_memory[fibers[current].cta] + SHARED_BASE);
}
struct Barrier { u16 count, pending; u32 phase; };
static void barrier_init(u64* p, int count) { *(Barrier*)p = {(u16)count, (u16)count, 0}; }
static void barrier_init_done() {}
static void wait_for_earlier_kernels() {}
static void barrier_arrive(u64* p) {
  Barrier& barrier = *(Barrier*)p;
  if (--barrier.pending == 0) barrier.pending = barrier.count, ++barrier.phase, ++progress;
}
static void barrier_wait_forever(u64* p, u32 parity) { while ((((Barrier*)p)->phase & 1) == parity) yield(); }
static void warp_arrive(u64* p) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(p);
}
static void named_barrier(int id, int threads) { meet(my_meeting(id), threads); }
static void meet_cluster() { meet(cluster_meeting, CTA_THREADS * num_ctas); }
static u32 remote_address(u32 local, u32 rank) { return (local & 0xFFFFFF) | rank << 24; }
static void store_remote(u32 to, float a, float b, float c, float d) { float v[4] = {a, b, c, d}; std::memcpy(at(to), v, 16); }
static void store_remote(u32 to, float a, float b) { float v[2] = {a, b}; std::memcpy(at(to), v, 8); }
// A copy happens when it is waited for, so that a missing wait shows.
static void copy_async(u32 to, const void* from, int bytes) { fibers[current].copies.push_back({at(to), from, bytes}); }
static void copy_commit() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(std::move(fiber.copies)), fiber.copies.clear();
}
template <int N> static void copy_wait() {
  for (auto& groups = fibers[current].groups; groups.size() > N; groups.erase(groups.begin()))
    for (const AsyncCopy& copy : groups[0]) std::memset(copy.to, 0, 16), std::memcpy(copy.to, copy.from, copy.bytes);
}
static void fence_for_tensor_cores() {}
template <int N> static void take_registers() {}
template <int N> static void give_registers() {}
static uint4 load_record(const u8* p) {
  if ((uintptr_t)p % 16) fail("misaligned record");
  return *(const uint4*)p;
}
static void store_global(u16* p, const uint4& v) {
  if ((uintptr_t)p % 16) fail("misaligned output");
  std::memcpy(p, &v, 16);
}
static void store_shared(u32 to, u32 a, u32 b, u32 c, u32 d) { *(uint4*)at(to) = {a, b, c, d}; }
static void store_codes(u8* p, u32 a, u32 b) {
  if ((uintptr_t)p % 8) fail("misaligned codes");
  const u32 v[2] = {a, b};
  std::memcpy(p, v, 8);
}
static uint4 load_shared(u32 from) { return *(uint4*)at(from); }

// ---------------------------------------------------------------- matrix instructions

static void wgmma_fence() {}
static void wgmma_commit() {}
template <int N> static void mma_wait(float (&)[N]) { named_barrier(8 + threadIdx.x / 128, 128); }
struct Operand { u32 base, column_stride, row_stride; };
static Operand decode(u64 descriptor) {  // fields of 14 bits, in units of 16 bytes
  if (descriptor >> 62 != 1 || (descriptor >> 14 & 3) || (descriptor >> 30 & 3) || (descriptor >> 46 & 0xFFFF))
    fail("matrix operand");
  const u32 base = (u32)(descriptor & 0x3FFF) << 4;
  return {(u32)fibers[current].cta << 24 | base, (u32)(descriptor >> 16 & 0x3FFF) << 4, (u32)(descriptor >> 32 & 0x3FFF) << 4};
}
static float value_at(u32 address) { return __uint_as_float((u32)*(u16*)at(address ^ (((address >> 7) & 7) << 4)) << 16); }
static float row_major(const Operand& o, int row, int k) { return value_at(o.base + row / 8 * o.row_stride + row % 8 * 128 + k * 2); }
static float transposed(const Operand& o, int k, int n) {
  return value_at(o.base + n / 64 * o.column_stride + k / 8 * o.row_stride + k % 8 * 128 + n % 64 * 2);
}
static int my_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
static void load_rows(float (&a)[2][16], u64 descriptor) {
  const Operand o = decode(descriptor);
  for (int i = 0; i < 32; ++i) a[i / 16][i % 16] = row_major(o, my_row() + 8 * (i / 16), i % 16);
}
template <int N, class B> static void multiply(float (&d)[N], const float (&a)[2][16], bool accumulate, B b) {
  for (int i = 0; i < N / 2; ++i) {  // channels or keys 8 (i / 2) + 2 quad + i % 2 of two rows
    float* at = d + i / 2 * 4 + i % 2;
    float sums[2] = {accumulate ? at[0] : 0, accumulate ? at[2] : 0};
    for (int k = 0; k < 16; ++k) {
      const float value = b(k, i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2);
      sums[0] += a[0][k] * value, sums[1] += a[1][k] * value;
    }
    at[0] = sums[0], at[2] = sums[1];
  }
}
static void mma_logits(float (&d)[32], u64 a, u64 b, int accumulate) {
  const Operand o = decode(b);
  float rows[2][16];
  load_rows(rows, a);
  multiply(d, rows, accumulate, [&](int k, int n) { return row_major(o, n, k); });
}
static void mma_sum(float (&d)[128], u64 a, u64 b) {
  const Operand o = decode(b);
  float rows[2][16];
  load_rows(rows, a);
  multiply(d, rows, true, [&](int k, int n) { return transposed(o, k, n); });
}
static void mma_sum(float (&d)[128], const u32 (&a)[4], u64 b) {
  const Operand o = decode(b);
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  std::memcpy(warp.values[lane], a, 16);
  __syncwarp();
  float rows[2][16];
  for (int i = 0; i < 32; ++i) {  // row i / 16, column 8 half + 2 quad + side
    const int row = i / 16, half = i % 16 / 8, quad = i % 8 / 2, side = i % 2;
    rows[row][i % 16] = __uint_as_float(warp.values[lane / 4 * 4 + quad][2 * half + row] >> (16 * side) << 16);
  }
  __syncwarp();
  multiply(d, rows, true, [&](int k, int n) { return transposed(o, k, n); });
}

// ---------------------------------------------------------------- arithmetic

static u32 to_bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static u32 times(u32 a, u32 b) {
  return to_bf16_pair(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                   __uint_as_float(a & 0xFFFF0000) * __uint_as_float(b & 0xFFFF0000));
}
static float exp2_fast(float x) { return exp2f(x); }
static float2 round_e4m3(float low, float high) { return {round_e4m3(low), round_e4m3(high)}; }
static u32 code_of(float x) {
  if (std::isnan(x)) return 0x7F;
  const float value = std::fabs(round_e4m3(x));
  const u32 code = value < 0.015625f ? (u32)(value * 512) : (__float_as_uint(value) >> 20) - 960;
  return code | (std::signbit(x) ? 0x80 : 0);
}
static float value_of(u32 code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
  return (code & 0x7F) == 0x7F ? NAN : code & 0x80 ? -size : size;
}
static float round_half(float x) {  // of a magnitude below 2^16; NaN stays NaN
  const float spacing = std::ldexp(1.0f, (x == 0 || std::isnan(x) ? -14 : max(std::ilogb(x), -14)) - 10);
  return std::copysign(std::nearbyint(std::fabs(x) / spacing) * spacing, x);
}
static u32 to_e4m3_pair(float low, float high) { return code_of(low) | code_of(high) << 8; }
static u32 half_twice(float x) { return __float_as_uint(round_half(x)); }  // stands for two halves
static u32 times_half(u32 codes, u32 factor) {
  u32 result = 0;
  for (int i = 0; i < 32; i += 8)
    result |= code_of(round_half(value_of(codes >> i & 0xFF) * __uint_as_float(factor))) << i;
  return result;
}

// ---------------------------------------------------------------- launch

#define KERNEL_ARGUMENTS                                                                                              \
  const u16 *query, const u8 *step_records, const u8 *ring, const int *window_index, const u8 *entries,               \
      const int *entry_slots, const float *sink, const float *cosines, const float *sines, u16 *out, int rows,        \
      int query_stride, int width, int num_selected, int quantize
#if GROUP_HEADS
#define SCALES(declaration) , declaration
#else
#define SCALES(declaration)
#endif
extern "C" void sparse_attention(KERNEL_ARGUMENTS SCALES(float *scales));
static void (*entry)();
static void run_fiber() {
  entry();
  fibers[current].done = true, ++progress;
  yield();
}

// Clusters run one after another. Returns 0, or 1 for a deadlock. Shared memory starts as NaN.
static int launch(int grid, void (*kernel)()) {
  entry = kernel, num_ctas = SPLITS, gridDim.x = grid;
  std::vector<std::vector<char>> stacks(CTA_THREADS * num_ctas, std::vector<char>(64 * 1024));
  for (int i = 0; i < num_ctas; ++i) shared_memory.push_back((u8*)std::aligned_alloc(1024, SHARED_BYTES));
  bool stuck = false;
  for (first_cta = 0; first_cta < grid && !stuck; first_cta += num_ctas) {
    for (u8* p : shared_memory) std::memset(p, 0xFF, SHARED_BYTES);
    fibers.assign(CTA_THREADS * num_ctas, Fiber()), warps.assign(CTA_THREADS / 32 * num_ctas, Warp());
    meetings.assign(16 * num_ctas, Meeting()), cluster_meeting = Meeting();
    int left = CTA_THREADS * num_ctas;
    for (int i = 0; i < CTA_THREADS * num_ctas; ++i) {
      Fiber& fiber = fibers[i];
      fiber.thread = i % CTA_THREADS, fiber.cta = i / CTA_THREADS;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks[i].data(), fiber.context.uc_stack.ss_size = stacks[i].size();
      makecontext(&fiber.context, run_fiber, 0);
    }
    while (left > 0 && !stuck) {
      const long before = progress;
      for (current = 0; current < (int)fibers.size(); ++current) {
        if (fibers[current].done) continue;
        swapcontext(&scheduler, &fibers[current].context);
        left -= fibers[current].done;
      }
      stuck = progress == before;
    }
  }
  for (u8* p : shared_memory) std::free(p);
  shared_memory.clear();
  return stuck;
}
