// After dense.h and the kernel's constants: what deepinfer/kernels/cuda/dense_wgmma.cu needs besides. Products run as
// late as the kernel allows, and copies at once: whatever is overwritten too soon gives a wrong result. Or copies, too, run
// late (LATE): when somebody waits for their barrier. Then what is read too soon does.

#define __grid_constant__
static struct { int x; } gridDim;
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
struct LateCopy { u32 barrier; std::function<void()> run; };
static std::vector<LateCopy> late_copies;
static void copy_now_or_late(u32 address, std::function<void()> run) {
  if (LATE) late_copies.push_back({address, run});
  else run();
}
static void wait_or_give_up(u32 address, u32 parity) {
  while ((barrier(address).phase & 1) == parity) {
    const auto copy = std::find_if(late_copies.begin(), late_copies.end(),
                                   [&](const LateCopy& c) { return c.barrier == address; });
    if (copy == late_copies.end()) {
      yield();
      continue;
    }
    const auto run = copy->run;
    late_copies.erase(copy), run();
  }
}
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
static const u32 *scales_begin, *scales_end;
static u32 __ldg(const u32* p) {
  if (p < scales_begin || p >= scales_end) fail("scales that do not exist");
  return *p;
}
static float4 load_sums(u32 address) { return *(const float4*)at(address); }

// A map has the address, block rows, chunks and block rows of a box.
static void copy_blocks(u32 to, const TensorMap* map, int chunk, int block, u32 address) {
  const u64* m = map->opaque;
  if (to % 1024 || m[3] != TILE_BLOCKS || chunk < 0 || chunk >= (int)m[2] || block < 0) fail("blocks that do not exist");
  copy_now_or_late(address, [=] {
    for (int b = 0; b < TILE_BLOCKS; ++b) {
      if (block + b >= (int)m[1]) std::memset(at(to + b * 2048), 0, 2048);
      else std::memcpy(at(to + b * 2048), in_weights((const char*)m[0] + ((block + b) * m[2] + chunk) * 2048, 2048), 2048);
    }
    bytes_arrive(address, W_BYTES);
  });
}

// A map has the address, rows, columns, bytes between rows and rows of a box.
static void copy_box(u32 to, const TensorMap* map, int column, int row, u32 address) {
  const u64* m = map->opaque;
  if (to % 1024 || m[4] != WIDTH || column < 0) fail("a box that does not fit its place");
  needs_earlier_kernels();
  copy_now_or_late(address, [=] {
    for (int r = 0; r < WIDTH; ++r)
      for (int c = 0; c < 64; ++c) {
        const bool exists = row + r < (int)m[1] && column + c < (int)m[2];
        const u16 value = exists ? ((const u16*)(m[0] + (row + r) * m[3]))[column + c] : 0;
        *(u16*)at(swizzled(to + r * 128 + c * 2)) = value;
      }
    bytes_arrive(address, WIDTH * 128);
  });
}

static u32 __shfl_xor_sync(u32, u32 value, int mask) { return from_lane(value, threadIdx.x % 32 ^ mask); }
static u32 transposed(u32 pair) {
  Warp& warp = my_warp();
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  warp.values[lane][0] = pair;
  __syncwarp();
  u32 found = 0;
  for (int i = 0; i < 2; ++i)
    found |= (warp.values[(column + i) * 4 + row / 2][0] >> row % 2 * 16 & 0xFFFF) << 16 * i;
  __syncwarp();
  return found;
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
  for (int i = 0; i < WIDTH / 2; ++i) {
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
