// Matrix product with tens to hundreds of activation rows: y[rows, N] = x[rows, K] @ W[N, K]^T, FP8 weights, wgmma.
//
// The weights are operand A of wgmma.m64nNk16, from registers: each consumer warp takes its lanes' packed codes
// (deepinfer/kernels/dense/packing.py) from shared memory and decodes them in place to exact bf16. The activations are
// operand B, in shared memory with the 128-byte swizzle. One producer thread streams both through a ring of stages.
//
// A CTA owns MT weight rows, NB activation rows and one K slice; the CLUSTER CTAs of a cluster own the K slices of the
// same outputs and add their sums in the order of K through distributed shared memory. The order of summation depends
// on the shape alone, not on the number of rows.
//
// Compile-time constants: N (a multiple of 32), OUT_N (columns of y that exist), K, GROUP_N (weight rows that share an
// input); WGS (consumer warpgroups), MF (64-row tiles of each), NB (activation rows: 16, 32, 64, 128 or 256), CLUSTER,
// STAGES, MIN_CTAS, OUT_F32, QUANTIZE (round the output to FP8 in groups of 32).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define MT (64 * WGS * MF)
#define CONSUMER_WARPS (4 * WGS)
#define REGISTER_BOUND (MF * NB >= 256)  // the consumers need registers that the producer's warpgroup gives up
#define THREADS (32 * CONSUMER_WARPS + (REGISTER_BOUND ? 128 : 32))
#define NUM_BLOCK_ROWS (N / 32)
#define NUM_CHUNKS ((K + 63) / 64)
#define MAX_CHUNKS ((NUM_CHUNKS + CLUSTER - 1) / CLUSTER)  // of one CTA
#define TILE_BLOCKS (MT / 32)
#define X_BYTES (NB * 128)
#define W_BYTES (MT * 64)
#define SUM_STRIDE (MT + 4)           // floats per activation row of the partial sums: no bank conflicts

static_assert(N % 32 == 0 && K % 32 == 0 && MT % 128 == 0, "shape");
static_assert(GROUP_N % MT == 0 || GROUP_N == N, "a CTA must not straddle two groups");

struct __align__(64) TensorMap {
  u64 opaque[16];
};

// ---------------------------------------------------------------- instructions
template <int WIDTH> struct Wgmma;  // d[64, WIDTH] += a[64, 16] * b[16, WIDTH]
template <> struct Wgmma<16> {
  static __device__ __forceinline__ void run(float* d, const u32* a, u64 b) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, add, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};
template <> struct Wgmma<32> {
  static __device__ __forceinline__ void run(float* d, const u32* a, u64 b) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, add, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};
template <> struct Wgmma<64> {
  static __device__ __forceinline__ void run(float* d, const u32* a, u64 b) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
                   "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                   "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};
template <> struct Wgmma<128> {
  static __device__ __forceinline__ void run(float* d, const u32* a, u64 b) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, add, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
                   "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                   "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
                   "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
                   "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};
template <> struct Wgmma<256> {
  static __device__ __forceinline__ void run(float* d, const u32* a, u64 b) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "{%128, %129, %130, %131}, %132, add, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
                   "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
                   "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                   "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
                   "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
                   "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                   "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]),
                   "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                   "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]),
                   "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                   "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
                   "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                   "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
                   "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                   "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
                   "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                   "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
                   "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                   "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
                   "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                   "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),
                   "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barriers_ready() {  // for the copy engine as well
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  // Gives up after seconds: a wrong result is found sooner than a hang. (Written in C++ the loop serialises wgmma.)
  asm volatile("{ .reg .pred done, more; .reg .u32 tries;\n"
               "mov.u32 tries, 0;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "add.u32 tries, tries, 1;\n"
               "setp.lt.and.u32 more, tries, 4000000, !done;\n"
               "@more bra again; }" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_weights(u32 to, const void* from, u32 barrier) {  // one packed block
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];"
               :: "r"(to), "l"(from), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_activations(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {  // two bf16 each
  asm("mul.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

__device__ __forceinline__ float round_e4m3(float value) {
  u16 code;
  u32 halves;
  float rounded;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.0f), "f"(value));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(code));
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(rounded) : "r"(halves));
  return rounded;
}

__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
#if CLUSTER > 1
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ void cluster_barrier() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  asm volatile("bar.sync 0, %0;" :: "n"(THREADS) : "memory");
#endif
}

__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" :: "n"(32 * CONSUMER_WARPS) : "memory");
}

// Four sums from the same place of CTA `rank` of the cluster.
__device__ __forceinline__ void load_sums(float (&v)[4], u32 address, int rank) {
#if CLUSTER > 1
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(address) : "memory");
#endif
}

