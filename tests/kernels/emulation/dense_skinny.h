// After dense.h: the other instructions of deepinfer/kernels/cuda/dense_skinny.cu.

static uint4 load_weights(const void* p) { return *(const uint4*)in_weights(p, 16); }
static void copy_async(u32 to, const void* from, u32 bytes) {
  needs_earlier_kernels();
  if (to % 16 || (uintptr_t)from % 16) fail("misaligned copy");
  std::memset(at(to), 0, 16), std::memcpy(at(to), from, bytes);
}
static void wait_for_copies() {}
static void copy_weights(u32 to, const void* from, u32 address) {
  std::memcpy(at(to), in_weights(from, 2048), 2048);
  bytes_arrive(address, 2048);
}
static void cluster_start() {}
static void cluster_started() { meet(start_meeting, cta_threads * CLUSTER); }
static void store_sum(u32 address, float value) { std::memcpy(at(address), &value, 4); }

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
