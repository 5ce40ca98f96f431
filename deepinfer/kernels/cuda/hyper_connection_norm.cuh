// What becomes of the sums of a row: the logits of its mixes, and the sublayer's input, normed and rounded. For the kernels
// that include this file behind their Arguments, HIDDEN, NORM_BF16, ROUNDED, CODES and SCALES.

// ---------------------------------------------------------------- norm
// A number of a row's 24, from its product with fn and the mean square of the streams.
__device__ __forceinline__ float logit_of(float product, float squares, float factor, float offset, float norm_eps) {
  return fmaf(factor, rsqrtf(squares / (4 * HIDDEN) + norm_eps) * product, offset);
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

__device__ __forceinline__ Words normed(const Words& h, float inverse, const float (&weight)[8]) {
  Words x;
#pragma unroll
  for (int p = 0; p < 4; ++p)
    x.of[p] = pack(low_of(h.of[p]) * inverse * weight[2 * p], high_of(h.of[p]) * inverse * weight[2 * p + 1]);
  return x;
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

