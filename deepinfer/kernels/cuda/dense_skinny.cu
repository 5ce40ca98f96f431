// Matrix product with few activation rows: y[rows, N] = x[rows, K] @ W[N, K]^T, bound by reading W once.
//
// The weights are operand A of mma.sync.m16n8k16 (16 weight rows) and the activations operand B (8 of them), so one row
// costs as much as eight. Weights come packed in blocks of 32 rows and 2048 bytes (deepinfer/kernels/dense/packing.py):
// a warp reads a block as four fully coalesced 512-byte loads and each lane finds its own fragments in its registers.
//
// A block of threads (CTA) owns 32 * WM weight rows and one K slice; its WM * WK warps split rows and K further. The
// CLUSTER CTAs of a cluster own the K slices of the same rows. Partial sums go to the CTA of the cluster that finishes
// the output in question (distributed shared memory) and are added there in the order of K. The order depends on the
// shape alone, never on the number of rows: a row's bits are the same in every batch.
//
// A warp's blocks follow each other in memory. It keeps DEPTH of them in flight, in one of two ways: in its registers
// (RING 0), or in a ring of its own in shared memory that the bulk copy engine fills (RING 1). With the ring, one CTA
// per SM suffices, so the shares of all SMs can be made equal, and registers don't limit what is in flight.
//
// Compile-time constants: N (a multiple of 32), OUT_N (columns of y that exist), K; WM, WK, CLUSTER (geometry), NT
// (8-row activation tiles), DEPTH, RING, FP8 (1: e4m3 with a scale per 32x32, 0: bf16 weights), GROUP_N (weight rows
// that share an input; N if not grouped), OUT_F32, QUANTIZE (round the output to FP8 in groups of 32), MIN_CTAS,
// LOAD_HINT, EARLY (1: the next kernel may start at once, 0: when this one has read its weights), BESIDE (1: x is older
// than the kernel before this one, which is waited for only before the outputs are written; EARLY then counts for nothing).

#include "types.cuh"

#define THREADS (32 * WM * WK)
#define BLOCK_K (FP8 ? 64 : 32)                    // columns of one packed block
#define NUM_BLOCK_ROWS (N / 32)
#define NUM_CHUNKS ((K + BLOCK_K - 1) / BLOCK_K)   // packed blocks along K
#define MAX_CHUNKS ((NUM_CHUNKS + CLUSTER - 1) / CLUSTER)                 // of one CTA
#define X_STRIDE (MAX_CHUNKS * BLOCK_K * 2 + 16)   // bytes of one activation row in shared memory, without bank conflicts
#define ROWS (8 * NT)
#define UNITS (ROWS * WM)                          // outputs of a cluster, in units of 32 weight rows x 1 activation
#define MAX_UNITS ((UNITS + CLUSTER - 1) / CLUSTER)
#define SOURCES (CLUSTER * WK)                     // partial sums per output
#define RING_BYTES (RING ? WM * WK * DEPTH * 2048 : 0)

static_assert(N % 32 == 0 && K % 8 == 0, "shape");
static_assert(GROUP_N % (32 * WM) == 0 || GROUP_N == N, "a CTA must not straddle two groups");

// ---------------------------------------------------------------- instructions
#include "barriers.cuh"
#include "clusters.cuh"
#include "launch.cuh"
#include "matrices.cuh"
#include "numbers.cuh"

