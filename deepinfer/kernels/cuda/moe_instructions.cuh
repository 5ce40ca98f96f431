// Instructions of the kernels for many pairs, moe_wgmma.cu and moe_fp8.cu, and of index_chunks.cu. WGMMA_KIND and
// WGMMA_LAYOUT are the end of the instruction's name and of its operands.
#include "barriers.cuh"
#include "numbers.cuh"
#include "warpgroups.cuh"

// Operands of wgmma: the 4 n accumulators of a lane, by number and by name.
#define A4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define P4 "%0, %1, %2, %3"
#define O4 A4(0)
#define P8 P4 ", %4, %5, %6, %7"
#define O8 O4, A4(4)
#define P12 P8 ", %8, %9, %10, %11"
#define O12 O8, A4(8)
#define P16 P12 ", %12, %13, %14, %15"
#define O16 O12, A4(12)
#define P20 P16 ", %16, %17, %18, %19"
#define O20 O16, A4(16)
#define P24 P20 ", %20, %21, %22, %23"
#define O24 O20, A4(20)
#define P28 P24 ", %24, %25, %26, %27"
#define O28 O24, A4(24)
#define P32 P28 ", %28, %29, %30, %31"
#define O32 O28, A4(28)
#define P36 P32 ", %32, %33, %34, %35"
#define O36 O32, A4(32)
#define P40 P36 ", %36, %37, %38, %39"
#define O40 O36, A4(36)
#define P44 P40 ", %40, %41, %42, %43"
#define O44 O40, A4(40)
#define P48 P44 ", %44, %45, %46, %47"
#define O48 O44, A4(44)
#define P52 P48 ", %48, %49, %50, %51"
#define O52 O48, A4(48)
#define P56 P52 ", %52, %53, %54, %55"
#define O56 O52, A4(52)
#define P60 P56 ", %56, %57, %58, %59"
#define O60 O56, A4(56)
#define P64 P60 ", %60, %61, %62, %63"
#define O64 O60, A4(60)
#define P68 P64 ", %64, %65, %66, %67"
#define O68 O64, A4(64)
#define P72 P68 ", %68, %69, %70, %71"
#define O72 O68, A4(68)
#define P76 P72 ", %72, %73, %74, %75"
#define O76 O72, A4(72)
#define P80 P76 ", %76, %77, %78, %79"
#define O80 O76, A4(76)
template <int WIDTH> struct Wgmma;  // d[64, WIDTH] += a[64, depth] * b[depth, WIDTH]
#define WGMMA(width, numbers, operands, a0, a1, a2, a3, b0)                                                          \
  template <> struct Wgmma<width> {                                                                                  \
    static __device__ __forceinline__ void run(float* d, const u32* a, u64 b) {                                      \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #width WGMMA_KIND " {" numbers "}, {%" #a0 ", %" #a1          \
                   ", %" #a2 ", %" #a3 "}, %" #b0 ", add, 1, 1" WGMMA_LAYOUT "; }"                                   \
                   : operands : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
    }                                                                                                                \
  };
WGMMA(8, P4, O4, 4, 5, 6, 7, 8)
WGMMA(16, P8, O8, 8, 9, 10, 11, 12)
WGMMA(24, P12, O12, 12, 13, 14, 15, 16)
WGMMA(32, P16, O16, 16, 17, 18, 19, 20)
WGMMA(40, P20, O20, 20, 21, 22, 23, 24)
WGMMA(48, P24, O24, 24, 25, 26, 27, 28)
WGMMA(56, P28, O28, 28, 29, 30, 31, 32)
WGMMA(64, P32, O32, 32, 33, 34, 35, 36)
WGMMA(72, P36, O36, 36, 37, 38, 39, 40)
WGMMA(80, P40, O40, 40, 41, 42, 43, 44)
WGMMA(88, P44, O44, 44, 45, 46, 47, 48)
WGMMA(96, P48, O48, 48, 49, 50, 51, 52)
WGMMA(104, P52, O52, 52, 53, 54, 55, 56)
WGMMA(112, P56, O56, 56, 57, 58, 59, 60)
WGMMA(120, P60, O60, 60, 61, 62, 63, 64)
WGMMA(128, P64, O64, 64, 65, 66, 67, 68)
WGMMA(136, P68, O68, 68, 69, 70, 71, 72)
WGMMA(144, P72, O72, 72, 73, 74, 75, 76)
WGMMA(152, P76, O76, 76, 77, 78, 79, 80)
WGMMA(160, P80, O80, 80, 81, 82, 83, 84)

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ void load_floats(float& a, float& b, u32 address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_float(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(v) : "memory");
}

// Two 8x8 matrices of bf16, transposed; lanes 0 to 15 give the addresses of their rows in memory.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};"
               :: "r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void group_barrier(int group) {  // of one consumer warpgroup
  asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory");
}
