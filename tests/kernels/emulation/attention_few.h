// Plays the GPU for deepinfer/kernels/cuda/attention_few.cu on a CPU: the section "instructions" in plain C++.

struct uint2 { u32 x, y; };
static const int SHARED_BYTES = 48 * 1024, CTA_THREADS = 256;
struct Warp { Meeting meeting; u32 values[32], operands[32][6]; };
struct Fiber { ucontext_t context; bool done; int thread, cta, awaited; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Meeting> meetings;  // one per CTA
static Meeting cluster_meeting;
static std::vector<char*> shared_memory;  // per CTA of the cluster
static int first_cta, num_ctas;

struct ThreadIndex { int x = fibers[current].thread; };
struct BlockIndex { int x = first_cta + fibers[current].cta; };

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static Warp& my_warp() { return warps[fibers[current].cta * (CTA_THREADS / 32) + threadIdx.x / 32]; }
static void __syncwarp() { meet(my_warp().meeting, 32); }
static void __syncthreads() { meet(meetings[fibers[current].cta], CTA_THREADS); }
static float __fdividef(float a, float b) { return a / b; }

template <class F> static u32 exchange(u32 value, F result) {
  Warp& warp = my_warp();
  warp.values[threadIdx.x % 32] = value;
  __syncwarp();
  const u32 found = result(warp.values);
  __syncwarp();
  return found;
}
static float __shfl_xor_sync(u32, float value, int step) {
  const int lane = threadIdx.x % 32;
  return __uint_as_float(exchange(__float_as_uint(value), [&](u32* v) { return v[lane ^ step]; }));
}
static u32 __ballot_sync(u32, bool claim) {
  return exchange(claim, [](u32* v) {
    u32 votes = 0;
    for (int i = 0; i < 32; ++i) votes |= v[i] << i;
    return votes;
  });
}

// ---------------------------------------------------------------- the cluster
static void wait_for_earlier_kernels() {}
static u32 shared_address(const void* p) {
  const int cta = fibers[current].cta;
  return (u32)cta << 24 | (u32)((const char*)p - shared_memory[cta]);
}
static char* at(u32 address) {
  const u32 cta = address >> 24, offset = address & 0xFFFFFF;
  if ((int)cta >= num_ctas || offset >= (u32)SHARED_BYTES) fail("address outside of shared memory");
  return shared_memory[cta] + offset;
}
static u32 remote_address(u32 local, u32 rank) { return (local & 0xFFFFFF) | rank << 24; }
struct Barrier { int bytes; u16 phase, armed; };  // ends a phase when armed and no byte is missing
static void settle(Barrier& barrier) {
  if (barrier.armed && barrier.bytes == 0) barrier.armed = 0, ++barrier.phase, ++progress;
}
static void barrier_init(u64* p, int) { *(Barrier*)p = {0, 0, 0}; }
static void cluster_arrive() { fibers[current].awaited = arrive(cluster_meeting, CTA_THREADS * num_ctas); }
static void cluster_wait() { wait(cluster_meeting, fibers[current].awaited); }
static void barrier_expect(u64* p, u32 bytes) {
  Barrier& barrier = *(Barrier*)p;
  if (barrier.armed) fail("armed twice");
  barrier.bytes += bytes, barrier.armed = 1, settle(barrier);
}
static void barrier_wait_forever(u64* p, u32 parity) { while ((((Barrier*)p)->phase & 1) == parity) yield(); }
static void bytes_arrive(u32 to, u32 address, int bytes) {
  if (to >> 24 != address >> 24 || to % bytes) fail("data and barrier in different CTAs, or misaligned");
  Barrier& barrier = *(Barrier*)at(address);
  barrier.bytes -= bytes, settle(barrier);
}
static void send(u32 to, u32 barrier, float a, float b, float c, float d) {
  const float v[4] = {a, b, c, d};
  std::memcpy(at(to), v, 16), bytes_arrive(to, barrier, 16);
}
static void send(u32 to, u32 barrier, float a, float b) {
  const float v[2] = {a, b};
  std::memcpy(at(to), v, 8), bytes_arrive(to, barrier, 8);
}

// ---------------------------------------------------------------- memory
template <class T> static T load(const void* p) {
  if ((uintptr_t)p % sizeof(T)) fail("misaligned load");
  return *(const T*)p;
}
static u32 load_byte(const u8* p) { return *p; }
static int load_int(const void* p) { return load<int>(p); }
static uint2 load_pair(const void* p) { return load<uint2>(p); }
static uint4 load_four(const void* p) { return load<uint4>(p); }
static void store_global(u16* p, u32 a, u32 b) {
  if ((uintptr_t)p % 8) fail("misaligned output");
  ((u32*)p)[0] = a, ((u32*)p)[1] = b;
}

// ---------------------------------------------------------------- matrices and numbers
static void load_matrices(u32 (&a)[4], u32 address) {
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  if (address % 16) fail("misaligned matrix");
  warp.values[lane] = address;
  __syncwarp();
  for (int i = 0; i < 4; ++i) a[i] = *(u32*)at(warp.values[8 * i + lane / 4] + lane % 4 * 4);
  __syncwarp();
}
static u32 transpose(u32 x) {  // lane 4 g + q: row g, columns 2 q and 2 q + 1
  const int lane = threadIdx.x % 32, column = lane / 4, row = lane % 4 * 2;
  return exchange(x, [&](u32* v) {
    const u32 low = v[row * 4 + column / 2], high = v[(row + 1) * 4 + column / 2];
    return (low >> 16 * (column % 2) & 0xFFFF) | high >> 16 * (column % 2) << 16;
  });
}
static float half_of(u32 pair, int side) { return __uint_as_float(side ? pair & 0xFFFF0000 : pair << 16); }
static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32, group = lane / 4 * 4;
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(warp.operands[lane], mine, sizeof mine);
  __syncwarp();
  for (int k = 0; k < 16; ++k) {
    const int half = k / 8, quad = k % 8 / 2, side = k % 2;
    for (int i = 0; i < 4; ++i) {
      const u32 left = warp.operands[group + quad][2 * half + i / 2];
      const u32 right = warp.operands[(lane % 4 * 2 + i % 2) * 4 + quad][4 + half];
      c[i] += half_of(left, side) * half_of(right, side);
    }
  }
  __syncwarp();
}
static u32 to_bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static u32 times(u32 a, u32 b) { return to_bf16_pair(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1)); }
static float exp2_fast(float x) { return exp2f(x); }
static float2 round_e4m3(float low, float high) { return {round_e4m3(low), round_e4m3(high)}; }

// ---------------------------------------------------------------- launch
static void (*entry)();
static void run_fiber() {
  entry();
  fibers[current].done = true, ++progress;
  yield();
}
// Clusters run one after another. Returns 0, or 1 for a deadlock. Shared memory starts as NaN.
static int launch(int grid, int cluster, void (*kernel)()) {
  entry = kernel, num_ctas = cluster;
  std::vector<std::vector<char>> stacks(CTA_THREADS * num_ctas, std::vector<char>(16 * 1024));
  for (int i = 0; i < num_ctas; ++i) shared_memory.push_back((char*)std::aligned_alloc(1024, SHARED_BYTES));
  int stuck = 0;
  for (first_cta = 0; first_cta < grid && !stuck; first_cta += num_ctas) {
    for (char* p : shared_memory) std::memset(p, 0xFF, SHARED_BYTES);
    int left = CTA_THREADS * num_ctas;
    fibers.assign(left, Fiber()), warps.assign(left / 32, Warp());
    meetings.assign(num_ctas, Meeting()), cluster_meeting = Meeting();
    for (int i = 0; i < (int)fibers.size(); ++i) {
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
  for (char* p : shared_memory) std::free(p);
  shared_memory.clear();
  return stuck;
}