__device__ __forceinline__ uint4 load_weights(const void* p) {
  uint4 v;
#if LOAD_HINT == 1
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#elif LOAD_HINT == 2
  asm volatile("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
               "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], policy; }"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#else
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#endif
  return v;
}

__device__ __forceinline__ void cluster_start() {  // with cluster_started: every CTA of the cluster runs
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_started() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_sum(u32 address, float value) {
#if CLUSTER > 1
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory");
#else
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(value) : "memory");
#endif
}

__device__ __forceinline__ void copy_weights(u32 to, const void* from, u32 barrier) {  // one packed block
  if (LOAD_HINT == 2) copy_bulk_once(to, from, 2048, barrier);
  else copy_bulk(to, from, 2048, barrier);
}

// ---------------------------------------------------------------- the kernel
#include "dense_decode.cuh"

// Round a warp's 32 values (already bf16) to FP8 with one power-of-two scale: the value, exact in bf16.
__device__ __forceinline__ float round_q8(float value) {
  float largest = fabsf(value);
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  int exponent = ((__float_as_int(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
  const float scale = __int_as_float((exponent + 127) << 23), inverse = __int_as_float((127 - exponent) << 23);
  return round_e4m3(value * inverse) * scale;
}

struct Block {
  uint4 part[4];
};

__device__ __forceinline__ void load_block(Block& block, const char* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) block.part[i] = load_weights(from + i * 512);
}

__device__ __forceinline__ void fetch_block(u32 stage, const char* from, u32 full) {  // one lane
  barrier_expect(full, 2048);
  copy_weights(stage, from, full);
}

__device__ __forceinline__ u32 scale_of(const u32 (&lane_scales)[(MAX_CHUNKS / WK + 32) / 32], int i) {
  u32 scale = lane_scales[0];
#pragma unroll
  for (int word = 1; word < (MAX_CHUNKS / WK + 32) / 32; ++word)
    if (i >= word * 32) scale = lane_scales[word];
  return __shfl_sync(~0u, scale, i % 32);
}

// One packed block times BLOCK_K columns of every activation row. `x` is this lane's ldmatrix address of row tile 0.
__device__ __forceinline__ void multiply_block(float (&sum)[2][NT][4], const Block& block, u32 scales, u32 x) {
#if FP8
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // 32 columns share a scale
    const u32 scale = __byte_perm(scales, scales, half ? 0x3232 : 0x1010);
    u32 b[NT][4];
#pragma unroll
    for (int tile = 0; tile < NT; ++tile) load_matrices(b[tile], x + tile * 8 * X_STRIDE + half * 64);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 &top = block.part[2 * m], &bottom = block.part[2 * m + 1];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const u32 u = half ? (step ? top.w : top.z) : (step ? top.y : top.x);
        const u32 v = half ? (step ? bottom.w : bottom.z) : (step ? bottom.y : bottom.x);
        const u32 a0 = decode_pair(u, scale), a1 = decode_pair(v, scale);
        const u32 a2 = decode_pair(u << 8, scale), a3 = decode_pair(v << 8, scale);
#pragma unroll
        for (int tile = 0; tile < NT; ++tile)
          multiply(sum[m][tile], a0, a1, a2, a3, b[tile][2 * step], b[tile][2 * step + 1]);
      }
    }
  }
#else
  u32 b[NT][4];
#pragma unroll
  for (int tile = 0; tile < NT; ++tile) load_matrices(b[tile], x + tile * 8 * X_STRIDE);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint4& a = block.part[2 * m + step];
#pragma unroll
      for (int tile = 0; tile < NT; ++tile)
        multiply(sum[m][tile], a.x, a.y, a.z, a.w, b[tile][2 * step], b[tile][2 * step + 1]);
    }
#endif
}

// weights: packed blocks [N/32, NUM_CHUNKS, 2048 bytes]. scales: [N/32, NUM_CHUNKS], two bf16 powers of two per block.
// x: bf16, row r of group g at x + r * x_stride + g * K. y: [rows, OUT_N], contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
dense_skinny(const char* __restrict__ weights, const u32* __restrict__ scales, const u16* __restrict__ x,
             void* __restrict__ y, int rows, long long x_stride) {
  extern __shared__ __align__(16) char shared[];  // [warps][DEPTH][2048] of the ring come first
  float* partial = (float*)(shared + RING_BYTES);                    // [SOURCES][MAX_UNITS][32]
  char* x_shared = shared + RING_BYTES + SOURCES * MAX_UNITS * 128;  // [ROWS][X_STRIDE]

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warp = warp % WM, k_warp = warp / WM;
  const int rank = CLUSTER > 1 ? (int)cluster_rank() : 0, tile = blockIdx.x / CLUSTER, first_row = blockIdx.y * ROWS;
  const int block_row = tile * WM + row_warp;
  const int first = rank * NUM_CHUNKS / CLUSTER, count = (rank + 1) * NUM_CHUNKS / CLUSTER - first;
  const int warp_first = k_warp * count / WK;
  const int warp_count = block_row < NUM_BLOCK_ROWS ? (k_warp + 1) * count / WK - warp_first : 0;

  cluster_start();
  // The weights don't depend on earlier kernels: their loads start before anything is waited for.
  const long long at = (long long)block_row * NUM_CHUNKS + first + warp_first;
#if RING
  __shared__ __align__(8) u64 barriers[WM * WK * DEPTH];
  const char* from = weights + at * 2048;
  const u32 ring = shared_address(shared) + warp * (DEPTH * 2048), full = shared_address(barriers) + warp * (DEPTH * 8);
  if (lane == 0) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) barrier_init(full + 8 * d, 1);
    barriers_ready();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (d < warp_count) fetch_block(ring + d * 2048, from + d * 2048, full + 8 * d);
  }
  __syncwarp();
