// After grouped.h: what deepinfer/kernels/cuda/moe_fp8.cu and moe_fp8_rows.cu need besides. Products of e4m3 are summed in
// float32, without what the tensor cores cut off.

#define __shared__ static  // CTAs run one after another

static u32 __shfl_xor_sync(u32, u32 value, int mask) { return from_lane(value, threadIdx.x % 32 ^ mask); }

static float from_e4m3(u32 code) {
  const int field = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = field ? std::ldexp(8.0f + mantissa, field - 10) : std::ldexp((float)mantissa, -9);
  return (code & 0x7F) == 0x7F ? std::nanf("") : code & 0x80 ? -magnitude : magnitude;
}
static u32 to_e4m3(float x) {
  if (x != x) return 0x7F;
  const float magnitude = std::fabs(round_e4m3(x));
  u32 code = 0;
  while (from_e4m3(code) < magnitude) ++code;
  return code | (std::signbit(x) ? 0x80 : 0);
}
static u32 to_e4m3_pair(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
static u32 times_half(u32 codes, u32 factor) {  // a power of two
  const int field = factor >> 10;
  const float value = field ? std::ldexp(1.0f, field - 15) : std::ldexp((float)(factor & 1023), -24);
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= to_e4m3(from_e4m3(codes >> 8 * i & 255) * value) << 8 * i;
  return result;
}
static u32 load_byte(u32 address) { return *(u8*)at(address); }
static u32 pick_bytes(u32 low, u32 high, u32 selector) {
  if (selector & 0x8888) fail("a selector that repeats a sign");
  return __byte_perm(low, high, selector);
}

template <int WIDTH> struct WgmmaFp8 {  // as Wgmma of grouped.h, with 32 columns: four of a lane in each half
  static void run(float* d, const u32* a, u64 descriptor) {
    if (descriptor >> 62 != 1 || (descriptor >> 32 & 0x3FFF) != 64 || (descriptor & 0x3FFF) % 64 >= 8) fail("operand");
    const u32 base = (u32)(descriptor & 0x3FFF) << 4;
    Warp& warp = my_warp();
    const int lane = threadIdx.x % 32;
    std::memcpy(warp.values[lane], a, 16);
    __syncwarp();
    float rows[2][32], values[256];
    for (int code = 0; code < 256; ++code) values[code] = from_e4m3(code);
    for (int k = 0; k < 32; ++k)
      for (int r = 0; r < 2; ++r)
        rows[r][k] = values[warp.values[lane / 4 * 4 + k % 16 / 4][k / 16 * 2 + r] >> 8 * (k % 4) & 255];
    for (int i = 0; i < WIDTH / 4; ++i) {
      const int n = i / 2 * 8 + lane % 4 * 2 + i % 2;
      float* to = d + i / 2 * 4 + i % 2;
      for (int half = 0; half < 2; ++half) {
        const u32 address = base + n / 8 * 1024 + n % 8 * 128 + half * 16;
        const u8* x = (const u8*)at(address ^ (address >> 7 & 7) << 4);
        for (int k = 0; k < 16; ++k)
          to[0] += rows[0][16 * half + k] * values[x[k]], to[2] += rows[1][16 * half + k] * values[x[k]];
      }
    }
    __syncwarp();
  }
};
#define Wgmma WgmmaFp8
