// Between two sublayers, in one launch: new streams from the trunk and the last sublayer's output, the next input read from
// them, normed and rounded, and its mixes. The bits are those of the two launches of hyper_connection_write_read.cu and
// hyper_connection_finish.cu.
//
// A cluster holds all columns of 16 rows: each of its CTAs has a slice of 32 columns per warp, with its part of fn in shared
// memory (see hyper_connection_stream.cuh). Sums over pairs of slices are written into the shared memory of the CTAs that
// need them: the squares of h into all, since each norms its own columns, for which h still lies in registers; products
// with fn into the one that makes the row's mixes. So nothing but results goes to memory, and there is no counter.
//
// One more warp in each CTA is about mixes: it prepares those that the tile is written with, and makes those of the CTA's
// rows of the tile from the sums. A tile meets thrice: when its mixes are prepared, over the cluster when the sums are
// where they belong, and when the rows' scales are known. What is written after the second meeting for the next tile has
// another place (`turn`), and who comes to that tile's second meeting has read what was there.
//
// Sinkhorn's passes are a chain of a microsecond, which the next kernel would wait for although it needs no mixes. With
// TO_LOGITS the kernel leaves a row's 24 logits, and with FROM_LOGITS the next of these kernels makes mixes of them, in each
// CTA for all rows of the tile, while it waits: for the kernel before it (`early`: the logits are older than that one) or
// for the trunk.
//
// Sums over columns: slices of 32, then 8 slices pairwise, then groups of 256 columns.
//
// Compile-time constants: HIDDEN, CLUSTER (CTAs; 16 is a multiple), WARPS (with columns, in a CTA: even, HIDDEN / 32 /
// CLUSTER), LOOPS (a cluster may have more than one tile), KIND and K of the update (see hyper_connection/stages.py),
// FEATURE, FROM_LOGITS, TO_LOGITS, ITERATIONS, NORM_BF16 (the norm's weight is bf16, else float32), ROUNDED, CODES, SCALES
// (0 none, 1 ue8m0 bytes, 2 float32).

#include "hyper_connection_common.cuh"

#ifndef THREADS
#define THREADS (32 * (WARPS + 1))
#endif
#define SLICES (HIDDEN / 32)
#define PAIRS (SLICES / 2)
#define GROUPS (HIDDEN / 256)
#define OWN_ROWS (16 / CLUSTER)     // of a tile, whose mixes a CTA makes
#define SUM_FLOATS 26               // 24 products, the squares of the trunk; even, for stores of two
#define SQUARES_STRIDE (PAIRS + 4)  // 16-byte loads meet few banks twice
#define SERIAL 1
#define TILES 1
#define STORE_H 0

static_assert(HIDDEN % 256 == 0 && WARPS % 2 == 0 && WARPS * CLUSTER == SLICES && OWN_ROWS * CLUSTER == 16, "shape");

struct Arguments {
  const u16* trunk;         // [rows, 4, HIDDEN]
  const void* update;       // KIND 1: bf16 [rows, HIDDEN]; 2: bf16 [rows, K, HIDDEN]; 3: float32 [K, rows, HIDDEN]
  const u16* shared;        // KIND 2: [rows, HIDDEN]
  const int* experts;       // KIND 2: [rows, K] or null
  const float* write_mix;   // [rows, 4]
  const float* stream_mix;  // [rows, 4, 4]
  const float* read_mix;    // [rows, 4]
  const float* logits;      // [rows, 24], FROM_LOGITS
  const float* fn;          // [24, 4, HIDDEN]
  const void* norm;         // [HIDDEN]
  const float* scale;       // [3]
  const float* base;        // [24]
  u16* new_trunk;           // may be trunk
  u16* h;                   // unused
  u16* feature;             // [rows, HIDDEN]
  u16* x;                   // [rows, HIDDEN]
  u16* rounded;             // [rows, HIDDEN]
  u8* codes;                // [rows, HIDDEN]
  void* scales;             // [rows, HIDDEN / 32]
  float* mixes;             // [rows, 24], TO_LOGITS: logits
  int rows, mix_stride, read_stride, clusters, early;
  float norm_eps, hc_eps;
};