#else
  const char* from = weights + at * 2048 + lane * 16;
  Block block[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
    if (d < warp_count) load_block(block[d], from + d * 2048);
#endif
  u32 lane_scales[(MAX_CHUNKS / WK + 32) / 32];  // scale of chunk i: in lane i % 32
#if FP8
#pragma unroll
  for (int i = 0; i < (MAX_CHUNKS / WK + 32) / 32; ++i)
    lane_scales[i] = i * 32 + lane < warp_count ? __ldg(scales + at + i * 32 + lane) : 0;
#endif

  if (!BESIDE) wait_for_earlier_kernels();
  if (!BESIDE && EARLY) let_next_kernel_start();
  const u16* x_group = x + (tile * 32 * WM / GROUP_N) * (long long)K + first * BLOCK_K;
  const int columns = min(count * BLOCK_K, K - first * BLOCK_K);
  const int pieces = count * (BLOCK_K / 8);
  // Rows that don't exist may hold anything: they meet no other row's sums. Columns that don't exist must be zero.
  const int existing = min(ROWS, rows - first_row);
  for (int i = threadIdx.x; i < existing * pieces; i += THREADS) {
    const int row = i / pieces, column = (i - row * pieces) * 8;
    const bool exists = column < columns;
    const u16* source = exists ? x_group + (first_row + row) * x_stride + column : x;
    copy_async(shared_address(x_shared) + row * X_STRIDE + column * 2, source, exists ? 16 : 0);
  }
  wait_for_copies();
  __syncthreads();

  float sum[2][NT][4] = {};
  const u32 x_lane = shared_address(x_shared) + (lane % 8) * X_STRIDE + (lane / 8) * 16 + warp_first * (BLOCK_K * 2);
#if RING
  int stage = 0;
  u32 parity = 0;
  for (int i = 0; i < warp_count; ++i) {
    const u32 scale = FP8 ? scale_of(lane_scales, i) : 0;
    barrier_wait(full + 8 * stage, parity);
    Block block;
#pragma unroll
    for (int part = 0; part < 4; ++part) block.part[part] = load_shared(ring + stage * 2048 + part * 512 + lane * 16);
    multiply_block(sum, block, scale, x_lane + i * (BLOCK_K * 2));
    __syncwarp();  // every lane has its part of the block
    if (lane == 0 && i + DEPTH < warp_count) fetch_block(ring + stage * 2048, from + (i + DEPTH) * 2048, full + 8 * stage);
    if (++stage == DEPTH) stage = 0, parity ^= 1;
  }
#else
  for (int base = 0; base < warp_count; base += DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int i = base + d;
      if (i < warp_count) {
        multiply_block(sum, block[d], FP8 ? scale_of(lane_scales, i) : 0, x_lane + i * (BLOCK_K * 2));
        if (i + DEPTH < warp_count) load_block(block[d], from + (i + DEPTH) * 2048);
      }
    }
  }
#endif
  if (BESIDE) wait_for_earlier_kernels();
  if (BESIDE || !EARLY) let_next_kernel_start();

  // Partial sums to the CTA that finishes them: unit (row, block row) belongs to rank unit % CLUSTER.
  cluster_started();
  const int source = rank * WK + k_warp;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = nt * 8 + 2 * (lane % 4) + odd, unit = row * WM + row_warp;
      if (first_row + row >= rows) continue;
      const u32 mine = shared_address(partial + (source * MAX_UNITS + unit / CLUSTER) * 32 + lane / 4);
      const u32 to = CLUSTER > 1 ? remote_address(mine, unit % CLUSTER) : mine;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        store_sum(to + m * 64, sum[m][nt][odd]);
        store_sum(to + m * 64 + 32, sum[m][nt][odd + 2]);
      }
    }
  if (CLUSTER > 1) cluster_barrier();
  else __syncthreads();

  for (int local = warp; local < MAX_UNITS; local += WM * WK) {
    const int unit = local * CLUSTER + rank, row = first_row + unit / WM, out_block = tile * WM + unit % WM;
    if (unit >= UNITS || row >= rows || out_block >= NUM_BLOCK_ROWS) continue;
    float value = 0.0f;
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) value += partial[(s * MAX_UNITS + local) * 32 + lane];
    if (out_block * 32 + lane >= OUT_N) continue;  // padding of N; no group of QUANTIZE is cut
    const long long place = (long long)row * OUT_N + out_block * 32 + lane;
#if OUT_F32
    ((float*)y)[place] = value;
#elif QUANTIZE
    const float once = __int_as_float((u32)to_bf16(value) << 16);
    ((u16*)y)[place] = to_bf16(round_q8(once));
#else
    ((u16*)y)[place] = to_bf16(value);
#endif
  }
}
