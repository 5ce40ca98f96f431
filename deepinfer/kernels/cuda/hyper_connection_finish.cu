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
// else float32), ROUNDED, CODES, SCALES (0 none, 1 ue8m0 bytes, 2 float32).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define THREADS 160
#define GROUPS (HIDDEN / 256)
#define SPLIT (SLICES / GROUPS)
#define PARTS ((HIDDEN / 8 + THREADS * VECTORS - 1) / (THREADS * VECTORS))
#define TEAM (THREADS / MIX_ROWS)  // threads that load a row's sums
#define ROUNDS ((GROUPS * 6 + TEAM - 1) / TEAM)
#define SUM_STRIDE 28  // floats of a group's 24 products and the squares of the trunk

static_assert(HIDDEN % 256 == 0 && SPLIT * GROUPS == SLICES && (TEAM == THREADS || TEAM == 32), "shape");

struct __align__(16) Words { u32 of[4]; };  // 8 bf16
struct __align__(16) Floats { float of[4]; };
struct __align__(8) Codes { u32 of[2]; };

struct Arguments {
  const float* partial;  // [rows, record_stride]: [SLICES, 32] products, [SLICES] squares of h, [SLICES] of the trunk
  const u16* h;          // [rows, HIDDEN]
  const void* norm;      // [HIDDEN]
  const float* scale;    // [3]
  const float* base;     // [24]
  u16* x;                // [rows, HIDDEN]
  u16* rounded;          // [rows, HIDDEN]
  u8* codes;             // [rows, HIDDEN]
  void* scales;          // [rows, HIDDEN / 32]
  float* mixes;          // [rows, 24]
  int rows, record_stride;
  float norm_eps, hc_eps;
};

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ u32 pack(float low, float high) {  // to two bf16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ u32 to_e4m3(float low, float high) {  // two codes
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ void from_e4m3(u32 codes, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high) : "r"(halves));
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void wait_for_earlier_kernels() {  // and let the next one start
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

// ---------------------------------------------------------------- sums
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

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

// ---------------------------------------------------------------- mixes
// Four numbers to their inverses, with half as many of the slow instructions.
__device__ __forceinline__ void invert(float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float both = reciprocal(x[i] * x[i + 1]), first = x[i];
    x[i] = both * x[i + 1], x[i + 1] = both * first;
  }
}

// A pass of Sinkhorn: what one side's sums become when the other side's factors are `factors`. The matrix is kept as
// c[i][j] * rows[i] * columns[j]: so a pass changes 4 numbers instead of 16. An element over its sum plus eps is then
// 1 / (sum of the others' factors + eps / own factor), and eps / own factor is eps times the divisor of a pass ago.
__device__ __forceinline__ void pass(const float (&c)[4][4], bool is_rows, const float (&factors)[4], float (&own)[4],
                                     float (&divisors)[4], float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float c0 = is_rows ? c[i][0] : c[0][i], c1 = is_rows ? c[i][1] : c[1][i];
    const float c2 = is_rows ? c[i][2] : c[2][i], c3 = is_rows ? c[i][3] : c[3][i];
    const float first = fmaf(c1, factors[1], c0 * factors[0]);
    own[i] = divisors[i] = first + fmaf(c3, factors[3], fmaf(c2, factors[2], eps * divisors[i]));
  }
  invert(own);
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
  const float inverse = rsqrtf(__shfl_sync(~0u, sum, 24) / (4 * HIDDEN) + a.norm_eps);
  const float logit = factor * (inverse * sum) + offset;
  // Lanes 8 to 23 hold the matrix, four of them a row.
  float largest = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const float power = expf(logit - largest);
  float total = power + __shfl_xor_sync(~0u, power, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  const float soft = power / total + a.hc_eps;
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = __shfl_sync(~0u, soft, 8 + 4 * i + j);
  float rows[4] = {1, 1, 1, 1}, columns[4], row_divisors[4] = {1, 1, 1, 1}, column_divisors[4] = {1, 1, 1, 1};
  pass(c, false, rows, columns, column_divisors, a.hc_eps);
#pragma unroll 1
  for (int i = 1; i < ITERATIONS; ++i) {
    pass(c, true, columns, rows, row_divisors, a.hc_eps);
    pass(c, false, rows, columns, column_divisors, a.hc_eps);
  }
  float* mixes = a.mixes + (long long)row * 24;
  if (lane < 8) {
    const float gate = 1.0f / (1.0f + expf(-logit));
    mixes[lane] = lane < 4 ? gate + a.hc_eps : 2.0f * gate;
  }
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Floats line;
#pragma unroll
      for (int j = 0; j < 4; ++j) line.of[j] = c[i][j] * rows[i] * columns[j];
      *(Floats*)(mixes + 8 + 4 * i) = line;
    }
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

