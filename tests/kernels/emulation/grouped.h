// Plays the GPU for deepinfer/kernels/cuda/moe_wgmma.cu on a CPU: its section "instructions" in plain C++. It also
// finds copies from outside of the operands, stages that are filled twice, and writes past the launch's shared memory.

#define __grid_constant__
static const int SHARED_BYTES = 227 * 1024;
struct Warp { Meeting meeting; u32 values[32][4]; };
struct Fiber { ucontext_t context; bool done; int thread; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Meeting> meetings;  // 0: all threads, then one for each warpgroup
static char* shared_memory;            // of the one CTA that runs
static int cta_threads, cta;
static struct { int x; } gridDim;
static struct Range { const char *begin, *end; } operands[4];

struct ThreadIndex { int x = fibers[current].thread; };
struct BlockIndex { int x = cta; };

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static Warp& my_warp() { return warps[threadIdx.x / 32]; }
static void __syncwarp() { meet(my_warp().meeting, 32); }
static void __syncthreads() { meet(meetings[0], cta_threads); }
static void group_barrier(int group) { meet(meetings[group + 1], 128); }
static void wait_for_earlier_kernels() {}
template <int PER_THREAD> static void give_registers() {}
template <int PER_THREAD> static void take_registers() {}

static u32 from_lane(u32 value, int lane) {
  Warp& warp = my_warp();
  warp.values[threadIdx.x % 32][0] = value;
  __syncwarp();
  const u32 other = warp.values[lane][0];
  __syncwarp();
  return other;
}
static int __shfl_sync(u32, int value, int lane) { return from_lane(value, lane); }
static int __shfl_up_sync(u32, int value, int step) { return from_lane(value, max((int)threadIdx.x % 32 - step, 0)); }
static float __shfl_xor_sync(u32, float value, int mask) {
  return __uint_as_float(from_lane(__float_as_uint(value), threadIdx.x % 32 ^ mask));
}
static int atomicAdd(int* to, int number) { return (*to += number) - number; }

static u32 __funnelshift_r(u32 low, u32 high, u32 by) { return ((u64)high << 32 | low) >> by; }

// ---------------------------------------------------------------- memory
static char* at(u32 address) {
  if (address >= (u32)SHARED_BYTES) fail("address outside of shared memory");
  return shared_memory + address;
}
static u32 shared_address(const void* p) { return (const char*)p - shared_memory; }

struct Barrier { u16 count, pending; u16 phase; u16 unused; };
static std::vector<int> missing_bytes;  // by barrier
static Barrier& barrier(u32 address) { return *(Barrier*)at(address); }
static int& missing(u32 address) { return missing_bytes[address / 8]; }
static void settle(u32 address) {
  Barrier& b = barrier(address);
  if (b.pending == 0 && missing(address) == 0) b.pending = b.count, ++b.phase, ++progress;
}
static void barrier_init(u32 address, u32 count) { barrier(address) = {(u16)count, (u16)count, 0, 0}; }
static void barriers_ready() {}
static void barrier_arrive(u32 address) {
  if (barrier(address).pending == 0) fail("a stage is filled or left twice");
  --barrier(address).pending, settle(address);
}
static void barrier_expect(u32 address, u32 bytes) { missing(address) += bytes, barrier_arrive(address); }
static void barrier_wait(u32 address, u32 parity) { while ((barrier(address).phase & 1) == parity) yield(); }
static void copy_bulk(u32 to, const void* from, u32 bytes, u32 address) {
  const char* p = (const char*)from;
  if (to % 16 || (uintptr_t)p % 16 || bytes % 16) fail("misaligned copy");
  if (std::none_of(operands, operands + 4, [&](const Range& r) { return p >= r.begin && p + bytes <= r.end; }))
    fail("copy from outside of the operands");
  at(to + bytes - 1), std::memcpy(at(to), p, bytes);
  missing(address) -= bytes, settle(address);
}
static uint4 load_shared(u32 address) { return *(const uint4*)at(address); }
static u32 load_word(u32 address) { return *(const u32*)at(address); }
static void load_floats(float& a, float& b, u32 address) { a = ((float*)at(address))[0], b = ((float*)at(address))[1]; }
static void store_float(u32 address, float v) { std::memcpy(at(address), &v, 4); }
static void store_matrices(u32 address, u32 a, u32 b) {  // a lane's two values are in column lane / 4 of memory
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  warp.values[lane][0] = address;
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    const u32 value = (i < 2 ? a : b) >> 16 * (i % 2);
    ((u16*)at(warp.values[i / 2 * 8 + lane % 4 * 2 + i % 2][0]))[lane / 4] = value;
  }
  __syncwarp();
}