#include "hyper_connection_stream.cuh"
#include "hyper_connection_mixes.cuh"
#include "hyper_connection_norm.cuh"

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ void meet_some(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 address_of(const float* p, u32 rank) {  // of another CTA's shared memory
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank));
  return remote;
}
__device__ __forceinline__ void store_of(float* p, u32 rank, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_of(p, rank)), "f"(x) : "memory");
}
__device__ __forceinline__ void store_of(float* p, u32 rank, const Pair& x) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_of(p, rank)), "f"(x.of[0]), "f"(x.of[1]) : "memory");
}
__device__ __forceinline__ Floats load_from_l2(const float* p) {  // an older kernel's, before this one has waited
  Floats x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.of[0]), "=f"(x.of[1]), "=f"(x.of[2]), "=f"(x.of[3]) : "l"(p));
  return x;
}

// ---------------------------------------------------------------- shared memory
struct Stages {
  float mixes[2][TILE_FLOATS];                       // by turn: of the tile's rows
  float odd[WARPS / 2][TILE_FLOATS];                 // sums of each second warp
  float sums[2][OWN_ROWS][PAIRS][SUM_FLOATS];        // by turn: of this CTA's rows, from all CTAs
  __align__(16) float squares[2][16][SQUARES_STRIDE];  // by turn: of h, of all rows, from all CTAs
  float inverse[16];                                 // of the root mean square of h
};

// ---------------------------------------------------------------- columns
// Of the two warps of a pair: their sum to where it is needed.
__device__ __forceinline__ void send(const Arguments& a, Sums& sums, Stages& stages, int tile, int turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  float* stage = stages.odd[warp / 2];
  if (warp % 2 == 1) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = stage + (8 * i + group) * ROW_FLOATS;
      sums.store(i, quad, to, to + 24, to + 25);
    }
  }
  meet_some(2 + warp / 2, 64);
  if (warp % 2 == 1) return;
  const int pair = cluster_rank() * (WARPS / 2) + warp / 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 8 * i + group;
    if (tile * 16 + r >= a.rows) continue;
    const float* other = stage + r * ROW_FLOATS;
    float* to = stages.sums[turn][r / CLUSTER][pair];
    const u32 owner = r % CLUSTER;
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const Pair theirs = *(const Pair*)(other + 8 * n + 2 * quad);
      const Pair both = {sums.products[n][2 * i] + theirs.of[0], sums.products[n][2 * i + 1] + theirs.of[1]};
      store_of(to + 8 * n + 2 * quad, owner, both);
    }
    if (quad == 0) store_of(to + 24, owner, sums.of_trunk[i] + other[25]);
    const float of_h = sums.of_h[i] + other[24];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank += 4)
      if (rank + quad < CLUSTER) store_of(&stages.squares[turn][r][pair], rank + quad, of_h);
  }
}

// By each warp for some rows of the tile.
__device__ __forceinline__ void find_scales(const Arguments& a, Stages& stages, int tile, int turn) {
  const int lane = threadIdx.x % 32, rows = min(16, a.rows - tile * 16);
  for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
    float sum = 0.0f;
#pragma unroll
    for (int g = lane; g < GROUPS; g += 32) {
      const Floats pairs = *(const Floats*)(stages.squares[turn][r] + 4 * g);
      sum += (pairs.of[0] + pairs.of[1]) + (pairs.of[2] + pairs.of[3]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) stages.inverse[r] = rsqrtf(sum / HIDDEN + a.norm_eps);
  }
  meet_some(1, 32 * WARPS);
}

