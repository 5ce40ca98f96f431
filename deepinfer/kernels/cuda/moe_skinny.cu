// Products of routed experts with few pairs each: y[pair, N] = x[pair / TOP, K] @ W[expert of the pair]^T, FP4 weights.
//
// Bound by reading the weights once. Each warp streams its tiles (deepinfer/kernels/moe/packing.py) through a ring of its
// own, filled by bulk copies that run ahead across the borders of tiles and experts, decodes them in registers to exact
// bf16 and multiplies them as operand A of mma.m16n8k16. Activations come from L1 as they lie in memory: 8 neighbouring
// columns are a lane's operands of two steps. One CTA per SM; its warps work on neighbouring tiles, so mostly on one expert,
// and meet only in teams of SPLIT warps that have the slices of K of a tile. A pair tile without pairs costs nothing.
//
// The order of summation depends on the shape and SPLIT, not on the number of pairs.
//
// Compile-time constants: K (a multiple of 128), TILES (of 64 weight rows, per expert), TOP (pairs per row of x), WARPS,
// SPLIT, DEPTH (pairs of tiles in a ring), NT (blocks have 8 NT pairs), EVICT_FIRST (the weights leave L2 first), AHEAD (the
// first activations are loaded before waiting, where `early`), GATED (the rows of W are paired gate and up: y is
// the rounded activation [pairs, 32 TILES], and the shared expert's activation is made along the way; else y is [pairs, 64
// TILES]).

#include "types.cuh"

#define THREADS (32 * WARPS)
#define TEAMS (WARPS / SPLIT)
#define CHUNKS (K / 128)
#define TILE_BYTES 2176
#define CODE_BYTES 2048
#define PAIR_BYTES (2 * TILE_BYTES)  // a chunk: two tiles, neighbours along K
#define BLOCK (8 * NT)
#define CHUNK_STEP (2 * TILES * TILE_BYTES)  // from a chunk to the next
#define SUMS (16 * NT)  // of a lane and a tile
#define WIDTH (32 * TILES)

static_assert(K % 128 == 0 && WARPS % SPLIT == 0 && (SPLIT == 1 || TEAMS < 16) && CHUNKS >= SPLIT, "shape");

struct Arguments {
  const char* weights;      // [experts, K / 64, TILES, TILE_BYTES]
  const int* ordered;       // [blocks, BLOCK]: pairs; from num_pairs on: none
  const int* block_expert;  // [blocks]
  const int* num_ordered;   // [1]
  const u16* x;             // bf16 [rows, K]
  const float* route;       // GATED: [num_pairs]
  const float* shared;      // GATED: [shared_rows, 2 WIDTH], gate first
  u16* shared_out;          // bf16 [shared_rows, WIDTH]
  u16* y;                   // bf16
  int num_pairs, shared_rows, early;
  float limit;
};

// ---------------------------------------------------------------- instructions
#include "barriers.cuh"
#include "launch.cuh"
#include "matrices.cuh"
#include "numbers.cuh"

