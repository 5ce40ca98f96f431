// Index scores of rows one by one, as int16 order keys: score = sum_h g_h * relu(q_h . k), rounded to bf16.
//
// A warp is on its own: it copies tiles of 16 packed keys (68 bytes each) into its ring in shared memory, expands them in
// registers and multiplies them there (mma m16n8k16: 16 keys x 8 heads). The query's fragments stay in registers while
// the row lasts. No barrier after the start.
//
// The tiles of all rows are numbered through and dealt out in equal, contiguous shares, so rows of any length balance.
// A key's score is computed by one warp in a fixed order: it does not depend on the share or on the other rows.
//
// Which channel is which operand index of the product is free as long as keys and queries agree. Lane (g, t) of the
// fragments (g = lane / 4, t = lane % 4) holds channels 32 t to 32 t + 31 of keys g and g + 8: one scale group. Of a word
// with nibbles 0 to 7, pair j = (j, j + 4) becomes two bf16 by masks and shifts, times 2^-126; one product with
// 2^(126 - 64) * scale makes the value times 2^-64, and queries are kept times 2^64: no scale leaves bf16's range.
//
// Compile-time constants: HEADS (a multiple of 8, at most 32), PER_BLOCK (entries per cache block, a multiple of 8),
// NUM_BLOCKS (candidate blocks of a row, or 0: all visible entries), BLOCK_SIZE (entries of a candidate block, a multiple
// of 8).

#include "launch.cuh"
#include "matrices.cuh"
#include "memory.cuh"
#include "numbers.cuh"
#include "types.cuh"

#define WIDTH 128
#define RECORD 68
#define TILE 16
#define TILE_BYTES (TILE * RECORD)
#define STAGES 4
#define WARPS 8
#define THREADS (WARPS * 32)
#define HEAD_TILES (HEADS / 8)

static_assert(HEADS % 8 == 0 && HEADS <= 32 && PER_BLOCK % 8 == 0 && BLOCK_SIZE % 8 == 0, "shape");

struct Arguments {
  const u16* query;    // [rows, HEADS, WIDTH] bf16
  const u16* weights;  // [rows, HEADS] bf16
  const u8* keys;      // [num_entries, RECORD]
  const int* table;    // [sequences, blocks]
  const int* sequence; // [rows]
  const int* visible;  // [rows]
  const int* blocks;   // [rows, NUM_BLOCKS]
  short* out;          // [rows, out_stride]
  int weights_stride, table_stride, out_stride, rows, min_scored;
};

// Nibbles J and J + 4 of a word as bf16 values times 2^-126, then times `scale` (twice the same bf16).
template <int J> __device__ __forceinline__ u32 expand(u32 word, u32 scale) {
  const u32 sign = J < 3 ? word << (12 - 4 * J) : word;
  const u32 size = J < 2 ? word << (6 - 4 * J) : word >> (4 * J - 6);
  return times((sign & 0x80008000u) | (size & 0x01C001C0u), scale);
}

__device__ __forceinline__ float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }

#include "index_order_key.cuh"
#include "index_scored.cuh"

// ends[r] = number of tiles of rows 0 to r. Returns the total. All threads of the CTA.
__device__ __forceinline__ int count_tiles(const Arguments& a, int* ends, int* warp_sums) {
  const int each = (a.rows + THREADS - 1) / THREADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = min((int)threadIdx.x * each, a.rows), last = min(first + each, a.rows);
  int sum = 0;
  for (int row = first; row < last; ++row) {
    const int scored = scored_of(a.visible[row]);
    sum += scored > a.min_scored ? (scored + TILE - 1) / TILE : 0;
    ends[row] = sum;
  }
  int before = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  int total = 0;
  before -= sum;
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  for (int row = first; row < last; ++row) ends[row] += before;
  __syncthreads();
  return total;
}

struct Row {
  const int* table;
  const int* blocks;
  int scored;
};

