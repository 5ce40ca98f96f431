// After dense.h: the other instructions of deepinfer/kernels/cuda/dense_unpack.cu.

static u32 code_of(float x) {  // nearest e4m3, ties to even
  const float rounded = round_e4m3(x), size = std::fabs(rounded);
  const int exponent = max(size == 0 ? -6 : std::ilogb(size), -6);
  const int steps = (int)std::ldexp(size, 3 - exponent);  // of the binade: 8 to 15 where normal
  const int code = exponent == -6 && steps < 8 ? steps : (exponent + 7) * 8 + steps - 8;
  return code | (std::signbit(rounded) ? 0x80 : 0);
}
static u16 to_e4m3_pair(float low, float high) { return code_of(low) | code_of(high) << 8; }