__device__ __forceinline__ uint4 load_activations(const u16* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_older(const u16* p) {  // past the L1
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

template <int HALF> __device__ __forceinline__ u32 times(u32 a, u32 b) {  // two bf16 by one half of b
  asm("{ .reg .b16 half<2>; .reg .b32 both; mov.b32 {half0, half1}, %1; mov.b32 both, {half%2, half%2};\n"
      "mul.bf16x2 %0, %0, both; }" : "+r"(a) : "r"(b), "n"(HALF));
  return a;
}

__device__ __forceinline__ void copy_tile(u32 to, const void* from, u32 barrier) {
  if (EVICT_FIRST) copy_bulk_once(to, from, TILE_BYTES, barrier);
  else copy_bulk(to, from, TILE_BYTES, barrier);
}

__device__ __forceinline__ void meet_team(int team) {
  asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "n"(32 * SPLIT) : "memory");
}

// ---------------------------------------------------------------- the kernel
// The codes of a lane's rows u and v as bf16 of 2^-126 times their value, two in a register; see packing.py.
__device__ __forceinline__ void decode(u32 u, u32 v, u32 (&of_u)[4], u32 (&of_v)[4]) {
  const u32 MASK = 0x81C081C0u, KEPT = 0x0C180C18u, rest = (u & KEPT) | (v << 2 & ~KEPT);
  of_u[0] = u & MASK, of_v[0] = v & MASK;
  of_u[1] = __funnelshift_r(u, u, 6) & MASK, of_v[1] = __funnelshift_r(v, v, 6) & MASK;
  of_u[2] = u << 6 & MASK, of_v[2] = v << 6 & MASK;
  of_u[3] = __funnelshift_r(rest, rest, 4) & MASK, of_v[3] = rest << 2 & MASK;
}

__device__ __forceinline__ u32 factors(u32 scales, int half) {  // bf16 of 2^126 times the scales of rows u and v
  return __byte_perm(scales, 0, half ? 0x4342 : 0x4140) << 7;
}

struct Place {  // of this warp
  int team, slice, first, count;  // chunks of its slice of K
  int total;                      // tiles of all experts
};

// Full rounds give neighbouring tiles to the teams of a CTA; what is left is spread over all CTAs. -1: none.
__device__ __forceinline__ int tile_of(const Place& place, int grid, int round) {
  const int full = place.total / (grid * TEAMS), cta = blockIdx.x;
  const int tile = round < full ? (round * grid + cta) * TEAMS + place.team : full * grid * TEAMS + place.team * grid + cta;
  return round <= full && tile < place.total ? tile : -1;
}

// A tile, and where this warp's slices of its weights and of its activations begin.
struct Work {
  int tile;             // -1: none
  const char* weights;
  const u16* x[NT];     // a lane's 8 columns of each pair tile; a pair that does not exist gets some row: it meets no other
  int used;             // pair tiles that have pairs; they come first
};

__device__ __forceinline__ void find_weights(const Arguments& a, const Place& place, Work& work) {
  if (work.tile < 0) return;
  const long long expert = a.block_expert[work.tile / TILES];
  work.weights = a.weights + ((expert * CHUNKS + place.first) * 2 * TILES + work.tile % TILES) * TILE_BYTES;
}

__device__ __forceinline__ void find_rows(const Arguments& a, const Place& place, Work& work) {
  const int lane = threadIdx.x % 32;
  work.used = 1;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int pair = work.tile < 0 ? 0 : a.ordered[work.tile / TILES * BLOCK + 8 * n + lane / 4];
    work.x[n] = a.x + (long long)(pair < a.num_pairs ? pair / TOP : 0) * K + place.first * 128 + lane % 4 * 8;
    if (n > 0) work.used += __shfl_sync(~0u, pair, 0) < a.num_pairs;
  }
}

// One chunk of weights, two tiles.
__device__ __forceinline__ void fetch(const char* from, u32 to, u32 full) {
  if (threadIdx.x % 32 == 0) {
    barrier_expect(full, PAIR_BYTES);
    copy_tile(to, from, full);
    copy_tile(to + TILE_BYTES, from + TILES * TILE_BYTES, full);
  }
}

struct Operands { uint4 of[NT][2]; };  // [pair tile][half of 32 columns]

__device__ __forceinline__ void load_operands(Operands& b, const u16* const (&x)[NT], int column, int used) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
    if (n < used)
#pragma unroll
      for (int half = 0; half < 2; ++half) b.of[n][half] = load_activations(x[n] + column + half * 32);
}

__device__ __forceinline__ void load_older_operands(Operands& b, const u16* const (&x)[NT], int column) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) b.of[n][half] = load_older(x[n] + column + half * 32);
}

// With the first USED pair tiles.
template <int USED>
__device__ __forceinline__ void multiply_tile(float (&sum)[4][NT][4], u32 tile, const Operands& b) {
  const int lane = threadIdx.x % 32;
  const uint4 all = load_shared(tile + CODE_BYTES + lane / 4 * 16);
  const u32 scales[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const uint4 words = load_shared(tile + m * 512 + lane * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 u[4], v[4];  // rows g and g + 8
      decode(half ? words.z : words.x, half ? words.w : words.y, u, v);
      const u32 scale = factors(scales[m], half);
#pragma unroll
      for (int j = 0; j < 4; ++j) u[j] = times<0>(u[j], scale), v[j] = times<1>(v[j], scale);
#pragma unroll
      for (int n = 0; n < USED; ++n) {
        multiply(sum[m][n], u[0], v[0], u[1], v[1], b.of[n][half].x, b.of[n][half].y);
        multiply(sum[m][n], u[2], v[2], u[3], v[3], b.of[n][half].z, b.of[n][half].w);
      }
    }
  }
}

