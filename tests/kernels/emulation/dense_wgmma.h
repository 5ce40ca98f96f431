// After dense.h and the kernel's constants: what deepinfer/kernels/cuda/dense_wgmma.cu needs besides. Products run as
// late as the kernel allows, and copies at once: whatever is overwritten too soon gives a wrong result.

#define __grid_constant__
struct uint2 { u32 x, y; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static u32 to_bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

// ---------------------------------------------------------------- meetings
static Meeting consumer_meetings[CLUSTER];
static void consumer_barrier() { meet(consumer_meetings[fibers[current].cta], 32 * CONSUMER_WARPS); }
template <int PER_THREAD> static void give_registers() {}
template <int PER_THREAD> static void take_registers() {}

// ---------------------------------------------------------------- memory
static void wait_or_give_up(u32 address, u32 parity) { barrier_wait(address, parity); }
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
static float4 load_sums(u32 address) { return *(const float4*)at(address); }

static void copy_bulk(u32 to, const void* from, u32 bytes, u32 address) {
  std::memcpy(at(to), in_weights(from, bytes), bytes);
  bytes_arrive(address, bytes);
}

// A map has the address, rows, columns, bytes between rows and rows of a box.
static void copy_box(u32 to, const TensorMap* map, int column, int row, u32 address) {
  const u64* m = map->opaque;
  if (to % 1024 || m[4] != NB || column < 0) fail("a box that does not fit its place");
  for (int r = 0; r < NB; ++r)
    for (int c = 0; c < 64; ++c) {
      const bool exists = row + r < (int)m[1] && column + c < (int)m[2];
      const u16 value = exists ? ((const u16*)(m[0] + (row + r) * m[3]))[column + c] : 0;
      *(u16*)at(swizzled(to + r * 128 + c * 2)) = value;
    }
  bytes_arrive(address, NB * 128);
}

// ---------------------------------------------------------------- arithmetic
struct Multiply { float* d; const u32* a; u64 b; bool ends_group; };
static std::vector<Multiply> queues[1024 * CLUSTER];  // of each thread

static void wgmma_fence() {}
static void wgmma(float* d, const u32* a, u64 b) { queues[current].push_back({d, a, b, false}); }
static void wgmma_commit() { queues[current].back().ends_group = true; }

static void multiply(const Multiply& m) {  // a warp's part of wgmma.m64nNk16: A in registers, B swizzled
  if (m.b >> 62 != 1 || (m.b >> 32 & 0x3FFF) != 64) fail("a descriptor of another layout");
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32;
  std::memcpy(warp.values[lane], m.a, 16);
  __syncwarp();
  const u32 start = (u32)(m.b & 0x3FFF) << 4;
  for (int i = 0; i < NB / 2; ++i) {
    const int high = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 pair = warp.values[lane / 4 * 4 + k % 8 / 2][2 * (k / 8) + high];
      const u16 b = *(const u16*)at(remote_address(swizzled(start + column * 128 + k * 2), fibers[current].cta));
      m.d[i] += bf16(pair >> 16 * (k % 2) & 0xFFFF) * bf16(b);
    }
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