__device__ __forceinline__ void load_norm(const Arguments& a, int column, float (&weight)[8]) {
  if (NORM_BF16) {
    const Words words = *(const Words*)((const u16*)a.norm + column);
#pragma unroll
    for (int p = 0; p < 4; ++p) weight[2 * p] = low_of(words.of[p]), weight[2 * p + 1] = high_of(words.of[p]);
  } else {
    const Floats first = *(const Floats*)((const float*)a.norm + column);
    const Floats second = *(const Floats*)((const float*)a.norm + column + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = first.of[i], weight[4 + i] = second.of[i];
  }
}

// 8 columns; four neighbouring threads share a scale.
__device__ __forceinline__ void store_rounded(const Arguments& a, const Words& x, long long at, bool exists) {
  float largest = 0.0f;
#pragma unroll
  for (int p = 0; p < 4; ++p) largest = fmaxf(largest, fmaxf(fabsf(low_of(x.of[p])), fabsf(high_of(x.of[p]))));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  // The smallest power of two that is at least max(largest, 1e-4) / 448; 448 is 1.75 * 2^8.
  const int exponent = ((int)(__float_as_uint(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
  const float scale = __uint_as_float((u32)(exponent + 127) << 23);
  const float inverse = __uint_as_float((u32)(127 - exponent) << 23);
  Words rounded;
  Codes codes = {};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 both = to_e4m3(low_of(x.of[p]) * inverse, high_of(x.of[p]) * inverse);
    codes.of[p / 2] |= both << 16 * (p % 2);
    float low, high;
    from_e4m3(both, low, high);
    rounded.of[p] = pack(fmaf(low, scale, 0.0f), fmaf(high, scale, 0.0f));  // no negative zeros
  }
  if (!exists) return;
  if (ROUNDED) *(Words*)(a.rounded + at) = rounded;
  if (CODES) *(Codes*)(a.codes + at) = codes;
  if (SCALES && threadIdx.x % 4 == 0) {
    if (SCALES == 1) ((u8*)a.scales)[at / 32] = (u8)(exponent + 127);
    else ((float*)a.scales)[at / 32] = scale;
  }
}

__device__ __forceinline__ void norm(const Arguments& a, int row, int part) {
  const int first = (part * (THREADS * VECTORS) + threadIdx.x) * 8;
  const Words* from = (const Words*)(a.h + (long long)row * HIDDEN);
  float weight[VECTORS][8];
  Words h[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) load_norm(a, min(first + v * (THREADS * 8), HIDDEN - 8), weight[v]);
  wait_for_earlier_kernels();
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) h[v] = from[min(first + v * (THREADS * 8), HIDDEN - 8) / 8];
  const float sum = sum_of_squares(a.partial + (long long)row * a.record_stride + SLICES * 32);
  const float inverse = rsqrtf(sum / HIDDEN + a.norm_eps);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = min(first + v * (THREADS * 8), HIDDEN - 8);
    const bool exists = first + v * (THREADS * 8) < HIDDEN;
    const long long at = (long long)row * HIDDEN + column;
    Words x;
#pragma unroll
    for (int p = 0; p < 4; ++p)
      x.of[p] = pack(low_of(h[v].of[p]) * inverse * weight[v][2 * p], high_of(h[v].of[p]) * inverse * weight[v][2 * p + 1]);
    if (exists) *(Words*)(a.x + at) = x;
    if (ROUNDED || CODES || SCALES) store_rounded(a, x, at, exists);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hc_finish(const Arguments a) {
  __shared__ __align__(16) float sums[MIX_ROWS * GROUPS * SUM_STRIDE];
  const int mix_blocks = MIXES ? (a.rows + MIX_ROWS - 1) / MIX_ROWS : 0, block = (int)blockIdx.x - mix_blocks;
  if (MIXES && block < 0) make_mixes(a, blockIdx.x, sums);
  else norm(a, block / PARTS, block % PARTS);
}
