// Matrix product with tens to hundreds of activation rows: y[rows, N] = x[rows, K] @ W[N, K]^T, FP8 weights, wgmma.
//
// The weights are operand A of wgmma.m64nNk16, from registers: each consumer warp takes its lanes' packed codes
// (deepinfer/kernels/dense/packing.py) from shared memory and decodes them in place to exact bf16. The activations are
// operand B, in shared memory with the 128-byte swizzle. One producer thread streams both through a ring of stages, with one
// copy of each per stage (and one more of activations above 256 rows): a thread that issues more does not keep up with
// narrow tiles.
//
// A piece of work is MT weight rows, NB activation rows and one K slice. The SLICES CTAs of a cluster have the K slices of
// the same outputs and add their sums in the order of K through distributed shared memory. The order of summation depends on
// the shape and on SLICES alone, not on the number of rows.
//
// With PARTIAL there are no clusters, which run only where they fit a group of SMs: sums are written apart, and whoever
// reads them adds them in the same order.
//
// Where no sums are added here, results leave straight from registers, and a CTA may have several pieces, one after the
// other: the producer fetches the next one's operands meanwhile.
//
// Compile-time constants: N (a multiple of 32), OUT_N (columns of y that exist), K, GROUP_N (weight rows that share an
// input); WGS (consumer warpgroups), MF (64-row tiles of each), NB (activation rows: 16, 32, 48, 64, 96, 128,
// 192, 256 or 384), SLICES, PARTIAL, STAGES, MIN_CTAS, OUT_F32, QUANTIZE (round the output to FP8 in groups of 32), BESIDE (1:
// x is older than the kernel before this one, which is waited for only before the outputs are written).

#include "types.cuh"

#define MT (64 * WGS * MF)
#define CLUSTER (PARTIAL ? 1 : SLICES)
#define CONSUMER_WARPS (4 * WGS)
// Buffers for decoded weights. Where many warps leave few registers, one decodes while others multiply.
#define OPERANDS (WGS >= 4 || (MIN_CTAS > 1 && NB >= 96) || NB > 256 ? 1 : 2)
// A product has at most 256 columns.
#define PARTS (NB > 256 ? 2 : 1)
#define WIDTH (NB / PARTS)
// Results leave from registers; else through shared memory, added up there or rounded in groups that two warps have.
#define DIRECT (CLUSTER == 1 && !QUANTIZE)
// The consumers need registers that the producer's warpgroup gives up.
#define REGISTER_BOUND (WGS >= 4 || MF * NB >= 256)
#define THREADS (32 * CONSUMER_WARPS + (REGISTER_BOUND ? 128 : 32))
#define PRODUCER_REGISTERS 24
#define CONSUMER_REGISTERS ((65536 / (MIN_CTAS * THREADS) / 8 * 8 * (WGS + 1) - PRODUCER_REGISTERS) / WGS / 8 * 8)
#define NUM_CHUNKS ((K + 63) / 64)
#define TILE_BLOCKS (MT / 32)
#define X_BYTES (NB * 128)
#define W_BYTES (MT * 64)
#define SUM_STRIDE (MT + 4)           // floats per activation row of the partial sums: no bank conflicts

static_assert(N % 32 == 0 && K % 32 == 0 && (OPERANDS == 2 || MF == 1), "shape");
static_assert(GROUP_N % MT == 0 || GROUP_N == N, "a CTA must not straddle two groups");
static_assert((PARTS == 1 ? WIDTH <= 256 : WIDTH == 192) && OUT_N % 4 == 0 && STAGES >= 2, "rows");
static_assert(!(PARTIAL && QUANTIZE), "a part of a sum is not rounded");
static_assert(CLUSTER <= 8 && (!PARTIAL || OUT_F32), "output");

struct __align__(64) TensorMap {
  u64 opaque[16];
};

// ---------------------------------------------------------------- instructions
#include "barriers.cuh"
#include "clusters.cuh"
#include "launch.cuh"
#include "numbers.cuh"
#include "warpgroups.cuh"

