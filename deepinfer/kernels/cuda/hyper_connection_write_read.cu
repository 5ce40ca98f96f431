// Between two sublayers: new streams from the trunk and the last sublayer's output, the next input h read from them, and
// partial sums of the next mixes (fn times the new streams) and of the squares of h and of the streams.
//
// A warp has 32 columns of all 4 streams and 16 rows at a time: see hyper_connection_stream.cuh.
//
// Sums over columns: slices of 32, then 8 slices pairwise (in one warp, between the warps of a block, and the rest in the
// second kernel), then groups of 256 columns. So a row's bits depend neither on the shape of the blocks nor on other rows.
//
// Compile-time constants: HIDDEN (a multiple of 256), KIND and K of the update (see hyper_connection/stages.py), WARPS
// (side by side, a slice each), SERIAL (slices that a warp has one after the other, 1, 2 or 4; WARPS * SERIAL at most 8),
// TILES (sets of warps that share fn, each with its own rows), LOOPS (a set may have more than one tile of 16 rows),
// RESIDENT (blocks per multiprocessor, which bounds the registers), FEATURE, AHEAD (1: streams and mixes are older than the
// kernel before this one, and are loaded before waiting for it; without SERIAL and LOOPS, or the first ones with DEPTH),
// DEPTH (with LOOPS: a warp has streams and updates of so many slices in shared memory, all but one of them on their way; 0:
// in registers, one at a time).

#include "hyper_connection_common.cuh"

#ifndef THREADS
#define THREADS (32 * WARPS * TILES)
#endif
#define SLICES (HIDDEN / (32 * WARPS * SERIAL))
#define STORE_H 1
#define TURNS (LOOPS && WARPS > 1 ? 2 : 1)
#define REGISTERS (65536 / (THREADS * RESIDENT))
#define ROWS_IN_TURN (KIND >= 2 && REGISTERS < 160)  // no room for both rows' loads at once
// Where fn is shared by many warps the split is short, and what matters more is that the trunk's loads do not wait for fn.
#define SPLIT_LATE (!LOOPS && TILES >= 4 && REGISTERS >= 128)

static_assert(HIDDEN % 256 == 0, "groups of 256 columns");
static_assert(12 * SERIAL % TILES == 0, "equal shares of fn");
static_assert(SERIAL <= 4 && WARPS * SERIAL <= 8 && (!SPLIT_LATE || SERIAL == 1), "shape");
static_assert(DEPTH == 0 || (LOOPS && DEPTH > 1), "a ring");
static_assert(!AHEAD || (KIND && (DEPTH || (SERIAL == 1 && !LOOPS && !ROWS_IN_TURN))), "one tile, after a sublayer");

struct Arguments {
  const u16* trunk;         // [rows, 4, HIDDEN]
  const void* update;       // KIND 1: bf16 [rows, HIDDEN]; 2: bf16 [rows, K, HIDDEN]; 3: float32 [K, rows, HIDDEN]
  const u16* shared;        // KIND 2: [rows, HIDDEN]
  const int* experts;       // KIND 2: [rows, K] or null
  const float* write_mix;   // [rows, 4]
  const float* stream_mix;  // [rows, 4, 4]
  const float* read_mix;    // [rows, 4]
  const float* fn;          // [24, 4, HIDDEN]
  u16* new_trunk;           // may be trunk
  u16* h;                   // [rows, HIDDEN]
  float* partial;           // [rows, record_stride]: [SLICES, 32] products, [SLICES] squares of h, [SLICES] of the trunk
  u16* feature;             // [rows, HIDDEN]
  int rows, row_groups, mix_stride, read_stride, record_stride;
};

#include "hyper_connection_stream.cuh"

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ void meet_set(int set) {
  asm volatile("bar.sync %0, %1;" ::"r"(set + 1), "n"(32 * WARPS) : "memory");
}

// ---------------------------------------------------------------- kernel
#if DEPTH
#define ROW_BYTES ((4 + UPDATE_PIECES) * 512)  // of a warp: two rows of 16 bytes for every lane are a slice
// Slices on their way to a warp's ring, tile by tile.
struct Ahead {
  u32 ring;  // this lane's place
  int tile, slice, place;

  __device__ __forceinline__ void fetch(const Arguments& a, int group, int first_column, bool streams, bool update) {
    if (tile * 16 < a.rows)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min(tile * 16 + 8 * i + group, a.rows - 1), column = first_column + 32 * slice;
        const u32 to = ring + (2 * place + i) * ROW_BYTES;
        if (streams) Row::copy_streams(a, row, column, to);
        if (update) Row::copy_update(a, row, column, to);
      }
    if (update) copy_commit();
    if (++place == DEPTH) place = 0;
    if (++slice == SERIAL) slice = 0, tile += a.row_groups * TILES;
  }
  __device__ __forceinline__ void fetch(const Arguments& a, int group, int first_column) {
    fetch(a, group, first_column, true, true);
  }
};
#endif

