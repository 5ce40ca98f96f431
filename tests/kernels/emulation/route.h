// Plays the GPU for deepinfer/kernels/cuda/route_*.cu on a CPU, and with hyper_connection.h for its kernels: the section
// "instructions" in plain C++.

static const int SHARED_BYTES = 227 * 1024;
struct Warp { Meeting meeting; u32 values[32], operands[32][6]; };
struct Copy { char* to; const void* from; u32 bytes; bool ends_group; };
struct Fiber { ucontext_t context; bool done, waited; int thread, cta, awaited; std::vector<Copy> copies; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Meeting> meetings;  // one per CTA
static Meeting cluster_meeting;
static std::vector<char*> shared_memory;  // per CTA of the cluster
static int first_cta, grid_y, grid_z, now_y, now_z;

struct ThreadIndex { int x = fibers[current].thread; };
struct BlockIndex { int x = first_cta + fibers[current].cta, y = now_y, z = now_z; };

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static Warp& my_warp() { return warps[fibers[current].cta * (THREADS / 32) + threadIdx.x / 32]; }

static void __syncwarp() { meet(my_warp().meeting, 32); }
static void __syncthreads() { meet(meetings[fibers[current].cta], THREADS); }
static u32 cluster_rank() { return fibers[current].cta; }
static void cluster_arrive() { fibers[current].awaited = arrive(cluster_meeting, THREADS * CLUSTER); }
static void cluster_wait() { wait(cluster_meeting, fibers[current].awaited); }
static int load_of(const int* p, u32 rank) {
  return *(const int*)(shared_memory[rank] + ((const char*)p - shared_memory[fibers[current].cta]));
}
static void wait_for_earlier_kernels() { fibers[current].waited = true; }

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
// Copies happen as late as the kernel allows, or at once (EAGER).
#ifndef EAGER
#define EAGER 0
#endif
static bool (*may_copy)(const char* from);  // where a test knows it
static void copy_async(u32 to, const void* from, u32 bytes) {
  if (may_copy && bytes && !may_copy((const char*)from)) fail("a copy of what is not there, or not yet");
  at(to + 15);
  if (EAGER) std::memset(at(to), 0, 16), std::memcpy(at(to), from, bytes);
  else fibers[current].copies.push_back({at(to), from, bytes, false});
}
static int open_groups() {
  const std::vector<Copy>& copies = fibers[current].copies;
  return std::count_if(copies.begin(), copies.end(), [](const Copy& c) { return c.ends_group; });
}
static void copy_commit() {  // a group may have no copies
  std::vector<Copy>& copies = fibers[current].copies;
  if (copies.empty() || copies.back().ends_group) copies.push_back({nullptr, nullptr, 0, false});
  copies.back().ends_group = true;
}
template <int PENDING> static void copy_wait() {
  std::vector<Copy>& copies = fibers[current].copies;
  while (open_groups() > PENDING) {
    const Copy c = copies.front();
    copies.erase(copies.begin());
    if (c.to) std::memset(c.to, 0, 16), std::memcpy(c.to, c.from, c.bytes);
  }
}
static void wait_for_copies() { copy_commit(), copy_wait<0>(); }
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
static int used_bytes = SHARED_BYTES;  // of shared memory, by the launch
// Clusters run one after another. Returns 0, 1 for a deadlock, 2 for a write past `used_bytes`. Shared memory starts as NaN.
static int launch_cluster(std::vector<std::vector<char>>& stacks) {
  for (char* p : shared_memory) std::memset(p, 0xFF, SHARED_BYTES);
  int left = THREADS * CLUSTER;
  fibers.assign(left, Fiber()), warps.assign(left / 32, Warp());
  meetings.assign(CLUSTER, Meeting()), cluster_meeting = Meeting();
  for (int i = 0; i < (int)fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    fiber.thread = i % THREADS, fiber.cta = i / THREADS;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i].data(), fiber.context.uc_stack.ss_size = stacks[i].size();
    makecontext(&fiber.context, run_fiber, 0);
  }
  while (left > 0) {
    const long before = progress;
    for (current = 0; current < (int)fibers.size(); ++current) {
      if (fibers[current].done) continue;
      swapcontext(&scheduler, &fibers[current].context);
      left -= fibers[current].done;
    }
    if (progress == before) return 1;
  }
  for (char* p : shared_memory)
    if (std::any_of(p + used_bytes, p + SHARED_BYTES, [](char byte) { return byte != -1; })) return 2;
  return 0;
}
static int launch(const int* grid, void (*kernel)()) {
  entry = kernel;
  std::vector<std::vector<char>> stacks(THREADS * CLUSTER, std::vector<char>(16 * 1024));
  for (int i = 0; i < CLUSTER; ++i) shared_memory.push_back((char*)std::aligned_alloc(1024, SHARED_BYTES));
  int stuck = 0;
  for (now_z = 0; now_z < grid[2]; ++now_z)
    for (now_y = 0; now_y < grid[1]; ++now_y)
      for (first_cta = 0; first_cta < grid[0] && !stuck; first_cta += CLUSTER) stuck = launch_cluster(stacks);
  for (char* p : shared_memory) std::free(p);
  shared_memory.clear();
  return stuck;
}
