// The int16 that orders like the bf16 rounding of a score (no NaN), -0 as +0.
__device__ __forceinline__ short order_key(float score) {
  const u32 bits = __float_as_uint(score + 0.0f);  // -0 becomes +0
  int rounded = (int)(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  if ((rounded & 0xFFFF) == 0x8000) rounded = 0;   // rounded to -0
  return (short)(rounded ^ ((rounded >> 31) & 0x7FFF));
}