__device__ __forceinline__ void wait_for_earlier_kernels() {  // and let the next one start loading its weights
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void give_registers() {
#if REGISTER_BOUND
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}

__device__ __forceinline__ void take_registers() {
#if REGISTER_BOUND
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}

// ---------------------------------------------------------------- the kernel
__device__ __forceinline__ u32 decode_pair(u32 codes, u32 scale) {  // see dense_skinny.cu
  return times(((codes >> 4) & 0x07F007F0u) | (codes & 0x80008000u), scale);
}

// A warp's 16 rows x 64 columns: four operands of four registers.
__device__ __forceinline__ void decode_tile(u32 (&a)[16], u32 address, u32 scales) {
  const uint4 top = load_shared(address), bottom = load_shared(address + 512);
  const u32 u[4] = {top.x, top.y, top.z, top.w}, v[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 scale = __byte_perm(scales, scales, q < 2 ? 0x1010 : 0x3232);
    a[4 * q] = decode_pair(u[q], scale);
    a[4 * q + 1] = decode_pair(v[q], scale);
    a[4 * q + 2] = decode_pair(u[q] << 8, scale);
    a[4 * q + 3] = decode_pair(v[q] << 8, scale);
  }
}

// 64 rows x 64 columns of weights times NB activation rows; `x` is the stage's address.
__device__ __forceinline__ void multiply_tile(float (&sum)[NB / 2], const u32 (&a)[16], u32 x) {
  wgmma_fence();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    // descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next 8, start address in units of 16 bytes
    const u64 b = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((x + q * 32) >> 4 & 0x3FFF);
    Wgmma<NB>::run(sum, a + 4 * q, b);
  }
  wgmma_commit();
}

