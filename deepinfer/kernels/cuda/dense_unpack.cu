// Packed FP8 weights (dense/packing.py) to bf16 [N, K] rows: what cuBLAS reads when there are many activation rows.
// Compile-time constants: K (columns that exist).

typedef unsigned int u32;

#define NUM_CHUNKS ((K + 63) / 64)
#define WARPS 4
#define ROW_WORDS 36  // 32 words of two columns; padded so that eight rows meet no bank twice

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // two bf16 each
  asm("mul.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// ---------------------------------------------------------------- the kernel
__device__ __forceinline__ u32 decode_pair(u32 codes, u32 scale) {  // see dense_skinny.cu
  return times(((codes >> 4) & 0x07F007F0u) | (codes & 0x80008000u), scale);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
dense_unpack(const uint4* __restrict__ weights, const u32* __restrict__ scales, char* __restrict__ wide,
             int num_blocks) {
  __shared__ __align__(16) u32 shared[WARPS][32][ROW_WORDS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x * WARPS + warp;
  if (block >= num_blocks) return;
  const int block_row = block / NUM_CHUNKS, chunk = block % NUM_CHUNKS;
  const u32 pair = scales[block];
  u32(*tile)[ROW_WORDS] = shared[warp];
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const uint4 codes = weights[(long long)block * 128 + piece * 32 + lane];
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const u32 scale = __byte_perm(pair, pair, q < 2 ? 0x1010 : 0x3232);
      tile[piece * 8 + g][q * 8 + t] = decode_pair(words[q], scale);
      tile[piece * 8 + g][q * 8 + 4 + t] = decode_pair(words[q] << 8, scale);
    }
  }
  __syncwarp();
  const int columns = min(64, K - chunk * 64);
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // 8 lanes write the 128 bytes of a row
    const int row = i * 4 + lane / 8, column = lane % 8 * 8;
    if (column < columns) {
      const uint4 value = *(const uint4*)&tile[row][column / 2];
      *(uint4*)(wide + ((long long)(block_row * 32 + row) * K + chunk * 64 + column) * 2) = value;
    }
  }
}
