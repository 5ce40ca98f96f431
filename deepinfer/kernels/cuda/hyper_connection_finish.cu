// Behind hyper_connection_write_read.cu: a sublayer's input, normed and rounded, and its mixes.
//
// A row has PARTS blocks of threads for the norm and, with MIXES, one more for the mixes, where one thread holds the whole
// 4x4 matrix: each of Sinkhorn's passes waits for the one before, and within a thread that takes some 50 cycles.
//
// Sums over the slices of hidden: SPLIT neighbours pairwise, then groups. See the other file for why.
//
// Compile-time constants: HIDDEN (a multiple of 256), SLICES (GROUPS, or 2, 4 or 8 times that), ITERATIONS, MIXES,
// NORM_BF16 (the norm's weight is bf16, else float32), ROUNDED, CODES, SCALES (0 none, 1 ue8m0 bytes, 2 float32).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define THREADS 160
#define GROUPS (HIDDEN / 256)
#define SPLIT (SLICES / GROUPS)
#define PARTS ((HIDDEN / 8 + THREADS - 1) / THREADS)
#define SUM_STRIDE 28  // floats of a group's 24 products and the squares of the trunk

static_assert(HIDDEN % 256 == 0 && SPLIT * GROUPS == SLICES, "shape");

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

__device__ __forceinline__ void divide_columns(float (&c)[4][4], float eps) {
  float sums[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[j] = ((c[0][j] + c[1][j]) + (c[2][j] + c[3][j])) + eps;
  invert(sums);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] *= sums[j];
}

__device__ __forceinline__ void divide_rows(float (&c)[4][4], float eps) {
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = ((c[i][0] + c[i][1]) + (c[i][2] + c[i][3])) + eps;
  invert(sums);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] *= sums[i];
}

__device__ __forceinline__ void make_mixes(const Arguments& a, int row, float* sums) {
  const int lane = threadIdx.x % 32, mix = min(lane, 23);
  const float factor = a.scale[mix < 4 ? 0 : mix < 8 ? 1 : 2], offset = a.base[mix];
  wait_for_earlier_kernels();
  const float* record = a.partial + (long long)row * a.record_stride;
  const int own_group = min((int)threadIdx.x, GROUPS - 1);
  const float squares = sum_of_group(record + SLICES * 33 + own_group * SPLIT);
#pragma unroll
  for (int round = 0; round < (GROUPS * 6 + THREADS - 1) / THREADS; ++round) {
    const int i = min(round * THREADS + (int)threadIdx.x, GROUPS * 6 - 1), group = i / 6, piece = i % 6;
    Floats parts[SPLIT];
#pragma unroll
    for (int j = 0; j < SPLIT; ++j) parts[j] = *(const Floats*)(record + (group * SPLIT + j) * 32 + 4 * piece);
    __syncwarp();  // for the compiler: every load is on its way before any is waited for
#pragma unroll
    for (int step = 1; step < SPLIT; step *= 2)
#pragma unroll
      for (int j = 0; j < SPLIT; j += 2 * step)
#pragma unroll
        for (int k = 0; k < 4; ++k) parts[j].of[k] += parts[j + step].of[k];
    *(Floats*)(sums + group * SUM_STRIDE + 4 * piece) = parts[0];
  }
  if (threadIdx.x < GROUPS) sums[threadIdx.x * SUM_STRIDE + 24] = squares;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  float four[4] = {};
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) four[g % 4] += sums[g * SUM_STRIDE + min(lane, 24)];
  const float sum = (four[0] + four[1]) + (four[2] + four[3]);
  const float inverse = rsqrtf(__shfl_sync(~0u, sum, 24) / (4 * HIDDEN) + a.norm_eps);
  const float logit = factor * (inverse * sum) + offset;
  float* mixes = a.mixes + (long long)row * 24;
  if (lane < 8) {
    const float gate = 1.0f / (1.0f + expf(-logit));
    mixes[lane] = lane < 4 ? gate + a.hc_eps : 2.0f * gate;
  }
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
  divide_columns(c, a.hc_eps);
#pragma unroll 1
  for (int i = 1; i < ITERATIONS; ++i) {
    divide_rows(c, a.hc_eps);
    divide_columns(c, a.hc_eps);
  }
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Floats line = {c[i][0], c[i][1], c[i][2], c[i][3]};
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
  const int column = (part * THREADS + threadIdx.x) * 8, safe = min(column, HIDDEN - 8);
  const bool exists = column < HIDDEN;
  const long long at = (long long)row * HIDDEN + safe;
  float weight[8];
  load_norm(a, safe, weight);
  wait_for_earlier_kernels();
  const Words h = *(const Words*)(a.h + at);
  const float sum = sum_of_squares(a.partial + (long long)row * a.record_stride + SLICES * 32);
  const float inverse = rsqrtf(sum / HIDDEN + a.norm_eps);
  Words x;
#pragma unroll
  for (int p = 0; p < 4; ++p)
    x.of[p] = pack(low_of(h.of[p]) * inverse * weight[2 * p], high_of(h.of[p]) * inverse * weight[2 * p + 1]);
  if (exists) *(Words*)(a.x + at) = x;
  if (ROUNDED || CODES || SCALES) store_rounded(a, x, at, exists);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hc_finish(const Arguments a) {
  __shared__ __align__(16) float sums[GROUPS * SUM_STRIDE];
  const int row = blockIdx.x / (PARTS + MIXES), part = (int)blockIdx.x % (PARTS + MIXES) - MIXES;
  if (MIXES && part < 0) make_mixes(a, row, sums);
  else norm(a, row, part);
}
