// What every emulated kernel needs of the machine and of CUDA C++: keywords, types, meetings of threads, bits of numbers.
// Threads are fibers that yield where the kernel waits. Each of the other headers comes after this one and plays the
// instructions that its kernels use: it follows the layouts that the matrix instructions prescribe, and finds deadlocks;
// it knows no memory ordering.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define threadIdx ThreadIndex()
#define blockIdx BlockIndex()
using std::max;
using std::min;

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };

static void fail(const char* why) { std::printf("emulation: %s\n", why), std::abort(); }

// ---------------------------------------------------------------- fibers
static ucontext_t scheduler;
static int current;    // fiber that runs
static long progress;  // grows whenever something happens that others may wait for
static void yield();   // of the header that defines the fibers

struct Meeting { int arrived = 0, generation = 0; };
static int arrive(Meeting& meeting, int count) {
  const int generation = meeting.generation;
  if (++meeting.arrived == count) meeting.arrived = 0, ++meeting.generation, ++progress;
  return generation;
}
static void wait(Meeting& meeting, int generation) { while (meeting.generation == generation) yield(); }
static void meet(Meeting& meeting, int count) { wait(meeting, arrive(meeting, count)); }

// ---------------------------------------------------------------- numbers and bits
static u32 __float_as_uint(float f) { u32 u; std::memcpy(&u, &f, 4); return u; }
static float __uint_as_float(u32 u) { float f; std::memcpy(&f, &u, 4); return f; }
static int __float_as_int(float f) { return __float_as_uint(f); }
static float __int_as_float(int i) { return __uint_as_float(i); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
static void let_next_kernel_start() {}
template <class T> static T __ldg(const T* p) { return *p; }
static u32 to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  const u32 bits = __float_as_uint(x);
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static float round_e4m3(float x) {
  const float magnitude = min(std::fabs(x), 448.0f);
  const float spacing = std::ldexp(1.0f, max(std::ilogb(magnitude), -6) - 3);
  return magnitude == 0 ? x : std::copysign(std::nearbyint(magnitude / spacing) * spacing, x);
}
