// Packed FP8 weights (dense/packing.py) to [N, K] rows: what cuBLAS reads when there are many activation rows.
// Compile-time constants: K (columns that exist), ROW_SCALED (1: to e4m3 codes with one scale for each 32 rows, see
// dense/row_scaled.py; 0: to bf16).

#include "types.cuh"

#define NUM_CHUNKS ((K + 63) / 64)
#define WARPS 4
// Words of a row's 64 columns, padded so that what a warp writes at a time meets few banks twice.
#define ROW_WORDS (ROW_SCALED ? 20 : 36)
#define WORD_COLUMNS (ROW_SCALED ? 4 : 2)

// ---------------------------------------------------------------- instructions
#include "numbers.cuh"

// ---------------------------------------------------------------- the kernel
#include "dense_decode.cuh"

// Two neighbouring columns, as they are kept in a row.
__device__ __forceinline__ void store_pair(u32* row, int column, u32 pair) {
  if (ROW_SCALED) ((u16*)row)[column / 2] = to_e4m3_pair(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  else row[column / 2] = pair;
}

// The scale of a block's column half (a bf16 times 2^120) over that of its rows, 2^(row_byte - 127): at most 2^7, but of
// tiles of zeros.
__device__ __forceinline__ u32 over_row(u32 scale, u32 row_byte) {
  return (u32)min(max((int)(scale >> 7) + 127 - (int)row_byte, 0), 254) << 7;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
dense_unpack(const uint4* __restrict__ weights, const u32* __restrict__ scales, char* __restrict__ wide,
             int num_blocks, const u8* __restrict__ row_bytes) {
  __shared__ __align__(16) u32 shared[WARPS][32][ROW_WORDS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x * WARPS + warp;
  if (block >= num_blocks) return;
  const int block_row = block / NUM_CHUNKS, chunk = block % NUM_CHUNKS;
  u32 pair = scales[block];
  if (ROW_SCALED) {
    const u32 row_byte = row_bytes[block_row];
    pair = over_row(pair & 0xFFFF, row_byte) | over_row(pair >> 16, row_byte) << 16;
  }
  u32(*tile)[ROW_WORDS] = shared[warp];
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const uint4 codes = weights[(long long)block * 128 + piece * 32 + lane];
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const u32 scale = __byte_perm(pair, pair, q < 2 ? 0x1010 : 0x3232);
      store_pair(tile[piece * 8 + g], q * 16 + 2 * t, decode_pair(words[q], scale));
      store_pair(tile[piece * 8 + g], q * 16 + 8 + 2 * t, decode_pair(words[q] << 8, scale));
    }
  }
  __syncwarp();
  const int columns = min(64, K - chunk * 64), each = 4 * WORD_COLUMNS, lanes = 64 / each, bytes = 4 / WORD_COLUMNS;
#pragma unroll
  for (int i = 0; i < lanes; ++i) {  // `lanes` lanes write a row's columns, 16 bytes each
    const int row = i * (32 / lanes) + lane / lanes, column = lane % lanes * each;
    if (column < columns) {
      const uint4 value = *(const uint4*)&tile[row][column / WORD_COLUMNS];
      *(uint4*)(wide + ((long long)(block_row * 32 + row) * K + chunk * 64 + column) * bytes) = value;
    }
  }
}
