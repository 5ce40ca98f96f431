// Packed FP8 weights (deepinfer/kernels/dense/packing.py) to bf16.

// Two e4m3 codes, each in the high byte of a half word, to two bf16. With its exponent field moved unchanged the value
// is 2^-120 times the code, subnormals included; `scale` is 2^120 times the block's scale, so the product is exact.
__device__ __forceinline__ u32 decode_pair(u32 codes, u32 scale) {
  return times(((codes >> 4) & 0x07F007F0u) | (codes & 0x80008000u), scale);
}
