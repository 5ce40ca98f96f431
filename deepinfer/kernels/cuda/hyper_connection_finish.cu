// Behind hyper_connection_write_read.cu: a sublayer's input, normed and rounded, and its mixes.
//
// The first blocks make the mixes, since those take longest: one thread holds a row's whole 4x4 matrix, and each of
// Sinkhorn's passes waits for the one before. A block has one row, or each of its warps has one. Behind them come PARTS
// blocks for the norm of each row.
//
// Sums over the slices of hidden: SPLIT neighbours pairwise, then groups. See the other file for why. Nothing of this
// depends on how blocks are cut.
//
// Compile-time constants: HIDDEN (a multiple of 256), SLICES (GROUPS, or 2, 4 or 8 times that), VECTORS (of 8 columns, for
// each thread), MIX_ROWS (in a block: 1, or one for each warp), ITERATIONS, MIXES, NORM_BF16 (the norm's weight is bf16,
// else float32), ROUNDED, CODES, SCALES (0 none, 1 ue8m0 bytes, 2 float32, 3 float32, one for a whole row's CODES).

#include "hyper_connection_common.cuh"

#define THREADS 160
#define GROUPS (HIDDEN / 256)
#define SPLIT (SLICES / GROUPS)
#define PARTS ((HIDDEN / 8 + THREADS * VECTORS - 1) / (THREADS * VECTORS))
#define TEAM (THREADS / MIX_ROWS)  // threads that load a row's sums
#define ROUNDS ((GROUPS * 6 + TEAM - 1) / TEAM)
#define SUM_STRIDE 28  // floats of a group's 24 products and the squares of the trunk

static_assert(HIDDEN % 256 == 0 && SPLIT * GROUPS == SLICES && (TEAM == THREADS || TEAM == 32), "shape");

struct Arguments {
  const float* partial;  // [rows, record_stride]: [SLICES, 32] products, [SLICES] squares of h, [SLICES] of the trunk
  const u16* h;          // [rows, HIDDEN]
  const void* norm;      // [HIDDEN]
  const float* scale;    // [3]
  const float* base;     // [24]
  u16* x;                // [rows, HIDDEN]
  u16* rounded;          // [rows, HIDDEN]
  u8* codes;             // [rows, HIDDEN]
  void* scales;          // [rows, HIDDEN / 32], or [rows]
  float* mixes;          // [rows, 24]
  int rows, record_stride;
  float norm_eps, hc_eps;
};

#include "hyper_connection_input.cuh"

// ---------------------------------------------------------------- sums
// The sum over the neighbours of one group.
__device__ __forceinline__ float sum_of_group(const float* from) {
  __align__(16) float parts[SPLIT];
#pragma unroll
  for (int i = 0; i < SPLIT; i += SPLIT < 4 ? 1 : 4) {
    if (SPLIT < 4) parts[i] = from[i];
    else *(Floats*)(parts + i) = *(const Floats*)(from + i);
  }
#pragma unroll
  for (int step = 1; step < SPLIT; step *= 2)
#pragma unroll
    for (int i = 0; i < SPLIT; i += 2 * step) parts[i] += parts[i + step];
  return parts[0];
}

// Sums over groups of 256 columns, [GROUPS][SUM_STRIDE]: how a row's team of threads makes them.
__device__ __forceinline__ void sum_groups(const float* record, float* sums, int thread) {
  Floats parts[ROUNDS][SPLIT];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int i = min(round * TEAM + thread, GROUPS * 6 - 1), group = i / 6, piece = i % 6;
#pragma unroll
    for (int j = 0; j < SPLIT; ++j) parts[round][j] = *(const Floats*)(record + (group * SPLIT + j) * 32 + 4 * piece);
    if (SPLIT == 8) __syncwarp();  // no room for more
  }
#pragma unroll
  for (int g = thread; g < GROUPS; g += TEAM) sums[g * SUM_STRIDE + 24] = sum_of_group(record + SLICES * 33 + g * SPLIT);
  __syncwarp();  // for the compiler: every load is on its way before any is waited for
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int i = min(round * TEAM + thread, GROUPS * 6 - 1), group = i / 6, piece = i % 6;
#pragma unroll
    for (int step = 1; step < SPLIT; step *= 2)
#pragma unroll
      for (int j = 0; j < SPLIT; j += 2 * step)
#pragma unroll
        for (int k = 0; k < 4; ++k) parts[round][j].of[k] += parts[round][j + step].of[k];
    *(Floats*)(sums + group * SUM_STRIDE + 4 * piece) = parts[round][0];
  }
}