// d[64, WIDTH] += a[64, 16] * b[16, WIDTH], as inline assembly: its operands' names, then the operands.
#define D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D16 D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D24 D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define D32 D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define D40 D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D48 D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D56 D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define D64 D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define D72 D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define D80 D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define D88 D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define D96 D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define D104 D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define D112 D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define D120 D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define D128 D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                 "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS16(i) SUMS8(i), SUMS8(i + 8)
#define SUMS32(i) SUMS16(i), SUMS16(i + 16)
#define SUMS64(i) SUMS32(i), SUMS32(i + 32)
#define WGMMA(nb, names, a0, a1, a2, a3, b0, ...)                                                         \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, 1, 0;\n"                                                \
               "wgmma.mma_async.sync.aligned.m64n" #nb "k16.f32.bf16.bf16 {" names "}, "                   \
               "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0 ", add, 1, 1, 0; }"                       \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

__device__ __forceinline__ void wgmma(float (&d)[WIDTH / 2], const u32* a, u64 b) {
#if WIDTH == 16
  WGMMA(16, D8, 8, 9, 10, 11, 12, SUMS8(0));
#elif WIDTH == 32
  WGMMA(32, D16, 16, 17, 18, 19, 20, SUMS16(0));
#elif WIDTH == 48
  WGMMA(48, D24, 24, 25, 26, 27, 28, SUMS16(0), SUMS8(16));
#elif WIDTH == 64
  WGMMA(64, D32, 32, 33, 34, 35, 36, SUMS32(0));
#elif WIDTH == 96
  WGMMA(96, D48, 48, 49, 50, 51, 52, SUMS32(0), SUMS16(32));
#elif WIDTH == 128
  WGMMA(128, D64, 64, 65, 66, 67, 68, SUMS64(0));
#elif WIDTH == 192
  WGMMA(192, D96, 96, 97, 98, 99, 100, SUMS64(0), SUMS32(64));
#else
  WGMMA(256, D128, 128, 129, 130, 131, 132, SUMS64(0), SUMS64(64));
#endif
}

__device__ __forceinline__ void wait_or_give_up(u32 barrier, u32 parity) {
  // Gives up after seconds: unlike barrier_wait it has no trap, which would serialise wgmma here.
  asm volatile("{ .reg .pred done, more; .reg .u32 tries;\n"
               "mov.u32 tries, 0;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "add.u32 tries, tries, 1;\n"
               "setp.lt.and.u32 more, tries, 4000000, !done;\n"
               "@more bra again; }" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" :: "n"(32 * CONSUMER_WARPS) : "memory");
}

// The blocks of 2048 bytes of TILE_BLOCKS packed block rows, at one chunk.
__device__ __forceinline__ void copy_blocks(u32 to, const void* map, int chunk, int block, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(to), "l"(map), "r"(0), "r"(chunk), "r"(block), "r"(barrier) : "memory");
}

// An 8x8 matrix whose row lane / 4 has columns 2 (lane % 4) and one more in this thread.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 other;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

__device__ __forceinline__ float4 load_sums(u32 address) {
  float4 v;
#if CLUSTER > 1
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
#endif
  return v;
}

// ---------------------------------------------------------------- the kernel
#include "dense_decode.cuh"

struct Codes {  // a warp's 16 rows x 64 columns: this lane's part
  uint4 top, bottom;
};

__device__ __forceinline__ Codes load_codes(u32 address) { return {load_shared(address), load_shared(address + 512)}; }