// The chunks of a tile with USED pair tiles, the ring once around in a pass. Its first DEPTH chunks are on their way, and
// the operands of the first are there; leaves the same of the next tile. Bit d of `parities` is the phase of place d.
template <int USED>
__device__ __forceinline__ void multiply_chunks(
    float (&sum)[4][NT][4], Operands (&b)[2], u32& parities, u32 ring, u32 full, int count, const Work& work, const Work& next) {
  const bool is_even = CHUNKS % (SPLIT * DEPTH) == 0;  // all passes are whole
  const u16* x[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) x[n] = work.x[n];
  const char* weights = work.weights;
  for (int begin = 0; begin < count; begin += DEPTH) {
    weights += DEPTH * CHUNK_STEP;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (!is_even && begin + d >= count) break;
      const bool is_last = is_even ? d + 1 == DEPTH && begin + DEPTH == count : begin + d + 1 == count;
      const bool is_last_here = is_even ? begin + DEPTH == count : begin + d + DEPTH >= count;  // in this place
      const u32 tiles = ring + d * PAIR_BYTES, barrier = full + 8 * d;
#pragma unroll
      for (int n = 0; n < NT; ++n) x[n] = is_last ? next.x[n] : x[n] + 128;
      barrier_wait(barrier, parities >> d & 1);
      parities ^= 1u << d;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_tile<USED>(sum, tiles + i * TILE_BYTES, b[i]);
        load_operands(b[i], x, i * 64, is_last ? next.used : USED);  // for the next chunk
      }
      __syncwarp();  // every lane has read the tiles
      if (!is_last_here || next.tile >= 0) fetch((is_last_here ? next.weights : weights) + d * CHUNK_STEP, tiles, barrier);
    }
  }
}

// The same with as many as the work uses, at least USED.
template <int USED>
__device__ __forceinline__ void multiply_used(
    float (&sum)[4][NT][4], Operands (&b)[2], u32& parities, u32 ring, u32 full, int count, const Work& work, const Work& next) {
  if constexpr (USED == NT) multiply_chunks<NT>(sum, b, parities, ring, full, count, work, next);
  else if (work.used == USED) multiply_chunks<USED>(sum, b, parities, ring, full, count, work, next);
  else multiply_used<USED + 1>(sum, b, parities, ring, full, count, work, next);
}

__device__ __forceinline__ float activation(float gate, float up, float limit) {
  gate = fmaxf(fminf(gate, limit), -1e4f);  // the lower bound only keeps an infinite gate from NaN
  return gate / (1.0f + expf(-gate)) * fmaxf(fminf(up, limit), -limit);
}