__device__ __forceinline__ void columns(const Arguments& a, Words* fn_words, Stages& stages) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int column = (cluster_rank() * WARPS + warp) * 32 + 8 * quad;
  Words* mine = fn_words + warp * FN_WORDS + lane;
  float weight[8];
  FnShare fn;
  fn.fetch(a, 0, group, column);  // does not depend on earlier kernels
  load_norm(a, column, weight);
  fn.split(mine, 0);
  __syncwarp();
  wait_for_earlier_kernels();
  int tile = blockIdx.x / CLUSTER, turn = 0;
  Row rows[2];
  // A row that does not exist may hold anything: it meets no other.
  rows[0].fetch(a, min(tile * 16 + group, a.rows - 1), column);
  if (tile * 16 + 8 < a.rows) rows[1].fetch(a, min(tile * 16 + 8 + group, a.rows - 1), column);
  cluster_wait();  // every CTA is there
  while (true) {
    const float* mixes = stages.mixes[turn];
    const bool has_lower = tile * 16 + 8 < a.rows;
    Words h[2];
    Sums sums;
    __syncthreads();  // the mixes are prepared
    h[0] = rows[0].write_and_read(a, mixes + group * ROW_FLOATS, tile * 16 + group, column);
    if (has_lower) h[1] = rows[1].write_and_read(a, mixes + (8 + group) * ROW_FLOATS, tile * 16 + 8 + group, column);
    else rows[1].clear();
    products(sums.products, rows, mine);
#pragma unroll
    for (int i = 0; i < 2; ++i) sums.of_h[i] = over_quad(rows[i].of_h), sums.of_trunk[i] = over_quad(rows[i].of_trunk);
    const int next = tile + a.clusters;
    const bool goes_on = LOOPS && next * 16 < a.rows;
    if (goes_on) {  // on their way while the cluster meets
      rows[0].fetch(a, min(next * 16 + group, a.rows - 1), column);
      if (next * 16 + 8 < a.rows) rows[1].fetch(a, min(next * 16 + 8 + group, a.rows - 1), column);
    }
    send(a, sums, stages, tile, turn);
    cluster_arrive();
    cluster_wait();
    find_scales(a, stages, tile, turn);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !has_lower) break;
      const int r = 8 * i + group, row = tile * 16 + r;
      const long long at = (long long)row * HIDDEN + column;
      const Words x = normed(h[i], stages.inverse[r], weight);
      if (row < a.rows) *(Words*)(a.x + at) = x;
      if (ROUNDED || CODES || SCALES) store_rounded(a, x, at, row < a.rows);
    }
    if (!goes_on) break;
    tile = next, turn ^= 1;
  }
}

// ---------------------------------------------------------------- mixes
// What a tile is written and read with.
__device__ __forceinline__ void prepare(const Arguments& a, int tile, float* stage, bool waits) {
  const int lane = threadIdx.x % 32, row = min(tile * 16 + lane % 16, a.rows - 1);
#if FROM_LOGITS
  if (waits && !a.early) wait_for_earlier_kernels();
  Floats logits[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) logits[i] = load_from_l2(a.logits + row * 24 + 4 * i);
  RowMixes made;
  made.make(logits, a.hc_eps);
  if (waits && a.early) wait_for_earlier_kernels();
  float* to = stage + lane % 16 * ROW_FLOATS;  // twice the same
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = made.gates[4 + i], to[20 + i] = made.gates[i];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) to[4 + 4 * i + j] = made.streams[i][j];
#if KIND == 2
  to[MASK] = __uint_as_float(mask_of(a, row));
#endif
#else
  if (waits) wait_for_earlier_kernels();
  TileMixes mixes;
  mixes.fetch(a, tile * 16, lane);
  mixes.store(stage, lane);
#endif
}

__device__ __forceinline__ void mixes(const Arguments& a, Stages& stages) {
  const int lane = threadIdx.x % 32, mix = min(lane, 23), rank = cluster_rank();
  const float factor = a.scale[mix < 4 ? 0 : mix < 8 ? 1 : 2], offset = a.base[mix];
  int tile = blockIdx.x / CLUSTER, turn = 0;
  prepare(a, tile, stages.mixes[0], true);
  cluster_wait();
  while (true) {
    __syncthreads();  // the mixes are prepared
    const int next = tile + a.clusters;
    const bool goes_on = LOOPS && next * 16 < a.rows;
    if (goes_on) prepare(a, next, stages.mixes[turn ^ 1], false);
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int own = 0; own < OWN_ROWS; ++own) {
      const long long row = tile * 16 + own * CLUSTER + rank;
      if (row >= a.rows) break;
      float four[4] = {};
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const float* pair = stages.sums[turn][own][4 * g] + min(lane, 24);
        four[g % 4] += (pair[0] + pair[SUM_FLOATS]) + (pair[2 * SUM_FLOATS] + pair[3 * SUM_FLOATS]);
      }
      const float sum = (four[0] + four[1]) + (four[2] + four[3]);
      const float logit = logit_of(sum, __shfl_sync(~0u, sum, 24), factor, offset, a.norm_eps);
      if (!TO_LOGITS) store_mixes(logit, lane, a.mixes + row * 24, a.hc_eps);
      else if (lane < 24) a.mixes[row * 24 + lane] = logit;
    }
    if (!goes_on) break;
    tile = next, turn ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hc_cluster(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  Words* fn_words = (Words*)shared;
  Stages& stages = *(Stages*)(fn_words + WARPS * FN_WORDS);
  cluster_arrive();
  if (threadIdx.x / 32 == WARPS) mixes(a, stages);
  else columns(a, fn_words, stages);
}
