// Activations of moe_fp8.cu: lines of e4m3, 128 columns of a row in 128 bytes, with one power of two for each row.
//
// Lines are [lines, capacity], rows in the order of the experts (expert_blocks.py); 16-byte piece i of a line lies at
// piece i ^ row % 8, and the columns have the order that the head of moe_fp8.cu gives. Activations were rounded by Q8
// before, in groups of 32: one power of two for the row keeps them as they are, except for those that are more than
// 2**14 below the row's largest, which become subnormal.
//
// Compile-time constants: GATHER (1: rows to their places, 2: the same of rows that come as codes, 0: results of the gate-up product, which have a power for
// every 32 columns, to one for each row), LINES. Gather: TOP (pairs per row). Else: BLOCK (8 or 16), EXPERTS.

#include "types.cuh"

#define LINE_BYTES 128
#if GATHER
#define PIECES (8 * LINES)                 // of 16 columns, a thread for each
#define THREADS ((PIECES + 31) / 32 * 32)
#else
#define GROUPS (4 * LINES)                 // of 32 columns
#define THREADS 256
#endif

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#include "numbers.cuh"

__device__ __forceinline__ u32 times_half(u32 codes, u32 factor) {  // four e4m3 times a half-precision float
  u32 result;
  asm("{ .reg .b16 a, b; .reg .b32 c, d, f;\n"
      "mov.b32 {a, b}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 c, a;\n"
      "cvt.rn.f16x2.e4m3x2 d, b;\n"
      "mov.b32 f, %2;\n"
      "mul.rn.f16x2 c, c, f;\n"
      "mul.rn.f16x2 d, d, f;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, c;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 b, d;\n"
      "mov.b32 %0, {a, b}; }" : "=r"(result) : "r"(codes), "r"(factor * 0x10001));
  return result;
}

#if GATHER
// ---------------------------------------------------------------- gather
// Codes of a thread's 16 columns, two blocks of 8, to the places of the row's pairs, and once for each place the row's
// power of two and the pair's route weight.
__device__ __forceinline__ void store_places(const u32 (&even)[2], const u32 (&odd)[2], float power, const int (&to)[TOP], int row,
                                             const float* weights, char* ordered, float* powers, float* ordered_weights,
                                             int capacity) {
  const int thread = threadIdx.x;
  // Two neighbouring threads have 32 columns; the first writes the even ones of both.
  const bool is_odd = thread % 2;
  const u32 first = __shfl_xor_sync(~0u, is_odd ? even[0] : odd[0], 1);
  const u32 second = __shfl_xor_sync(~0u, is_odd ? even[1] : odd[1], 1);
  const uint4 out = is_odd ? uint4{first, second, odd[0], odd[1]} : uint4{even[0], even[1], first, second};
#pragma unroll
  for (int k = 0; k < TOP; ++k) {
    if (to[k] < 0) continue;
    if (thread == 0) powers[to[k]] = power, ordered_weights[to[k]] = weights[row * TOP + k];
    char* line = ordered + ((long long)(thread / 8) * capacity + to[k]) * LINE_BYTES;
    if (thread < PIECES) *(uint4*)(line + (thread % 8 ^ to[k] % 8) * 16) = out;
  }
}