// Scale exponent of Q8 for a group's largest magnitude: 2^e >= max(largest, 1e-4) / 448.
__device__ __forceinline__ int scale_exponent(float largest) {
  return ((__float_as_int(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
}

__device__ __forceinline__ u16 round_q8(float value, int exponent) {
  const float inverse = __int_as_float((127 - exponent) << 23), scale = __int_as_float((exponent + 127) << 23);
  return to_bf16(round_e4m3(value * inverse) * scale);
}

// The shared expert's activation: a warp has groups of 32 columns, several at a time because each waits for memory.
__device__ __forceinline__ void activate_shared(const Arguments& a, int grid) {
  const int lane = threadIdx.x % 32, warps = grid * WARPS, groups = a.shared_rows * TILES;
  const int BATCH = 4;
  for (int begin = blockIdx.x * WARPS + threadIdx.x / 32; begin < groups; begin += BATCH * warps) {
    float gate[BATCH], up[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int group = min(begin + i * warps, groups - 1);
      const float* from = a.shared + (long long)(group / TILES) * (2 * WIDTH) + group % TILES * 32 + lane;
      gate[i] = from[0], up[i] = from[WIDTH];
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const float value = activation(gate[i], up[i], a.limit);
      float largest = fabsf(value);
#pragma unroll
      for (int step = 16; step > 0; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      const int group = begin + i * warps;
      if (group < groups)
        a.shared_out[(long long)(group / TILES) * WIDTH + group % TILES * 32 + lane] = round_q8(value, scale_exponent(largest));
    }
  }
}

// A lane has rows g and g + 8 of every 16, and pairs 2t and 2t + 1 of every 8.
__device__ __forceinline__ void finish(const Arguments& a, int tile, const float (&sum)[4][NT][4], int used) {
  const int lane = threadIdx.x % 32, group = lane / 4, part = tile % TILES;
  const int* pairs = a.ordered + tile / TILES * BLOCK + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (n > 0 && n >= used) break;
      const int pair = pairs[8 * n + i];
      const bool exists = pair < a.num_pairs;
      if (GATED) {
        const float weight = exists ? a.route[pair] : 0.0f;
        float value[4], largest = 0.0f;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          value[m] = activation(sum[m][n][i], sum[m][n][2 + i], a.limit) * weight;
          largest = fmaxf(largest, fabsf(value[m]));
        }
#pragma unroll
        for (int step = 4; step < 32; step <<= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        const int exponent = scale_exponent(largest);
        u16* y = a.y + (long long)pair * WIDTH + part * 32 + group;
#pragma unroll
        for (int m = 0; m < 4; ++m)
          if (exists) y[8 * m] = round_q8(value[m], exponent);
      } else {
        u16* y = a.y + (long long)pair * (64 * TILES) + part * 64 + group;
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (exists) y[16 * m + 8 * r] = to_bf16(sum[m][n][2 * r + i]);
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_skinny(const Arguments a, int grid) {
  extern __shared__ __align__(128) char shared[];  // rings [WARPS][DEPTH][PAIR_BYTES], sums [2][TEAMS][SPLIT - 1][SUMS][32]
  __shared__ __align__(8) u64 barriers[WARPS * DEPTH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 ring = shared_address(shared) + warp * (DEPTH * PAIR_BYTES), full = shared_address(barriers) + warp * (DEPTH * 8);
  float* all_sums = (float*)(shared + WARPS * DEPTH * PAIR_BYTES);
  if (lane == 0) {
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) barrier_init(full + 8 * d, 1);
    barriers_ready();
  }
  __syncwarp();
  if (!a.early) wait_for_earlier_kernels();  // early: the order is complete by now
  Place place;
  place.team = warp / SPLIT, place.slice = warp % SPLIT;
  place.first = place.slice * CHUNKS / SPLIT, place.count = (place.slice + 1) * CHUNKS / SPLIT - place.first;
  place.total = *a.num_ordered / BLOCK * TILES;
  Work work = {tile_of(place, grid, 0)}, next;
  find_weights(a, place, work);
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
    if (work.tile >= 0 && d < place.count) fetch(work.weights + d * CHUNK_STEP, ring + d * PAIR_BYTES, full + 8 * d);
  Operands b[2];
  const bool ahead = AHEAD && a.early;
  if (ahead) {
    find_rows(a, place, work);
    if (work.tile >= 0) load_older_operands(b[0], work.x, 0), load_older_operands(b[1], work.x, 64);
  }
  if (a.early) wait_for_earlier_kernels();
  let_next_kernel_start();
  if (GATED) activate_shared(a, grid);

  if (!ahead) {
    find_rows(a, place, work);
    if (work.tile >= 0)
      load_operands(b[0], work.x, 0, work.used), load_operands(b[1], work.x, 64, work.used);
  }
  u32 parities = 0;
  for (int round = 0; work.tile >= 0; ++round) {
    next.tile = tile_of(place, grid, round + 1);
    find_weights(a, place, next);
    find_rows(a, place, next);
    float sum[4][NT][4] = {};
    multiply_used<1>(sum, b, parities, ring, full, place.count, work, next);
    const int done = work.tile, used = work.used;
    work = next;
#if SPLIT > 1
    float* room = all_sums + ((round & 1) * TEAMS + place.team) * ((SPLIT - 1) * SUMS * 32) + lane;  // in turns
    float(&flat)[SUMS] = *(float(*)[SUMS])sum;
    if (place.slice > 0)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) room[((place.slice - 1) * SUMS + i) * 32] = flat[i];
    meet_team(place.team);
    if (place.slice > 0) continue;
#pragma unroll
    for (int s = 0; s < SPLIT - 1; ++s)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) flat[i] += room[(s * SUMS + i) * 32];
#endif
    finish(a, done, sum, used);
  }
}