// ---------------------------------------------------------------- arithmetic
static float low_of(u32 pair) { return __uint_as_float(pair << 16); }
static float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }
static u32 to_bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static u32 times(u32 a, u32 b) { return to_bf16_pair(low_of(a) * low_of(b), high_of(a) * high_of(b)); }
static float exp2_fast(float x) { return std::exp2(x); }
static float reciprocal(float x) { return 1.0f / x; }
static float2 round_e4m3(float low, float high) { return {round_e4m3(low), round_e4m3(high)}; }

static void wgmma_fence() {}
static void wgmma_commit() {}
template <int PENDING> static void wgmma_wait() {}
template <int WIDTH> struct Wgmma {  // 64 rows over the warpgroup: 16 of each warp, row lane / 4 + 8 (i / 2 % 2)
  static void run(float* d, const u32* a, u64 descriptor) {
    if (descriptor >> 62 != 1 || (descriptor >> 32 & 0x3FFF) != 64 || (descriptor & 0x3FFF) % 64 >= 8) fail("operand");
    const u32 base = (u32)(descriptor & 0x3FFF) << 4;
    Warp& warp = my_warp();
    const int lane = threadIdx.x % 32;
    std::memcpy(warp.values[lane], a, 16);
    __syncwarp();
    float rows[2][16];
    for (int k = 0; k < 16; ++k)
      for (int r = 0; r < 2; ++r) {
        const u32 pair = warp.values[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + r];
        rows[r][k] = k % 2 ? high_of(pair) : low_of(pair);
      }
    for (int i = 0; i < WIDTH / 4; ++i) {
      const int n = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float* to = d + i / 2 * 4 + i % 2;
      for (int half = 0; half < 2; ++half) {
        const u32 address = base + n / 8 * 1024 + n % 8 * 128 + half * 16;
        const u16* x = (const u16*)at(address ^ (address >> 7 & 7) << 4);
        for (int k = 0; k < 8; ++k) {
          const float value = __uint_as_float((u32)x[k] << 16);
          to[0] += rows[0][8 * half + k] * value, to[2] += rows[1][8 * half + k] * value;
        }
      }
    }
    __syncwarp();
  }
};

// ---------------------------------------------------------------- launch
static void (*entry)();
static void run_fiber() {
  entry();
  fibers[current].done = true, ++progress;
  yield();
}
// CTAs run one after another. Returns 0, 1 for a deadlock, 2 for a write past `shared_bytes`. Memory starts as NaN.
static int launch(int grid, int threads, int shared_bytes, void (*kernel)()) {
  entry = kernel, cta_threads = threads, gridDim.x = grid;
  std::vector<std::vector<char>> stacks(threads, std::vector<char>(32 * 1024));
  shared_memory = (char*)std::aligned_alloc(1024, SHARED_BYTES);
  int problem = 0;
  for (cta = 0; cta < grid && !problem; ++cta) {
    std::memset(shared_memory, 0xFF, SHARED_BYTES);
    missing_bytes.assign(SHARED_BYTES / 8, 0);
    fibers.assign(threads, Fiber()), warps.assign((threads + 31) / 32, Warp()), meetings.assign(16, Meeting());
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      fiber.thread = i;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks[i].data(), fiber.context.uc_stack.ss_size = stacks[i].size();
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (int left = threads; left > 0 && !problem;) {
      const long before = progress;
      for (current = 0; current < threads; ++current) {
        if (fibers[current].done) continue;
        swapcontext(&scheduler, &fibers[current].context);
        left -= fibers[current].done;
      }
      if (progress == before && left > 0) problem = 1;
    }
    const char *past = shared_memory + shared_bytes, *end = shared_memory + SHARED_BYTES;
    if (std::any_of(past, end, [](char byte) { return byte != -1; })) problem = 2;
  }
  std::free(shared_memory);
  return problem;
}
