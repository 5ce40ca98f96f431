// Plays the GPU for deepinfer/kernels/cuda/route.cu on a CPU, and with hyper_connection.h for its kernels: the section
// "instructions" in plain C++.

static const int SHARED_BYTES = 227 * 1024;
struct Warp { Meeting meeting; u32 values[32], operands[32][6]; };
struct Block { int x, y, z; };
struct Fiber { ucontext_t context; bool done; int thread, cta, awaited; Block block; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Meeting> meetings;  // one per CTA
static Meeting cluster_meeting;
static std::vector<char*> shared_memory;  // per CTA that runs
static Block gridDim;

struct ThreadIndex { int x = fibers[current].thread; };
struct BlockIndex : Block { BlockIndex() : Block(fibers[current].block) {} };

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static Warp& my_warp() { return warps[fibers[current].cta * (THREADS / 32) + threadIdx.x / 32]; }

static void __syncwarp() { meet(my_warp().meeting, 32); }
static void __syncthreads() { meet(meetings[fibers[current].cta], THREADS); }
static u32 cluster_rank() { return CLUSTER > 1 ? fibers[current].cta : 0; }
static void cluster_arrive() { fibers[current].awaited = arrive(cluster_meeting, THREADS * CLUSTER); }
static void cluster_wait() { wait(cluster_meeting, fibers[current].awaited); }
static int load_of(const int* p, u32 rank) {
  if (CLUSTER == 1) return *p;
  return *(const int*)(shared_memory[rank] + ((const char*)p - shared_memory[fibers[current].cta]));
}
static void wait_for_earlier_kernels() {}
static int add_released(int* p, int value) { *p += value, ++progress; return *p - value; }
static void wait_until(const int* p, int value) { while (*p < value) yield(); }
static int load_global(const int* p) { return *p; }
template <int N> static void load_global(float (&to)[N], const float* p) {
  if ((uintptr_t)p % sizeof to) fail("misaligned load");
  std::memcpy(to, p, sizeof to);
}

template <class F> static u32 exchange(u32 value, F result) {
  Warp& warp = my_warp();
  warp.values[threadIdx.x % 32] = value;
  __syncwarp();
  const u32 found = result(warp.values);
  __syncwarp();
  return found;
}
static int __popc(u32 u) { return __builtin_popcount(u); }
static int __shfl_up_sync(u32, int value, int step) {
  return exchange(value, [&](u32* v) { return v[std::max((int)threadIdx.x % 32 - step, 0)]; });
}
static float __shfl_sync(u32, float value, int from) {
  return __uint_as_float(exchange(__float_as_uint(value), [&](u32* v) { return v[from]; }));
}
static u32 __reduce_max_sync(u32, u32 value) { return exchange(value, [](u32* v) { return *std::max_element(v, v + 32); }); }
static u32 __reduce_min_sync(u32, u32 value) { return exchange(value, [](u32* v) { return *std::min_element(v, v + 32); }); }
static void atomicOr(u32* to, u32 bits) { *to |= bits; }

static char* at(u32 offset) {
  if (offset >= (u32)SHARED_BYTES) fail("address outside of shared memory");
  return shared_memory[fibers[current].cta] + offset;
}
static u32 shared_address(const void* p) { return (const char*)p - shared_memory[fibers[current].cta]; }
static void copy_async(u32 to, const void* from, u32 bytes) { std::memset(at(to), 0, 16), std::memcpy(at(to), from, bytes); }
static void wait_for_copies() {}
static void load_matrices(u32 (&b)[4], u32 address) {
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  warp.values[lane] = address;
  __syncwarp();
  for (int i = 0; i < 4; ++i) b[i] = *(u32*)at(warp.values[8 * i + lane / 4] + lane % 4 * 4);
  __syncwarp();
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

// ---------------------------------------------------------------- launch
static void (*entry)();
static void run_fiber() {
  entry();
  fibers[current].done = true, ++progress;
  yield();
}
static std::vector<std::vector<char>> stacks;
static void start_cta(int cta, Block block) {  // shared memory starts as NaN
  std::memset(shared_memory[cta], 0xFF, SHARED_BYTES);
  meetings[cta] = Meeting();
  for (int i = cta * THREADS; i < (cta + 1) * THREADS; ++i) {
    Fiber& fiber = fibers[i];
    fiber.thread = i % THREADS, fiber.cta = cta, fiber.block = block, fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i].data(), fiber.context.uc_stack.ss_size = stacks[i].size();
    makecontext(&fiber.context, run_fiber, 0);
  }
}
static int run_threads(int begin, int end) {  // until each waits; how many ended
  int ended = 0;
  for (current = begin; current < end; ++current) {
    if (fibers[current].done) continue;
    swapcontext(&scheduler, &fibers[current].context);
    ended += fibers[current].done;
  }
  return ended;
}
static void begin_launch(const int* grid, int num_ctas, void (*kernel)()) {
  entry = kernel, gridDim = {grid[0], grid[1], grid[2]};
  stacks.assign(THREADS * num_ctas, std::vector<char>(16 * 1024));
  for (int i = 0; i < num_ctas; ++i) shared_memory.push_back((char*)std::aligned_alloc(1024, SHARED_BYTES));
  fibers.assign(THREADS * num_ctas, Fiber()), warps.assign(THREADS * num_ctas / 32, Warp());
  meetings.assign(num_ctas, Meeting()), cluster_meeting = Meeting();
}
static void end_launch() {
  for (char* p : shared_memory) std::free(p);
  shared_memory.clear();
}

// Clusters run one after another. Returns 0, or 1 for a deadlock.
static int launch(const int* grid, void (*kernel)()) {
  begin_launch(grid, CLUSTER, kernel);
  bool stuck = false;
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int first = 0; first < grid[0] && !stuck; first += CLUSTER) {
        for (int cta = 0; cta < CLUSTER; ++cta) start_cta(cta, {first + cta, y, z});
        for (int left = THREADS * CLUSTER; left > 0 && !stuck;) {
          const long before = progress;
          left -= run_threads(0, THREADS * CLUSTER);
          stuck = progress == before;
        }
      }
  end_launch();
  return stuck;
}

// CTAs without clusters, that wait for each other. At most `room` run at a time, in an order that `seed` shuffles; each as
// far as it gets alone before another goes on. Returns 0, or 1 for a deadlock.
static int launch_together(const int* grid, void (*kernel)(), int room, unsigned seed) {
  std::vector<Block> waiting;
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x) waiting.push_back({x, y, z});
  std::mt19937 random(seed);
  std::shuffle(waiting.begin(), waiting.end(), random);
  room = std::min(room, (int)waiting.size());
  begin_launch(grid, room, kernel);
  std::vector<int> left(room, 0), places(room);
  for (int cta = 0; cta < room; ++cta) places[cta] = cta;
  bool stuck = false;
  for (int running = -1; running != 0 && !stuck;) {
    const long before = progress;
    std::shuffle(places.begin(), places.end(), random);
    running = 0;
    for (int cta : places) {
      if (left[cta] == 0 && !waiting.empty()) start_cta(cta, waiting.back()), waiting.pop_back(), left[cta] = THREADS;
      for (long mine = -1; mine != progress && left[cta] > 0;) {
        mine = progress;
        left[cta] -= run_threads(cta * THREADS, (cta + 1) * THREADS);
      }
      running += left[cta] > 0 || !waiting.empty();
    }
    stuck = progress == before && running > 0;
  }
  end_launch();
  return stuck;
}
