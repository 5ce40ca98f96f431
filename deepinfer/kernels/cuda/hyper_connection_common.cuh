// What the hyper-connection kernels share: vectors, and the machine's instructions. Each kernel's file includes it first.

#include "types.cuh"

struct __align__(16) Words { u32 of[4]; };  // 8 bf16
struct __align__(16) Floats { float of[4]; };
struct __align__(8) Pair { float of[2]; };
struct __align__(8) Codes { u32 of[2]; };

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#include "matrices.cuh"
#include "memory.cuh"
#include "numbers.cuh"

// What is older than the kernel before this one may be read before waiting, past the L1.
__device__ __forceinline__ void load_older(int& to, const void* from) {
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(to) : "l"(from));
}
__device__ __forceinline__ void load_older(Words& to, const void* from) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.of[0]), "=r"(to.of[1]), "=r"(to.of[2]), "=r"(to.of[3]) : "l"(from));
}
__device__ __forceinline__ void load_older(Floats& to, const void* from) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to.of[0]), "=f"(to.of[1]), "=f"(to.of[2]), "=f"(to.of[3]) : "l"(from));
}

// ---------------------------------------------------------------- bf16
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