__device__ __forceinline__ void make_mixes(const Arguments& a, int block, float* sums) {
  const int lane = threadIdx.x % 32, mix = min(lane, 23), thread = threadIdx.x % TEAM, place = threadIdx.x / TEAM;
  const float factor = a.scale[mix < 4 ? 0 : mix < 8 ? 1 : 2], offset = a.base[mix];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = block * MIX_ROWS + place;
  sums += place * (GROUPS * SUM_STRIDE);
  sum_groups(a.partial + (long long)min(row, a.rows - 1) * a.record_stride, sums, thread);
  if (MIX_ROWS == 1) __syncthreads();
  else __syncwarp();
  if (thread >= 32 || row >= a.rows) return;
  float four[4] = {};
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) four[g % 4] += sums[g * SUM_STRIDE + min(lane, 24)];
  const float sum = (four[0] + four[1]) + (four[2] + four[3]);
  const float logit = logit_of(sum, __shfl_sync(~0u, sum, 24), factor, offset, a.norm_eps);
  store_mixes(logit, lane, a.mixes + (long long)row * 24, a.hc_eps);
}

// ---------------------------------------------------------------- norm
__device__ __forceinline__ float sum_of_squares(const float* squares) {  // of h; each warp for itself
  float sum = 0.0f;
#pragma unroll
  for (int g = threadIdx.x % 32; g < GROUPS; g += 32) sum += sum_of_group(squares + g * SPLIT);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

#if SCALES == 3
static_assert(PARTS == 1 && CODES, "a block has the whole row");
// A row's rounded values, brought to one power of two: the smallest under which no code exceeds 448. A row that is not
// finite becomes NaN.
__device__ __forceinline__ void store_row_codes(const Arguments& a, const Words (&rounded)[VECTORS], int row, float* of_warp) {
  float largest = 1e-4f;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v)
#pragma unroll
    for (int p = 0; p < 4; ++p)
      largest = fmaxf(largest, fmaxf(fabsf(low_of(rounded[v].of[p])), fabsf(high_of(rounded[v].of[p]))));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) largest = fmaxf(largest, of_warp[i]);
  const int exponent = ((int)(__float_as_uint(largest) + 0x1FFFFF) >> 23) - 135;
  const u32 bits = largest <= 3.3895314e38f ? (u32)(127 - exponent) << 23 : 0x7FC00000u;  // bf16 ends there
  const float inverse = __uint_as_float(bits);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    Codes codes = {};
#pragma unroll
    for (int p = 0; p < 4; ++p)
      codes.of[p / 2] |= to_e4m3_pair(low_of(rounded[v].of[p]) * inverse, high_of(rounded[v].of[p]) * inverse) << 16 * (p % 2);
    if (column < HIDDEN) *(Codes*)(a.codes + (long long)row * HIDDEN + column) = codes;
  }
  if (threadIdx.x == 0) ((float*)a.scales)[row] = __uint_as_float((u32)(exponent + 127) << 23);
}
#endif

__device__ __forceinline__ void norm(const Arguments& a, int row, int part, float* of_warp) {
  const int first = (part * (THREADS * VECTORS) + threadIdx.x) * 8;
  const Words* from = (const Words*)(a.h + (long long)row * HIDDEN);
  float weight[VECTORS][8];
  Words h[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) load_norm(a, min(first + v * (THREADS * 8), HIDDEN - 8), weight[v]);
  wait_for_earlier_kernels();
  let_next_kernel_start();
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) h[v] = from[min(first + v * (THREADS * 8), HIDDEN - 8) / 8];
  const float sum = sum_of_squares(a.partial + (long long)row * a.record_stride + SLICES * 32);
  const float inverse = rsqrtf(sum / HIDDEN + a.norm_eps);
  Words rounded[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = min(first + v * (THREADS * 8), HIDDEN - 8);
    const bool exists = first + v * (THREADS * 8) < HIDDEN;
    const long long at = (long long)row * HIDDEN + column;
    const Words x = normed(h[v], inverse, weight[v]);
    if (exists) *(Words*)(a.x + at) = x;
    if (ROUNDED || CODES || SCALES) rounded[v] = store_rounded(a, x, at, exists);
  }
#if SCALES == 3
  store_row_codes(a, rounded, row, of_warp);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hc_finish(const Arguments a) {
  __shared__ __align__(16) float sums[MIX_ROWS * GROUPS * SUM_STRIDE];
  const int mix_blocks = MIXES ? (a.rows + MIX_ROWS - 1) / MIX_ROWS : 0, block = (int)blockIdx.x - mix_blocks;
  if (MIXES && block < 0) make_mixes(a, blockIdx.x, sums);
  else norm(a, block / PARTS, block % PARTS, sums);
}
