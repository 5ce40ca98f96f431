// Conversions between float32, bf16 and e4m3, two values at a time where the machine does so, and its fast functions.
// Rounding is to nearest, ties to even; e4m3 stops at its largest value.
#include "types.cuh"

// ---- bf16
__device__ __forceinline__ u16 to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {  // two bf16 each
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// ---- e4m3
__device__ __forceinline__ u32 to_e4m3_pair(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

__device__ __forceinline__ float2 from_e4m3_pair(u32 codes) {
  u32 halves;
  float2 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(v.x), "=f"(v.y) : "r"(halves));
  return v;
}

__device__ __forceinline__ float2 round_e4m3(float low, float high) { return from_e4m3_pair(to_e4m3_pair(low, high)); }

__device__ __forceinline__ float round_e4m3(float value) { return round_e4m3(value, 0.0f).x; }

// ---- fast functions
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