__device__ __forceinline__ void decode_tile(u32 (&a)[16], const Codes& codes, u32 scales) {  // to four operands
  const u32 u[4] = {codes.top.x, codes.top.y, codes.top.z, codes.top.w};
  const u32 v[4] = {codes.bottom.x, codes.bottom.y, codes.bottom.z, codes.bottom.w};
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
typedef float Sums[PARTS][WIDTH / 2];
__device__ __forceinline__ void multiply_tile(Sums& sum, const u32 (&a)[16], u32 x) {
  wgmma_fence();
#pragma unroll
  for (int q = 0; q < 4; ++q)
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      // descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next 8, start address in units of 16 bytes
      const u64 b = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((x + p * (WIDTH * 128) + q * 32) >> 4 & 0x3FFF);
      wgmma(sum[p], a + 4 * q, b);
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

#define UNITS (NB * MT / 128)  // outputs of a cluster's weight tile, in units of a warp's float4
#define BATCH (CLUSTER <= 4 ? 4 : 2)

// Add the partial sums of the cluster and write this CTA's share of the outputs.
__device__ __forceinline__ void finish(u32 sums, void* y, int rows, int rank, int tile, int first_row, int warp,
                                       int lane) {
  u32 from[CLUSTER];
#pragma unroll
  for (int s = 0; s < CLUSTER; ++s) from[s] = CLUSTER > 1 ? remote_address(sums, s) : sums;
  const int step = CLUSTER * CONSUMER_WARPS;
  for (int unit = rank + CLUSTER * warp; unit < UNITS; unit += step * BATCH) {
    if (first_row + unit * 32 / (MT / 4) >= rows) break;
    float4 part[BATCH][CLUSTER];
    int row[BATCH], column[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {  // all loads before the first use: each takes a trip to another SM
      const int place = (unit + b * step) * 32 + lane;
      row[b] = place / (MT / 4), column[b] = place % (MT / 4) * 4;
#pragma unroll
      for (int s = 0; s < CLUSTER; ++s)
        part[b][s] = load_sums(from[s] + min(row[b], NB - 1) * (SUM_STRIDE * 4) + column[b] * 4);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      float value[4] = {};
#pragma unroll
      for (int s = 0; s < CLUSTER; ++s)
        value[0] += part[b][s].x, value[1] += part[b][s].y, value[2] += part[b][s].z, value[3] += part[b][s].w;
      const int out_column = tile * MT + column[b];
      const bool exists = row[b] < NB && first_row + row[b] < rows && out_column < OUT_N;
      const long long place = (long long)(first_row + row[b]) * OUT_N + out_column;
#if OUT_F32
      if (exists) *(float4*)((float*)y + place) = make_float4(value[0], value[1], value[2], value[3]);
#else
#if QUANTIZE
      u32 once[2] = {to_bf16_pair(value[0], value[1]), to_bf16_pair(value[2], value[3])};
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = __int_as_float(i % 2 ? once[i / 2] & 0xFFFF0000u : once[i / 2] << 16);
      round_q8(value);
#endif
      if (exists)
        *(uint2*)((u16*)y + place) = make_uint2(to_bf16_pair(value[0], value[1]), to_bf16_pair(value[2], value[3]));
#endif
    }
  }
}

#if DIRECT
// One warp's results of 16 weight rows, from output column `column` on.
__device__ __forceinline__ void store_sums(const Sums& sum, void* y, int rows, int first_row, int column, int lane) {
#if OUT_F32
  column += lane / 4;
#else
  const bool odd = lane & 1;
  column += odd ? 8 + lane % 4 * 2 - 2 : lane % 4 * 2;
#endif
#pragma unroll
  for (int j = 0; j < NB / 8; ++j) {
    if (first_row + 8 * j >= rows) break;
    const float* v = sum[j / (WIDTH / 8)] + j % (WIDTH / 8) * 4;
#if OUT_F32
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + 8 * j + lane % 4 * 2 + i % 2, at = column + i / 2 * 8;
      if (row < rows && at < OUT_N) ((float*)y)[(long long)row * OUT_N + at] = v[i];
    }
#else
    // Row lane / 4 of these 8, columns 2 (lane % 4) and one more of the first 8 and of the last 8; neighbours exchange them
    // so that each has four columns in a row.
    const u32 low = transposed(to_bf16_pair(v[0], v[1])), high = transposed(to_bf16_pair(v[2], v[3]));
    const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);
    const int row = first_row + 8 * j + lane / 4;
    if (row < rows && column < OUT_N)
      *(uint2*)((u16*)y + (long long)row * OUT_N + column) = odd ? make_uint2(other, high) : make_uint2(low, other);
#endif
  }
}
#endif

struct Piece { int tile, slice, first_row; };

// Pieces by clusters of weight tiles (with PARTIAL: by weight tiles and slices), then by tiles of NB activation rows, so that
// those find the weights in L2.
__device__ __forceinline__ Piece piece_of(int number, int rank, int row_tiles) {
  const int of_weight = number / row_tiles, first_row = number % row_tiles * NB;
  if (PARTIAL) return {of_weight / SLICES, of_weight % SLICES, first_row};
  return {of_weight, rank, first_row};
}
__device__ __forceinline__ int first_chunk(int slice) { return slice * NUM_CHUNKS / SLICES; }
__device__ __forceinline__ int num_chunks(int slice) { return first_chunk(slice + 1) - first_chunk(slice); }

// Scales of a piece's chunks for one warp, a lane each, from `from` on: its 16 weight rows are in one block row.
__device__ __forceinline__ void load_scales(u32 (&words)[MF], const u32* scales, const Piece& piece, int from, int warp,
                                            int lane) {
#pragma unroll
  for (int f = 0; f < MF; ++f) {
    const int block = min(piece.tile * TILE_BLOCKS + (warp / 4 * MF + f) * 2 + warp % 4 / 2, N / 32 - 1);
    const int chunk = min(first_chunk(piece.slice) + from + lane, NUM_CHUNKS - 1);
    words[f] = __ldg(scales + (long long)block * NUM_CHUNKS + chunk);
  }
}

__device__ __forceinline__ int rank_in_cluster() {  // written out in its place it makes the compiler order code otherwise
  int rank = 0;
  if (CLUSTER > 1) rank = cluster_rank();
  return rank;
}

// w_map: packed blocks [N/32, NUM_CHUNKS, 2048 bytes], boxes of TILE_BLOCKS of them at one chunk. scales: [N/32,
// NUM_CHUNKS], two bf16 powers of two per block. x_map: bf16 [rows, groups * K], boxes of [WIDTH, 64], 128-byte swizzle.
// y: [rows, OUT_N], contiguous; with PARTIAL float32 [SLICES, rows, OUT_N]. Grid: the pieces, in clusters of their slices;
// where results leave from registers, at most as many.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
dense_wgmma(const __grid_constant__ TensorMap w_map, const u32* __restrict__ scales,
            const __grid_constant__ TensorMap x_map, void* __restrict__ y, int rows) {
  extern __shared__ char unaligned[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 base = (shared_address(unaligned) + 1023) & ~1023u;  // the swizzle counts from multiples of 1024
  const u32 x_stages = base, w_stages = base + STAGES * X_BYTES;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = rank_in_cluster(), row_tiles = (rows + NB - 1) / NB;
  const int num_pieces = DIRECT ? (N + MT - 1) / MT * (PARTIAL ? SLICES : 1) * row_tiles : 0;
  int number = blockIdx.x / CLUSTER;
  Piece piece = piece_of(number, rank, row_tiles);

  if (threadIdx.x == 32 * CONSUMER_WARPS) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, CONSUMER_WARPS);
    }
    barriers_ready();
  }
  if (warp >= CONSUMER_WARPS) __syncwarp();

