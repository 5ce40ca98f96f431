// One expert's FP4 matrix, as the checkpoint stores it, to the tiles of deepinfer/kernels/moe/packing.py.
//
// A thread has a pair of words: 8 columns of rows g and g + 8 of a 16-row piece.

#include "types.cuh"

struct __align__(8) Pair { u32 u, v; };

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ int thread_number() { return blockIdx.x * blockDim.x + threadIdx.x; }

// ---------------------------------------------------------------- the kernel
// Codes 2j and 2j + 1 as the halves of a register: bits s e e m at 15, 8, 7, 6.
__device__ __forceinline__ u32 spread(u32 codes, int j) {
  const u32 low = codes >> 8 * j & 15, high = codes >> (8 * j + 4) & 15;
  return ((low & 8) << 12 | (low & 7) << 6) | ((high & 8) << 12 | (high & 7) << 6) << 16;
}

__device__ __forceinline__ u32 rotate(u32 x, int left) { return x << left | x >> (32 - left); }

__device__ __forceinline__ u32 first_three(u32 codes) {
  return spread(codes, 0) | rotate(spread(codes, 1), 6) | spread(codes, 2) >> 6;
}

// codes: [n, k / 2]. scales: [n, k / 32]. packed: [k / 64, n / 64, 2176]. paired: rows are gate, then up.
extern "C" __global__ void __launch_bounds__(256)
moe_pack(const u8* codes, const u8* scales, u8* packed, int n, int k, int paired) {
  const u32 KEPT = 0x0C180C18u;
  int rest = thread_number();
  if (rest >= n / 16 * k) return;
  const int t = rest % 4, h = rest / 4 % 2;
  rest /= 8;
  const int chunk = rest % (k / 64);
  rest /= k / 64;
  const int g = rest % 8, m = rest / 8 % 4, tile = rest / 32;
  const int row = paired ? 32 * tile + 8 * m + g : 64 * tile + 16 * m + g, other = row + (paired ? n / 2 : 8);
  const int column = chunk * 64 + h * 32;
  const u32 of_u = *(const u32*)(codes + (long long)row * (k / 2) + (column + 8 * t) / 2);
  const u32 of_v = *(const u32*)(codes + (long long)other * (k / 2) + (column + 8 * t) / 2);
  const u32 last = rotate(spread(of_u, 3), 4) | spread(of_v, 3) >> 2;
  const Pair words = {first_three(of_u) | (last & KEPT), first_three(of_v) | (last & ~KEPT) >> 2};
  u8* to = packed + ((long long)chunk * (n / 64) + tile) * 2176;
  *(Pair*)(to + m * 512 + (4 * g + t) * 16 + h * 8) = words;
  if (t == 0) {
    to[2048 + 16 * g + 4 * m + 2 * h] = scales[(long long)row * (k / 32) + column / 32] + 126;
    to[2048 + 16 * g + 4 * m + 2 * h + 1] = scales[(long long)other * (k / 32) + column / 32] + 126;
  }
}
