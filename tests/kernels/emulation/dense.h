// Plays the GPU for deepinfer/kernels/cuda/dense_skinny.cu on a CPU: its section "instructions" in plain C++. It also
// finds accesses outside of the weights or of shared memory.

// ---------------------------------------------------------------- fibers
static const u32 SHARED_BYTES = 256 * 1024, BARRIER_OFFSET = 240 * 1024;
struct Warp { Meeting meeting; u32 values[32][6]; };
struct Fiber { ucontext_t context; bool done; int thread, cta; };
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
static uint4 load_weights(const void* p) { return *(const uint4*)in_weights(p, 16); }
static uint4 load_shared(u32 address) { return *(const uint4*)at(address); }
static void copy_async(u32 to, const void* from, u32 bytes) {
  if (to % 16 || (uintptr_t)from % 16) fail("misaligned copy");
  std::memset(at(to), 0, 16), std::memcpy(at(to), from, bytes);
}
static void wait_for_copies() {}
static void wait_for_earlier_kernels() {}
static void let_next_kernel_start() {}

struct Barrier { short pending; u16 phase; int bytes; };
static Barrier& barrier(u32 address) { return *(Barrier*)at(address); }
static void settle(Barrier& b) { if (b.pending == 0 && b.bytes == 0) b.pending = 1, ++b.phase, ++progress; }
static void barrier_init(u32 address, u32) { barrier(address) = {1, 0, 0}; }
static void barriers_ready() {}
static void barrier_expect(u32 address, u32 bytes) {
  Barrier& b = barrier(address);
  if (b.pending == 0) fail("a stage is filled twice");
  --b.pending, b.bytes += bytes, settle(b);
}
static void barrier_wait(u32 address, u32 parity) { while ((barrier(address).phase & 1) == parity) yield(); }
static void copy_weights(u32 to, const void* from, u32 address) {
  std::memcpy(at(to), in_weights(from, 2048), 2048);
  barrier(address).bytes -= 2048, settle(barrier(address));
}

static u32 cluster_rank() { return fibers[current].cta; }
static void cluster_start() {}
static void cluster_started() { meet(start_meeting, cta_threads * CLUSTER); }
static void cluster_barrier() { meet(cluster_meeting, cta_threads * CLUSTER); }
static u32 address_in(u32 address, int rank) { return (address & 0xFFFFF) | (u32)rank << 20; }
static void store_sum(u32 address, float value) { std::memcpy(at(address), &value, 4); }

// ---------------------------------------------------------------- arithmetic
static float bf16(u32 bits) { return __int_as_float(bits << 16); }
static u32 times(u32 a, u32 b) {
  return to_bf16(bf16(a & 0xFFFF) * bf16(b & 0xFFFF)) | to_bf16(bf16(a >> 16) * bf16(b >> 16)) << 16;
}
static void load_matrices(u32 (&b)[4], u32 address) {  // ldmatrix: lane 8 j + r has the address of row r of matrix j
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  warp.values[lane][0] = address;
  __syncwarp();
  for (int j = 0; j < 4; ++j) b[j] = *(const u32*)at(warp.values[j * 8 + lane / 4][0] + lane % 4 * 4);
  __syncwarp();
}
static void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {  // mma.m16n8k16
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  const u32 registers[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(warp.values[lane], registers, sizeof registers);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {  // row lane / 4 + 8 (i / 2), column 2 (lane % 4) + i % 2
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int half = k / 8, quad = k % 8 / 2, side = 16 * (k % 2);
      const u32 a = warp.values[row * 4 + quad][2 * half + i / 2], b = warp.values[column * 4 + quad][4 + half];
      c[i] += bf16(a >> side & 0xFFFF) * bf16(b >> side & 0xFFFF);
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
        for (current = 0; current < total; ++current) {
          if (fibers[current].done) continue;
          swapcontext(&scheduler, &fibers[current].context);
          left -= fibers[current].done;
        }
        if (progress == before && left > 0) problem = 1;
      }
      for (char* p : shared_memory)
        if (std::any_of(p + shared_bytes, p + BARRIER_OFFSET, [](char byte) { return byte != -1; })) problem = 2;
    }
  for (char* p : shared_memory) std::free(p);
  shared_memory.clear();
  return problem;
}