#define COPY_WEIGHTS(c)                                     \
  barrier_expect(full + 8 * stage, W_BYTES + X_BYTES);      \
  copy_blocks(w_stages + stage * W_BYTES, &w_map, first_chunk(piece.slice) + (c), piece.tile * TILE_BLOCKS, full + 8 * stage);
#define NEXT() if (++stage == STAGES) stage = 0, parity ^= 1;
  int stage = 0;
  u32 parity = 0;
  if (warp >= CONSUMER_WARPS) {
    // The first weights, which don't depend on earlier kernels, are on their way before the other warps are.
    const int ahead = min(STAGES, num_chunks(piece.slice));
    const bool produces = warp == CONSUMER_WARPS && lane == 0;
    if (produces)
      for (; stage < ahead; ++stage) { COPY_WEIGHTS(stage) }
    __syncwarp();
    __syncthreads();
    if (REGISTER_BOUND) give_registers<PRODUCER_REGISTERS>();
    if (produces) {
      if (!BESIDE) wait_for_earlier_kernels(), let_next_kernel_start();
      stage = 0;
      for (bool is_first = true;; is_first = false) {
        const int count = num_chunks(piece.slice);
        const int x_column = piece.tile * MT / GROUP_N * K + first_chunk(piece.slice) * 64;
        for (int c = 0; c < count; ++c) {
          if (!is_first || c >= ahead) {
            wait_or_give_up(empty + 8 * stage, parity ^ 1);
            COPY_WEIGHTS(c)
          }
#pragma unroll
          for (int p = 0; p < PARTS; ++p)
            copy_box(x_stages + stage * X_BYTES + p * (WIDTH * 128), &x_map, x_column + c * 64, piece.first_row + p * WIDTH,
                     full + 8 * stage);
          NEXT()
        }
        number += gridDim.x;
        if (!DIRECT || number >= num_pieces) break;
        piece = piece_of(number, rank, row_tiles);
      }
    }
    __syncwarp();
#if CLUSTER > 1
    cluster_barrier();  // as the consumers: before and after they read each other's sums
    cluster_barrier();
#endif
  } else {
    u32 scale_words[MF], next_words[MF];  // of 32 chunks, and of the next ones
    load_scales(next_words, scales, piece, 0, warp, lane);
    __syncthreads();
    if (REGISTER_BOUND) take_registers<CONSUMER_REGISTERS>();
    const int group = warp / 4, part = warp % 4;  // 16-row part of a 64-row tile
    const u32 mine = group * MF * 4096 + part * 1024 + lane * 16;
    Sums sum[MF];
    u32 a[OPERANDS][16];
    bool has_waited = !BESIDE;
#define RELEASE(s) if (lane == 0) barrier_arrive(empty + 8 * (s));
#define RELEASE_BEFORE()  /* the stage of chunk c - 1: all have read it */ \
  if (c > 0) RELEASE(stage == 0 ? STAGES - 1 : stage - 1)
#define NEXT_SCALES()                                                               \
  if (c % 32 == 0) {                                                                \
    for (int f = 0; f < MF; ++f) scale_words[f] = next_words[f];                    \
    if (c + 32 < count) load_scales(next_words, scales, piece, c + 32, warp, lane); \
  }
#define LOAD(f) load_codes(w_stages + stage * W_BYTES + mine + (f) * 4096)
#define SCALES(f) __shfl_sync(~0u, scale_words[f], c % 32)
#define X_STAGE (x_stages + stage * X_BYTES)
    while (true) {
      const int count = num_chunks(piece.slice);
#pragma unroll
      for (int f = 0; f < MF; ++f)
#pragma unroll
        for (int i = 0; i < NB / 2; ++i) sum[f][i / (WIDTH / 2)][i % (WIDTH / 2)] = 0.0f;
#if OPERANDS == 1
      for (int c = 0; c < count; ++c) {
        NEXT_SCALES()
        wait_or_give_up(full + 8 * stage, parity);
        const Codes codes = LOAD(0);
        const u32 scale = SCALES(0);
        wgmma_wait<0>();
        RELEASE_BEFORE()
        decode_tile(a[0], codes, scale);
        multiply_tile(sum[0], a[0], X_STAGE);
        NEXT()
      }
#else  // one buffer is decoded while the tensor cores read the other
#define STEP(buffer, f)                      \
  decode_tile(a[buffer], LOAD(f), SCALES(f)); \
  multiply_tile(sum[f], a[buffer], X_STAGE); \
  wgmma_wait<1>();
      for (int c = 0; c < count; ++c) {
        NEXT_SCALES()
        wait_or_give_up(full + 8 * stage, parity);
        STEP(0, 0)
        RELEASE_BEFORE()
#if MF == 1
        NEXT()
        if (++c == count) break;
        wait_or_give_up(full + 8 * stage, parity);
        STEP(1, 0)
        RELEASE_BEFORE()
#else
        STEP(1, 1)
#endif
        NEXT()
      }
#endif
      wgmma_wait<0>();
      // Without a chunk nobody has waited for a stage, whose activations the producer waits for.
      if (!has_waited || (SLICES > NUM_CHUNKS && count == 0)) wait_for_earlier_kernels(), let_next_kernel_start(), has_waited = true;
#if DIRECT
      if (count > 0) RELEASE(stage == 0 ? STAGES - 1 : stage - 1)
      void* const out = PARTIAL ? (float*)y + (long long)piece.slice * rows * OUT_N : y;
      const Piece done = piece;
      number += gridDim.x;
      const bool is_last = number >= num_pieces;
      if (!is_last) {
        piece = piece_of(number, rank, row_tiles);
        load_scales(next_words, scales, piece, 0, warp, lane);
      }
#pragma unroll
      for (int f = 0; f < MF; ++f)
        store_sums(sum[f], out, rows, done.first_row, done.tile * MT + (group * MF + f) * 64 + part * 16, lane);
      if (is_last) break;
#else
      break;
#endif
    }
#if !DIRECT
    // When no consumer reads the ring any more, its memory takes the partial sums [NB][SUM_STRIDE].
    consumer_barrier();
    float* sums = (float*)(unaligned + (base - shared_address(unaligned)));
#pragma unroll
    for (int f = 0; f < MF; ++f)
#pragma unroll
      for (int i = 0; i < NB / 2; ++i) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const int column = (group * MF + f) * 64 + part * 16 + lane / 4 + (i / 2 % 2) * 8;
        sums[row * SUM_STRIDE + column] = sum[f][i / (WIDTH / 2)][i % (WIDTH / 2)];
      }
#if CLUSTER > 1
    cluster_barrier();
#else
    consumer_barrier();
#endif
    finish(base, y, rows, rank, piece.tile, piece.first_row, warp, lane);
#if CLUSTER > 1
    cluster_barrier();  // the others may still read this CTA's sums
#endif
#endif
  }
}
