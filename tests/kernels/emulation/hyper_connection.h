// Beside route.h: what the hyper-connection kernels need of the machine.

static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static float reciprocal(float x) { return 1.0f / x; }
static float __shfl_xor_sync(u32, float value, int step) {
  const int lane = threadIdx.x % 32;
  return __uint_as_float(exchange(__float_as_uint(value), [&](u32* v) { return v[lane ^ step]; }));
}
static Meeting sets[TILES];
static void meet_set(int set) { meet(sets[set], THREADS / TILES); }

// The emulation knows no earlier kernel: what is loaded before the wait has long been written.
static void load_older(int& to, const void* from) { to = *(const int*)from; }
template <class T> static void load_older(T& to, const void* from) {
  if ((uintptr_t)from % sizeof(T)) fail("misaligned load");
  to = *(const T*)from;
}

static uint4 load_shared(u32 address) { return *(const uint4*)at(address); }
static u32 to_bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static u32 code_of(float x) {
  if (std::isnan(x)) return 0x7F;
  const u32 bits = __float_as_uint(x), exponent = std::max(bits >> 23 & 0xFF, 121u);
  const float anchor = __uint_as_float((exponent + 20) << 23 | 0x400000);
  const volatile float moved = x + anchor;
  const float value = std::fabs(moved - anchor);
  const u32 magnitude = __float_as_uint(value);
  return (magnitude < 121u << 23 ? (u32)(value * 512) : (magnitude >> 20) - 960) | (bits >> 24 & 0x80);
}
static float value_of(u32 code) {
  if ((code & 0x7F) == 0x7F) return NAN;
  const float value = std::ldexp((float)(code & 7 | (code & 0x78 ? 8 : 0)), std::max((int)(code >> 3 & 15), 1) - 10);
  return code & 0x80 ? -value : value;
}
static u32 to_e4m3_pair(float low, float high) { return code_of(low) | code_of(high) << 8; }
static float2 from_e4m3_pair(u32 codes) { return {value_of(codes & 0xFF), value_of(codes >> 8)}; }