#if GATHER == 1
// Each row x[row] to the places of its pairs, with their route weights and the row's power of two.
// place: [rows * TOP], -1 for none. counters: [2], set to 0 for the two products that follow.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_fp8_gather(const uint4* x, const int* place, const float* weights, char* ordered, float* powers,
               float* ordered_weights, int* counters, int capacity) {  // not restrict: written while this starts
  __shared__ float largest_of_warp[THREADS / 32];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = blockIdx.x, thread = threadIdx.x;
  if (row == 0 && thread < 2) counters[thread] = 0;
  int to[TOP];
#pragma unroll
  for (int k = 0; k < TOP; ++k) to[k] = place[row * TOP + k];
  uint4 in[2] = {};  // 8 columns each
  if (thread < PIECES) {
    const uint4* from = x + ((long long)row * PIECES + thread) * 2;
    in[0] = from[0], in[1] = from[1];
  }
  const u32 pairs[8] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w};
  float v[16], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    v[i] = __uint_as_float(i % 2 ? pairs[i / 2] & 0xFFFF0000u : pairs[i / 2] << 16);
    largest = fmaxf(largest, fabsf(v[i]));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (thread % 32 == 0) largest_of_warp[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) largest = fmaxf(largest, largest_of_warp[i]);
  // The smallest power of two that is at least max(largest, 1e-4) / 448; 448 is 1.75 * 2^8.
  const int exponent = ((__float_as_int(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
  const float down = __int_as_float((127 - exponent) << 23), up = __int_as_float((exponent + 127) << 23);
  u32 even[2], odd[2];  // of the two blocks of 8 columns
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    float c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = v[8 * b + i] * down;
    even[b] = to_e4m3_pair(c[4], c[0]) | to_e4m3_pair(c[6], c[2]) << 16;
    odd[b] = to_e4m3_pair(c[5], c[1]) | to_e4m3_pair(c[7], c[3]) << 16;
  }
  store_places(even, odd, up, to, row, weights, ordered, powers, ordered_weights, capacity);
}
#else
// The same of codes with a power for each row, [rows, 16 * PIECES] and [rows].
extern "C" __global__ void __launch_bounds__(THREADS)
moe_fp8_gather(const uint4* codes, const float* given, const int* place, const float* weights, char* ordered, float* powers,
               float* ordered_weights, int* counters, int capacity) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = blockIdx.x, thread = threadIdx.x;
  if (row == 0 && thread < 2) counters[thread] = 0;
  int to[TOP];
#pragma unroll
  for (int k = 0; k < TOP; ++k) to[k] = place[row * TOP + k];
  uint4 in = {};
  if (thread < PIECES) in = codes[(long long)row * PIECES + thread];
  // Of 8 columns in two words, the even ones in the order 4, 0, 6, 2, the odd ones likewise.
  const u32 even[2] = {__byte_perm(in.x, in.y, 0x2604), __byte_perm(in.z, in.w, 0x2604)};
  const u32 odd[2] = {__byte_perm(in.x, in.y, 0x3715), __byte_perm(in.z, in.w, 0x3715)};
  store_places(even, odd, given[row], to, row, weights, ordered, powers, ordered_weights, capacity);
}
#endif
#else
// ---------------------------------------------------------------- one power for a row
// A CTA has BLOCK rows. exponents: [GROUPS, capacity] of lines that have one for every 32 columns, plus 128.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_fp8_align(char* lines, const u8* exponents, float* powers, const int* offsets, int capacity) {
  __shared__ u8 of_group[GROUPS][BLOCK];
  __shared__ int largest_of[THREADS / BLOCK][BLOCK];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int first = blockIdx.x * BLOCK, thread = threadIdx.x, mine = thread % BLOCK;
  if (first >= offsets[EXPERTS]) return;
  uint4 pieces[(LINES * BLOCK * 8 + THREADS - 1) / THREADS];
#pragma unroll
  for (int k = 0; k < sizeof(pieces) / 16; ++k) {
    const int i = k * THREADS + thread, line = i / (8 * BLOCK);
    if (line < LINES)
      pieces[k] = *(const uint4*)(lines + ((long long)line * capacity + first) * LINE_BYTES + i % (8 * BLOCK) * 16);
  }
  int largest = 0;
  for (int group = thread / BLOCK; group < GROUPS; group += THREADS / BLOCK) {
    const u8 exponent = exponents[(long long)group * capacity + first + mine];
    of_group[group][mine] = exponent, largest = max(largest, (int)exponent);
  }
  largest_of[thread / BLOCK][mine] = largest;
  __syncthreads();
  const int row = thread / 8 % BLOCK;  // of all pieces of this thread: THREADS is a multiple of 8 * BLOCK
  int of_row = 0;
#pragma unroll
  for (int i = 0; i < THREADS / BLOCK; ++i) of_row = max(of_row, largest_of[i][row]);
  if (thread / 8 < BLOCK && thread % 8 == 0) powers[first + row] = __int_as_float((of_row - 1) << 23);
#pragma unroll
  for (int k = 0; k < sizeof(pieces) / 16; ++k) {
    const int i = k * THREADS + thread, line = i / (8 * BLOCK);
    if (line >= LINES) continue;
    const int down = min(of_row - of_group[line * 4 + (thread % 8 ^ row % 8) / 2][row], 24);
    if (down == 0) continue;
    const u32 factor = down < 15 ? (15 - down) << 10 : 1 << (24 - down);  // 2**-down
    uint4 piece = pieces[k];
    piece.x = times_half(piece.x, factor), piece.y = times_half(piece.y, factor);
    piece.z = times_half(piece.z, factor), piece.w = times_half(piece.w, factor);
    *(uint4*)(lines + ((long long)line * capacity + first) * LINE_BYTES + i % (8 * BLOCK) * 16) = piece;
  }
}
#endif
