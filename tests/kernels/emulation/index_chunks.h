// After dense.h and the kernel's constants: what deepinfer/kernels/cuda/index_chunks.cu needs besides. Products run as
// late as the kernel allows, and copies at once: whatever is overwritten too soon gives a wrong result.

#define __grid_constant__
static struct { int x; } gridDim;
static const char *keys_begin, *keys_end;

// ---------------------------------------------------------------- meetings and warps
template <int PER_THREAD> static void give_registers() {}
template <int PER_THREAD> static void take_registers() {}
static void wait_for_phase(u32 address, u32 parity) { barrier_wait(address, parity); }
static void arrive_when_copied(u32 address) { barrier_arrive(address); }
static int __shfl_up_sync(u32, int value, int step) { return from_lane(value, max((int)threadIdx.x % 32 - step, 0)); }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static u32 __ballot_sync(u32, bool holds) {
  Warp& warp = my_warp();
  warp.values[threadIdx.x % 32][0] = holds;
  __syncwarp();
  u32 bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= warp.values[lane][0] << lane;
  __syncwarp();
  return bits;
}

// ---------------------------------------------------------------- memory
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static void copy_word(u32 to, const void* from) {
  needs_earlier_kernels();
  if (to % 4 || (uintptr_t)from % 4) fail("misaligned word");
  std::memcpy(at(to), from, 4);
}

static void copy_bulk(u32 to, const void* from, u32 bytes, u32 address) {
  needs_earlier_kernels();
  const char* p = (const char*)from;
  if (to % 16 || (uintptr_t)p % 16 || bytes % 16) fail("misaligned copy");
  if (p < keys_begin || p + bytes > keys_end) fail("copy from outside of the keys");
  at(to + bytes - 1), std::memcpy(at(to), p, bytes);
  bytes_arrive(address, bytes);
}

// A map has the address, rows, columns, bytes between rows and rows of a box.
static void copy_box(u32 to, const TensorMap* map, int column, int row, u32 address) {
  needs_earlier_kernels();
  const u64* m = map->opaque;
  if (to % 1024 || m[4] != N || column < 0) fail("a box that does not fit its place");
  for (int r = 0; r < N; ++r)
    for (int c = 0; c < 64; ++c) {
      const bool exists = row + r < (int)m[1] && column + c < (int)m[2];
      *(u16*)at(swizzled(to + r * 128 + c * 2)) = exists ? ((const u16*)(m[0] + (row + r) * m[3]))[column + c] : 0;
    }
  bytes_arrive(address, N * 128);
}

// ---------------------------------------------------------------- arithmetic

struct Multiply { float* d; const u32* a; u64 b; bool adds, ends_group; };
static std::vector<Multiply> queues[1024];  // of each thread

static void wgmma_fence() {}
static void product(float* d, const u32* a, u64 b, int adds) { queues[current].push_back({d, a, b, adds != 0, false}); }
static void wgmma_commit() { queues[current].back().ends_group = true; }

static void multiply(const Multiply& m) {  // a warp's part of wgmma.m64nNk16: A in registers, B swizzled
  if (m.b >> 62 != 1 || (m.b >> 32 & 0x3FFF) != 64) fail("a descriptor of another layout");
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  std::memcpy(warp.values[lane], m.a, 16);
  __syncwarp();
  float rows[2][16];
  for (int k = 0; k < 16; ++k)
    for (int high = 0; high < 2; ++high)
      rows[high][k] = bf16(warp.values[lane / 4 * 4 + k % 8 / 2][2 * (k / 8) + high] >> 16 * (k % 2) & 0xFFFF);
  const u32 start = (u32)(m.b & 0x3FFF) << 4;
  for (int i = 0; i < N / 2; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = m.adds ? m.d[i] : 0;
    for (int k = 0; k < 16; ++k)
      sum += rows[i / 2 % 2][k] * bf16(*(const u16*)at(swizzled(start + column * 128 + k * 2)));
    m.d[i] = sum;
  }
  __syncwarp();
}

template <int PENDING> static void wgmma_wait() {
  std::vector<Multiply>& queue = queues[current];
  int groups = 0;
  for (const Multiply& m : queue) groups += m.ends_group;
  while (groups > PENDING) {
    multiply(queue.front());
    groups -= queue.front().ends_group;
    queue.erase(queue.begin());
  }
}