// Sums of the WARPS of a set, pairwise, from shared memory to the records.
__device__ __forceinline__ void add_warps(const Arguments& a, const float* all, int tile) {
  for (int i = threadIdx.x % (32 * WARPS); i < 16 * 26; i += 32 * WARPS) {
    const int r = i / 26, sum = i % 26, row = tile * 16 + r;
    float parts[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) parts[w] = all[w * TILE_FLOATS + r * ROW_FLOATS + sum];
#pragma unroll
    for (int step = 1; step < WARPS; step *= 2)
#pragma unroll
      for (int w = 0; w < WARPS; w += 2 * step) parts[w] += parts[w + step];
    if (row < a.rows)
      a.partial[(long long)row * a.record_stride +
                (sum < 24 ? (int)blockIdx.x * 32 + sum : (8 + sum) * SLICES + (int)blockIdx.x)] = parts[0];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) hc_write_read(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, set = threadIdx.x / (32 * WARPS);
  const int group = lane / 4, quad = lane % 4;
  const int first_column = (blockIdx.x * WARPS + warp) * (32 * SERIAL) + 8 * quad;
  Words* mine = (Words*)shared + warp * (SERIAL * FN_WORDS) + lane;
  // [TURNS][WARPS][16][ROW_FLOATS] per set: first a warp's mixes, then its sums.
  float* stages = (float*)((Words*)shared + WARPS * SERIAL * FN_WORDS) + set * (TURNS * WARPS * TILE_FLOATS);

  FnShare fn;
  fn.fetch(a, set, group, first_column);  // does not depend on earlier kernels
  int tile = blockIdx.y * TILES + set, turn = 0;
#if DEPTH
  const u32 ring = shared_address((float*)((Words*)shared + WARPS * SERIAL * FN_WORDS) + TILES * TURNS * WARPS * TILE_FLOATS) +
                   (set * WARPS + warp) * (2 * DEPTH * ROW_BYTES) + lane * 16;
  Ahead ahead = {ring, tile, 0, 0};
  TileMixes mixes;
  if (AHEAD) {
    Ahead first = ahead;
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) first.fetch(a, group, first_column, true, false);
    mixes.fetch(a, tile * 16, lane);
  }
#endif
  if (!SPLIT_LATE && !DEPTH) fn.split(mine, set);
#if AHEAD && !DEPTH
  TileMixes mixes;
  mixes.fetch(a, tile * 16, lane);
  Row rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) rows[i].fetch_streams(a, min(tile * 16 + 8 * i + group, a.rows - 1), first_column);
#endif
  wait_for_earlier_kernels();
  let_next_kernel_start();
#if DEPTH
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) ahead.fetch(a, group, first_column, !AHEAD, true);
  if (!AHEAD) mixes.fetch(a, tile * 16, lane);
  fn.split(mine, set);  // with many rows the kernel starts too late to do it before
  int place = 0;
#endif
  if (!SPLIT_LATE) {
    if (TILES > 1) __syncthreads();
    else __syncwarp();
  }
  do {
    float* stage = stages + (turn * WARPS + warp) * TILE_FLOATS;
#if !AHEAD && !DEPTH
    TileMixes mixes;
    mixes.fetch(a, tile * 16, lane);
#endif
    // A row that does not exist may hold anything: it meets no other.
    const int safe[2] = {min(tile * 16 + group, a.rows - 1), min(tile * 16 + 8 + group, a.rows - 1)};
    Sums sums, pair, four;
#pragma unroll 1
    for (int slice = 0; slice < SERIAL; ++slice) {
      const int column = first_column + 32 * slice;
#if DEPTH
      ahead.fetch(a, group, first_column);
      copy_wait<DEPTH - 1>();
      Row rows[2];
#elif AHEAD
      rows[0].update.fetch(a, safe[0], column), rows[1].update.fetch(a, safe[1], column);
#else
      Row rows[2];
      rows[0].fetch(a, safe[0], column);
      if (!ROWS_IN_TURN) rows[1].fetch(a, safe[1], column);
#endif
      __syncwarp();  // as above; and nobody needs the mixes of the tile before
      if (SPLIT_LATE) {
        fn.split(mine, set);
        __syncthreads();
      }
      if (tile * 16 >= a.rows) break;
      if (slice == 0) {
        mixes.store(stage, lane);
        if (DEPTH) mixes.fetch(a, (tile + a.row_groups * TILES) * 16, lane);
      }
#if DEPTH
      rows[0].take(ring + 2 * place * ROW_BYTES), rows[1].take(ring + (2 * place + 1) * ROW_BYTES);
      if (++place == DEPTH) place = 0;
#endif
      rows[0].write_and_read(a, stage + group * ROW_FLOATS, tile * 16 + group, column);
      if (ROWS_IN_TURN && !DEPTH) rows[1].fetch(a, safe[1], column);
      rows[1].write_and_read(a, stage + (8 + group) * ROW_FLOATS, tile * 16 + 8 + group, column);
      products(sums.products, rows, mine + slice * FN_WORDS);
#pragma unroll
      for (int i = 0; i < 2; ++i) sums.of_h[i] = over_quad(rows[i].of_h), sums.of_trunk[i] = over_quad(rows[i].of_trunk);
      if (SERIAL > 1 && slice % 2 == 0) pair = sums;
      if (slice % 2 == 1) sums.add_to(pair);
      if (SERIAL > 2 && slice % 4 == 1) four = sums;
      if (SERIAL > 2 && slice % 4 == 3) sums.add_to(four);
    }
    if (tile * 16 >= a.rows) break;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 8 * i + group, row = tile * 16 + r;
      if (WARPS > 1) {
        float* to = stage + r * ROW_FLOATS;
        sums.store(i, quad, to, to + 24, to + 25);
      } else if (row < a.rows) {
        float* record = a.partial + (long long)row * a.record_stride;
        const int slice = blockIdx.x;
        sums.store(i, quad, record + slice * 32, record + SLICES * 32 + slice, record + SLICES * 33 + slice);
      }
    }
    if (WARPS > 1) {
      meet_set(set);
      add_warps(a, stages + turn * WARPS * TILE_FLOATS, tile);
    }
    tile += a.row_groups * TILES, turn ^= TURNS - 1;
  } while (LOOPS && tile * 16 < a.rows);
}
