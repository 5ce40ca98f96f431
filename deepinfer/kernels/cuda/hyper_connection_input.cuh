// What becomes of the sums of a row: the sublayer's input, normed and rounded, and its mixes. For the kernels that include
// this file behind their Arguments, HIDDEN, ITERATIONS, NORM_BF16, ROUNDED, CODES and SCALES.
//
// Expressions are written so that the compiler has no choice of rounding: every kernel gives the same bits.

// ---------------------------------------------------------------- mixes
// One side's divisors, from the other's: a pass of Sinkhorn. The matrix is kept as c[i][j] over the divisors of its row and
// its column, so a pass changes 4 numbers instead of 16. An element over its sum plus eps then has the divisor
// sum of c / others + eps * own divisor of a pass ago. All are waiting for the sum, so it is taken over a common
// denominator, whose inverse is made meanwhile. Divisors lie between 1e-6 and 1e6: products of four stay in range.
__device__ __forceinline__ void pass(const float (&c)[4][4], bool is_rows, const float (&others)[4], float (&own)[4],
                                     float eps) {
  const float left = others[0] * others[1], right = others[2] * others[3], inverse = reciprocal(left * right);
  const float three[4] = {others[1] * right, others[0] * right, others[3] * left, others[2] * left};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float c0 = is_rows ? c[i][0] : c[0][i], c1 = is_rows ? c[i][1] : c[1][i];
    const float c2 = is_rows ? c[i][2] : c[2][i], c3 = is_rows ? c[i][3] : c[3][i];
    const float first = fmaf(c1, three[1], c0 * three[0]), second = fmaf(c3, three[3], c2 * three[2]);
    own[i] = fmaf(first + second, inverse, eps * own[i]);
  }
}

// Sinkhorn, in one thread: each pass waits for the one before.
__device__ __forceinline__ void balance(float (&c)[4][4], float eps) {
  float rows[4] = {1, 1, 1, 1}, columns[4] = {1, 1, 1, 1};
  pass(c, false, rows, columns, eps);
#pragma unroll 1
  for (int i = 1; i < ITERATIONS; ++i) {
    pass(c, true, columns, rows, eps);
    pass(c, false, rows, columns, eps);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = reciprocal(rows[i]), columns[i] = reciprocal(columns[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = c[i][j] * rows[i] * columns[j];
}

// A number of a row's 24, from its product with fn and the mean square of the streams.
__device__ __forceinline__ float logit_of(float product, float squares, float factor, float offset, float norm_eps) {
  return fmaf(factor, rsqrtf(squares / (4 * HIDDEN) + norm_eps) * product, offset);
}
__device__ __forceinline__ float gate_of(int mix, float logit, float eps) {  // of the read mix and of the write mix
  const float gate = 1.0f / (1.0f + expf(-logit));
  return mix < 4 ? gate + eps : 2.0f * gate;
}

// Of one row, by a warp: lane i < 24 has logit i. Lanes 8 to 23 hold the matrix, four of them a row.
__device__ __forceinline__ void store_mixes(float logit, int lane, float* mixes, float eps) {
  float largest = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const float power = expf(logit - largest);
  float total = power + __shfl_xor_sync(~0u, power, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  const float soft = power / total + eps;
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = __shfl_sync(~0u, soft, 8 + 4 * i + j);
  balance(c, eps);
  if (lane < 8) mixes[lane] = gate_of(lane, logit, eps);
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) *(Floats*)(mixes + 8 + 4 * i) = *(const Floats*)c[i];
}

// ---------------------------------------------------------------- norm
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

__device__ __forceinline__ Words normed(const Words& h, float inverse, const float (&weight)[8]) {
  Words x;
#pragma unroll
  for (int p = 0; p < 4; ++p)
    x.of[p] = to_bf16_pair(low_of(h.of[p]) * inverse * weight[2 * p], high_of(h.of[p]) * inverse * weight[2 * p + 1]);
  return x;
}

// 8 columns; four neighbouring threads share a scale. Returns the rounded values.
__device__ __forceinline__ Words store_rounded(const Arguments& a, const Words& x, long long at, bool exists) {
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
    const u32 both = to_e4m3_pair(low_of(x.of[p]) * inverse, high_of(x.of[p]) * inverse);
    codes.of[p / 2] |= both << 16 * (p % 2);
    const float2 v = from_e4m3_pair(both);
    rounded.of[p] = to_bf16_pair(fmaf(v.x, scale, 0.0f), fmaf(v.y, scale, 0.0f));  // no negative zeros
  }
  if (!exists) return rounded;
  if (ROUNDED) *(Words*)(a.rounded + at) = rounded;
  if (CODES && SCALES != 3) *(Codes*)(a.codes + at) = codes;
  if (SCALES && SCALES != 3 && threadIdx.x % 4 == 0) {
    if (SCALES == 1) ((u8*)a.scales)[at / 32] = (u8)(exponent + 127);
    else ((float*)a.scales)[at / 32] = scale;
  }
  return rounded;
}