// Round values (already bf16) of which 8 neighbouring lanes hold 32 to FP8 with one power-of-two scale.
__device__ __forceinline__ void round_q8(float (&value)[4]) {
  float largest = fmaxf(fmaxf(fabsf(value[0]), fabsf(value[1])), fmaxf(fabsf(value[2]), fabsf(value[3])));
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const int exponent = ((__float_as_int(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
  const float down = __int_as_float((127 - exponent) << 23), up = __int_as_float((exponent + 127) << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = round_e4m3(value[i] * down) * up;
}

// Add the partial sums of the cluster and write this CTA's share of the outputs.
__device__ __forceinline__ void finish(const float* sums, void* y, int rows, int rank, int tile, int first_row, int warp,
                                       int lane) {
  for (int unit = rank + CLUSTER * warp; unit < NB * (MT / 128); unit += CLUSTER * CONSUMER_WARPS) {
    const int row = unit / (MT / 128), column = unit % (MT / 128) * 128 + lane * 4;
    if (first_row + row >= rows) break;
    float value[4] = {};
    const u32 local = shared_address(sums + row * SUM_STRIDE + column);
#pragma unroll
    for (int s = 0; s < CLUSTER; ++s) {
      float part[4];
      load_sums(part, local, s);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] += part[i];
    }
    const int out_column = tile * MT + column;
    const long long place = (long long)(first_row + row) * OUT_N + out_column;
#if OUT_F32
    if (out_column < OUT_N) *(float4*)((float*)y + place) = make_float4(value[0], value[1], value[2], value[3]);
#else
#if QUANTIZE
    u32 once[2] = {to_bf16_pair(value[0], value[1]), to_bf16_pair(value[2], value[3])};
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __int_as_float(i % 2 ? once[i / 2] & 0xFFFF0000u : once[i / 2] << 16);
    round_q8(value);
#endif
    if (out_column < OUT_N)
      *(uint2*)((u16*)y + place) = make_uint2(to_bf16_pair(value[0], value[1]), to_bf16_pair(value[2], value[3]));
#endif
  }
}

// weights: packed blocks [N/32, NUM_CHUNKS, 2048 bytes]. scales: [N/32, NUM_CHUNKS], two bf16 powers of two per block.
// x_map: bf16 [rows, groups * K], boxes of [NB, 64], 128-byte swizzle. y: [rows, OUT_N], contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
dense_wgmma(const char* __restrict__ weights, const u32* __restrict__ scales, const __grid_constant__ TensorMap x_map,
            void* __restrict__ y, int rows) {
  extern __shared__ char unaligned[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;  // the swizzle counts from multiples of 1024
  const u32 x_stages = base, w_stages = base + STAGES * X_BYTES;
  u32* scale_words = (u32*)(unaligned + (base - shared_address(unaligned)) + STAGES * (X_BYTES + W_BYTES));
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = cluster_rank();
  const int tile = blockIdx.x / CLUSTER, first_row = blockIdx.y * NB, first_block = tile * TILE_BLOCKS;
  const int first = rank * NUM_CHUNKS / CLUSTER, count = (rank + 1) * NUM_CHUNKS / CLUSTER - first;

  const int blocks = min(TILE_BLOCKS, NUM_BLOCK_ROWS - first_block), ahead = min(STAGES, count);
  const char* from = weights + ((long long)first_block * NUM_CHUNKS + first) * 2048;
  if (threadIdx.x == 32 * CONSUMER_WARPS) {  // the producer: weights don't depend on earlier kernels
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, CONSUMER_WARPS);
    }
    barriers_ready();
    for (int c = 0; c < ahead; ++c) {
      barrier_expect(full + 8 * c, blocks * 2048 + X_BYTES);
      for (int b = 0; b < blocks; ++b)
        copy_weights(w_stages + c * W_BYTES + b * 2048, from + ((long long)b * NUM_CHUNKS + c) * 2048, full + 8 * c);
    }
  }
  for (int i = threadIdx.x; i < TILE_BLOCKS * count; i += THREADS) {  // word [chunk][block]
    const int block = first_block + i % TILE_BLOCKS;
    scale_words[i] = block < NUM_BLOCK_ROWS ? __ldg(scales + (long long)block * NUM_CHUNKS + first + i / TILE_BLOCKS) : 0;
  }
  __syncthreads();

  float* sums = (float*)(unaligned + (base - shared_address(unaligned)));
  if (warp >= CONSUMER_WARPS) {
    give_registers();
    if (warp == CONSUMER_WARPS && lane == 0) {
      const int x_column = first_block * 32 / GROUP_N * K + first * 64;
      wait_for_earlier_kernels();
      for (int c = 0; c < ahead; ++c)
        copy_activations(x_stages + c * X_BYTES, &x_map, x_column + c * 64, first_row, full + 8 * c);
      int stage = 0;
      u32 parity = 0;
      for (int c = ahead; c < count; ++c) {
        barrier_wait(empty + 8 * stage, parity);
        barrier_expect(full + 8 * stage, blocks * 2048 + X_BYTES);
        copy_activations(x_stages + stage * X_BYTES, &x_map, x_column + c * 64, first_row, full + 8 * stage);
        for (int b = 0; b < blocks; ++b)
          copy_weights(w_stages + stage * W_BYTES + b * 2048, from + ((long long)b * NUM_CHUNKS + c) * 2048,
                       full + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    cluster_barrier();  // as the consumers: before and after they read each other's sums
#if CLUSTER > 1
    cluster_barrier();
#endif
  } else {
    take_registers();
    const int group = warp / 4, part = warp % 4;  // 16-row part of a 64-row tile
    const u32 mine = group * MF * 4096 + part * 1024 + lane * 16;
    const u32* my_scales = scale_words + group * MF * 2 + part / 2;
    float sum[MF][NB / 2];
#pragma unroll
    for (int f = 0; f < MF; ++f)
#pragma unroll
      for (int i = 0; i < NB / 2; ++i) sum[f][i] = 0.0f;
    u32 a[2][16];
    int stage = 0;
    u32 parity = 0;
    // Two operand buffers: one is decoded while the tensor cores read the other.
#define STEP(buffer, f)                                                                             \
  decode_tile(a[buffer], w_stages + stage * W_BYTES + mine + (f) * 4096, my_scales[c * TILE_BLOCKS + (f) * 2]); \
  multiply_tile(sum[f], a[buffer], x_stages + stage * X_BYTES);                                     \
  wgmma_wait<1>();
#define RELEASE()  /* everything but the latest step is done, so the stage before this one is free */  \
  if (c > 0 && lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
#define NEXT() if (++stage == STAGES) stage = 0, parity ^= 1;
#if MF == 1
    for (int c = 0; c < count; ++c) {
      barrier_wait(full + 8 * stage, parity);
      STEP(0, 0)
      RELEASE()
      NEXT()
      if (++c == count) break;
      barrier_wait(full + 8 * stage, parity);
      STEP(1, 0)
      RELEASE()
      NEXT()
    }
#else
    for (int c = 0; c < count; ++c) {
      barrier_wait(full + 8 * stage, parity);
      STEP(0, 0)
      RELEASE()
      STEP(1, 1)
      NEXT()
    }
#endif
    wgmma_wait<0>();
    // When no consumer reads the ring any more, its memory takes the partial sums [NB][SUM_STRIDE].
    consumer_barrier();
#pragma unroll
    for (int f = 0; f < MF; ++f)
#pragma unroll
      for (int i = 0; i < NB / 2; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int column = (group * MF + f) * 64 + part * 16 + lane / 4 + (i / 2 % 2) * 8;
        sums[row * SUM_STRIDE + column] = sum[f][i];
      }
    cluster_barrier();
    finish(sums, y, rows, rank, tile, first_row, warp, lane);
#if CLUSTER > 1
    cluster_barrier();  // the others may still read this CTA's sums
#endif
  }
}
