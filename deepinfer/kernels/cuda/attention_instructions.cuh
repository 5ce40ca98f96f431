// Instructions of attention.cu, beside those that kernels share: barriers, copies, matrix products, conversions.
#include "barriers.cuh"
#include "clusters.cuh"
#include "launch.cuh"
#include "numbers.cuh"
#include "warpgroups.cuh"

// ---------------------------------------------------------------- barriers, copies, matrix instructions

__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// All lanes are done with what the barrier protects.
__device__ __forceinline__ void warp_arrive(u64* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void fence_for_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void meet_cluster() {
  __syncwarp();
  cluster_barrier();
}
__device__ __forceinline__ void store_remote(u32 to, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void store_remote(u32 to, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ uint4 load_record(const u8* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_global(u16* p, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_codes(u8* p, u32 a, u32 b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

#define F4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define F16(d, i) F4(d, i), F4(d, (i) + 4), F4(d, (i) + 8), F4(d, (i) + 12)
#define F64(d, i) F16(d, i), F16(d, (i) + 16), F16(d, (i) + 32), F16(d, (i) + 48)
#define REGISTERS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_128 REGISTERS_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Wait for all matrix instructions of the warpgroup; then `d` may be read.
__device__ __forceinline__ void mma_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : F16(d, 0), F16(d, 16) :: "memory");
}
__device__ __forceinline__ void mma_wait(float (&d)[128]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : F64(d, 0), F64(d, 64) :: "memory");
}

// d[64 x 64] (+)= a[64 x 16] . b[64 x 16]^T
__device__ __forceinline__ void mma_logits(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGISTERS_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : F16(d, 0), F16(d, 16) : "l"(a), "l"(b), "r"(accumulate));
}
// d[64 x 256] += a[64 x 16] . b[16 x 256], a from registers
__device__ __forceinline__ void mma_sum(float (&d)[128], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
      : F64(d, 0), F64(d, 64) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same, a from shared memory
__device__ __forceinline__ void mma_sum(float (&d)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REGISTERS_128 "}, %128, %129, 1, 1, 1, 0, 1;\n"
      : F64(d, 0), F64(d, 64) : "l"(a), "l"(b));
}

// ---------------------------------------------------------------- arithmetic of the machine

__device__ __forceinline__ u32 half_twice(float x) {
  u32 halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(halves) : "f"(x));
  return halves;
}
// Four codes times a power of two (twice in half precision), rounded once: what a half loses lies far below all codes.
__device__ __forceinline__ u32 times_half(u32 codes, u32 factor) {
  u32 result;
  asm("{ .reg .b16 a, b; .reg .b32 c, d;\n"
      "mov.b32 {a, b}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 c, a;\n"
      "cvt.rn.f16x2.e4m3x2 d, b;\n"
      "mul.rn.f16x2 c, c, %2;\n"
      "mul.rn.f16x2 d, d, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, c;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 b, d;\n"
      "mov.b32 %0, {a, b}; }" : "=r"(result) : "r"(codes), "r"(factor));
  return result;
}