__device__ __forceinline__ long long slot_of(const Row& row, int index) {
  if (NUM_BLOCKS > 0) index = row.blocks[index / BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE;
  return (long long)row.table[index / PER_BLOCK] * PER_BLOCK + index % PER_BLOCK;
}

// Start copying the keys of a tile: two runs of 8 keys, 34 pieces of 16 bytes each. Keys past the row's end are not read.
__device__ __forceinline__ void copy_tile(const Arguments& a, const Row& row, int tile, u32 to) {
  const int lane = threadIdx.x % 32, index = tile * TILE;
  const u8* first = a.keys + slot_of(row, index) * RECORD;
  const bool has_second = index + 8 < row.scored;
  const u8* second = has_second ? a.keys + slot_of(row, index + 8) * RECORD : first;
  copy_async(to + lane * 16, first + lane * 16, 16);
  const int piece = lane + 32;
  if (piece < 34) copy_async(to + piece * 16, first + piece * 16, 16);
  else if (has_second) copy_async(to + piece * 16, second + (piece - 34) * 16, 16);
  if (has_second && lane < 4) copy_async(to + (lane + 64) * 16, second + (lane + 30) * 16, 16);
}

__device__ __forceinline__ void load_query(const Arguments& a, int row, u32 (&query)[4][2][HEAD_TILES][2], float (&weights)[HEAD_TILES][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 up = 0x5F805F80u;  // 2^64
#pragma unroll
  for (int n = 0; n < HEAD_TILES; ++n) {
    const uint4* from = reinterpret_cast<const uint4*>(a.query + ((long long)row * HEADS + n * 8 + g) * WIDTH + 32 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 q = from[i];  // channels 0 to 7 of the word
      query[i][0][n][0] = times(__byte_perm(q.x, q.z, 0x5410), up);  // 0, 4
      query[i][0][n][1] = times(__byte_perm(q.x, q.z, 0x7632), up);  // 1, 5
      query[i][1][n][0] = times(__byte_perm(q.y, q.w, 0x5410), up);  // 2, 6
      query[i][1][n][1] = times(__byte_perm(q.y, q.w, 0x7632), up);  // 3, 7
    }
    const u16* weight = a.weights + (long long)row * a.weights_stride + n * 8 + 2 * t;
    weights[n][0] = bf16_value(weight[0]);
    weights[n][1] = bf16_value(weight[1]);
  }
}

__device__ __forceinline__ void score_tile(
    const u8* keys, const u32 (&query)[4][2][HEAD_TILES][2], const float (&weights)[HEAD_TILES][2], short* out, int left) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32* low = reinterpret_cast<const u32*>(keys + g * RECORD) + 4 * t;
  const u32* high = low + 8 * RECORD / 4;
  const u32 low_scale = ((u32)keys[g * RECORD + 64 + t] + 62) * 0x00800080u;  // exponent field of 2^(byte - 127 + 62)
  const u32 high_scale = ((u32)keys[(g + 8) * RECORD + 64 + t] + 62) * 0x00800080u;
  float sums[HEAD_TILES][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low_word = low[i], high_word = high[i];
    const u32 even[4] = {expand<0>(low_word, low_scale), expand<0>(high_word, high_scale),
                         expand<1>(low_word, low_scale), expand<1>(high_word, high_scale)};
    const u32 odd[4] = {expand<2>(low_word, low_scale), expand<2>(high_word, high_scale),
                        expand<3>(low_word, low_scale), expand<3>(high_word, high_scale)};
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n) multiply(sums[n], even, query[i][0][n][0], query[i][0][n][1]);
#pragma unroll
    for (int n = 0; n < HEAD_TILES; ++n) multiply(sums[n], odd, query[i][1][n][0], query[i][1][n][1]);
  }
  float first = 0, second = 0;  // keys g and g + 8
#pragma unroll
  for (int n = 0; n < HEAD_TILES; ++n) {
    first = fmaf(fmaxf(sums[n][0], 0), weights[n][0], first);
    first = fmaf(fmaxf(sums[n][1], 0), weights[n][1], first);
    second = fmaf(fmaxf(sums[n][2], 0), weights[n][0], second);
    second = fmaf(fmaxf(sums[n][3], 0), weights[n][1], second);
  }
  first += __shfl_xor_sync(~0u, first, 1);
  second += __shfl_xor_sync(~0u, second, 1);
  first += __shfl_xor_sync(~0u, first, 2);
  second += __shfl_xor_sync(~0u, second, 2);
  const int key = g + 8 * t;
  if (t < 2 && key < left) out[key] = order_key(t == 0 ? first : second);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) score_rows(const Arguments a) {
  extern __shared__ __align__(128) u8 shared[];  // rings of all warps, then ends[rows]
  __shared__ int warp_sums[WARPS];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int* ends = reinterpret_cast<int*>(shared + WARPS * STAGES * TILE_BYTES);
  const int warp = threadIdx.x / 32;
  const int total = count_tiles(a, ends, warp_sums);
  const int num_warps = gridDim.x * WARPS, share = (total + num_warps - 1) / num_warps;
  // Neighbours share a CTA and with it a query in L1; single tiles are spread over all CTAs.
  const int number = share > 1 ? blockIdx.x * WARPS + warp : warp * gridDim.x + blockIdx.x;
  int position = min(number * share, total);
  const int stop = min(position + share, total);
  u8* ring = shared + warp * STAGES * TILE_BYTES;
  const u32 ring_address = shared_address(ring);

  while (position < stop) {
    int row = 0, behind = a.rows - 1;  // first row whose end is past the position
    while (row < behind) {
      const int middle = (row + behind) / 2;
      if (ends[middle] > position) behind = middle;
      else row = middle + 1;
    }
    const int row_begin = row > 0 ? ends[row - 1] : 0;
    const int begin = position - row_begin, end = min(stop, ends[row]) - row_begin;
    const Row view = {a.table + (long long)a.sequence[row] * a.table_stride, a.blocks + (long long)row * NUM_BLOCKS,
                      scored_of(a.visible[row])};
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (begin + i < end) copy_tile(a, view, begin + i, ring_address + i * TILE_BYTES);
      copy_commit();
    }
    u32 query[4][2][HEAD_TILES][2];
    float weights[HEAD_TILES][2];
    load_query(a, row, query, weights);
    short* out = a.out + (long long)row * a.out_stride;
    int stage = 0;
    for (int tile = begin; tile < end; ++tile) {
      copy_wait<STAGES - 2>();
      __syncwarp();
      const int next = tile + STAGES - 1, next_stage = stage == 0 ? STAGES - 1 : stage - 1;
      if (next < end) copy_tile(a, view, next, ring_address + next_stage * TILE_BYTES);
      copy_commit();
      score_tile(ring + stage * TILE_BYTES, query, weights, out + tile * TILE, view.scored - tile * TILE);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    __syncwarp();
    position = row_begin + end;
  }
}
