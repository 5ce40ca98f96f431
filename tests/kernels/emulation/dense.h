// Plays the GPU for deepinfer/kernels/cuda/dense_*.cu and their relatives on a CPU: what their sections "instructions"
// have in common, in plain C++. It also finds accesses outside of the weights or of shared memory.

// ---------------------------------------------------------------- fibers
static const u32 SHARED_BYTES = 256 * 1024, BARRIER_OFFSET = 240 * 1024;
struct Warp { Meeting meeting; u32 values[32][6]; };
struct Fiber { ucontext_t context; bool done, waited; int thread, cta; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<Meeting> cta_meetings;
static Meeting start_meeting, cluster_meeting;
static std::vector<char*> shared_memory;  // per CTA of the cluster
static int first_cta, grid_row, cta_threads;
static const char *weights_begin, *weights_end;

struct ThreadIndex { int x = fibers[current].thread; };
struct BlockIndex { int x = first_cta + fibers[current].cta, y = grid_row; };

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
static Warp& my_warp() { return warps[(fibers[current].cta * cta_threads + threadIdx.x) / 32]; }
static void __syncwarp() { meet(my_warp().meeting, 32); }
static void __syncthreads() { meet(cta_meetings[fibers[current].cta], cta_threads); }
static u32 from_lane(u32 value, int lane) {
  Warp& warp = my_warp();
  warp.values[threadIdx.x % 32][0] = value;
  __syncwarp();
  const u32 other = warp.values[lane][0];
  __syncwarp();
  return other;
}
static u32 __shfl_sync(u32, u32 value, int lane) { return from_lane(value, lane); }
static float __shfl_xor_sync(u32, float value, int mask) {
  return __int_as_float(from_lane(__float_as_int(value), threadIdx.x % 32 ^ mask));
}

// ---------------------------------------------------------------- memory
static char* at(u32 address) {  // CTA in the high bits
  if (address >> 20 >= CLUSTER || (address & 0xFFFFF) >= SHARED_BYTES) fail("address outside of shared memory");
  return shared_memory[address >> 20] + (address & 0xFFFFF);
}
static u32 shared_address(const void* p) {
  return (u32)fibers[current].cta << 20 | (u32)((const char*)p - shared_memory[fibers[current].cta]);
}
static const char* in_weights(const void* p, int bytes) {
  if ((const char*)p < weights_begin || (const char*)p + bytes > weights_end || (uintptr_t)p % 16) fail("bad weights");
  return (const char*)p;
}
static uint4 load_shared(u32 address) { return *(const uint4*)at(address); }
static void wait_for_earlier_kernels() { fibers[current].waited = true; }
#ifndef BESIDE
#define BESIDE 0
#endif
static void needs_earlier_kernels() {
  if (!BESIDE && !fibers[current].waited) fail("reads what an earlier kernel may still write");
}

struct Barrier { u8 count, pending; u16 phase; int bytes; };  // bytes may arrive before they are expected
static Barrier& barrier(u32 address) {
  Barrier& b = *(Barrier*)at(address);
  if (b.count == 0xFF) fail("a barrier that does not exist yet");
  return b;
}
static void settle(Barrier& b) { if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.phase, ++progress; }
static void barrier_init(u32 address, u32 count) { *(Barrier*)at(address) = {(u8)count, (u8)count, 0, 0}; }
static void barrier_arrive(u32 address) {
  Barrier& b = barrier(address);
  if (b.pending == 0) fail("an arrival that nobody expects");
  --b.pending, settle(b);
}
static void bytes_arrive(u32 address, u32 bytes) {
  Barrier& b = barrier(address);
  b.bytes -= bytes, settle(b);
}
static void barriers_ready() {}
static void barrier_expect(u32 address, u32 bytes) {
  Barrier& b = barrier(address);
  if (b.pending == 0) fail("a stage is filled twice");
  --b.pending, b.bytes += bytes, settle(b);
}
static void barrier_wait(u32 address, u32 parity) { while ((barrier(address).phase & 1) == parity) yield(); }

static u32 cluster_rank() { return fibers[current].cta; }
static void cluster_barrier() { meet(cluster_meeting, cta_threads * CLUSTER); }
static u32 remote_address(u32 address, u32 rank) { return (address & 0xFFFFF) | (u32)rank << 20; }

// ---------------------------------------------------------------- arithmetic
static float bf16(u32 bits) { return __int_as_float(bits << 16); }
static u32 times(u32 a, u32 b) {
  return to_bf16(bf16(a & 0xFFFF) * bf16(b & 0xFFFF)) | to_bf16(bf16(a >> 16) * bf16(b >> 16)) << 16;
}

// ---------------------------------------------------------------- launch
static void (*entry)();
static void run_fiber() {
  entry();
  fibers[current].done = true, ++progress;
  yield();
}

// Clusters run one after another. Returns 0, 1 for a deadlock, 2 for a write past `shared_bytes`. Memory starts as NaN.
static int launch(int columns, int rows, int threads, int shared_bytes, void (*kernel)()) {
  entry = kernel, cta_threads = threads;
  const int total = threads * CLUSTER;
  std::vector<std::vector<char>> stacks(total, std::vector<char>(64 * 1024));
  for (int i = 0; i < CLUSTER; ++i) shared_memory.push_back((char*)std::aligned_alloc(1024, SHARED_BYTES));
  int problem = 0;
  for (grid_row = 0; grid_row < rows && !problem; ++grid_row)
    for (first_cta = 0; first_cta < columns && !problem; first_cta += CLUSTER) {
      for (char* p : shared_memory) std::memset(p, 0xFF, SHARED_BYTES);
      fibers.assign(total, Fiber()), warps.assign(total / 32, Warp()), cta_meetings.assign(CLUSTER, Meeting());
      start_meeting = cluster_meeting = Meeting();
      for (int i = 0; i < total; ++i) {
        Fiber& fiber = fibers[i];
        fiber.thread = i % threads, fiber.cta = i / threads;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks[i].data(), fiber.context.uc_stack.ss_size = stacks[i].size();
        makecontext(&fiber.context, run_fiber, 0);
      }
      for (int left = total; left > 0 && !problem;) {
        const long before = progress;
        for (int cta = 0; cta < CLUSTER; ++cta)  // each as far as it gets alone: the worst case for the others
          for (long mine = -1; mine != progress;) {
            mine = progress;
            for (current = cta * threads; current < (cta + 1) * threads; ++current) {
              if (fibers[current].done) continue;
              swapcontext(&scheduler, &fibers[current].context);
              left -= fibers[current].done;
            }
          }
        if (progress == before && left > 0) problem = 1;
      }
      for (int cta = 0; cta < CLUSTER && !problem; ++cta)
        if (std::none_of(&fibers[cta * threads], &fibers[cta * threads] + threads, [](const Fiber& f) { return f.waited; }))
          fail("ends without having waited for earlier kernels");
      for (char* p : shared_memory)
        if (std::any_of(p + shared_bytes, p + BARRIER_OFFSET, [](char byte) { return byte != -1; })) problem = 2;
    }
  for (char* p : shared_memory) std::free(p);
  shared_memory.clear();
  return problem;
}
