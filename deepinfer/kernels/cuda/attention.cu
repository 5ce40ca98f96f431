// Sparse attention of one row over its window and its selected entries, from the raw query to the rounded output.
//
// Keys are values, so a block of 64 keys is read, expanded to bf16 in shared memory once and used by both products.
// A CTA owns all heads of one row (M = 64) and has three warpgroups:
//   producer   reads records ahead into a staging place, expands them into one of two key buffers; reads and rotates
//              the query;
//   consumer 0 logits = query . keys, softmax, sum over channels [0, 256);
//   consumer 1 sum over channels [256, 512), with the weights that consumer 0 leaves in shared memory.
// SPLITS = 1: persistent, CTA c takes rows c, c + grid, ...; the producer runs ahead into the next row.
// SPLITS > 1: a cluster of SPLITS CTAs shares the key blocks of one row; sums meet through distributed shared memory,
// each CTA finishes 512 / SPLITS channels. Sums are added in the order of the splits.
//
// Loops are rolled where they can be: a CTA has one or two warps per scheduler that run the same code, so long straight
// code waits for its own instructions.
//
// Keys are kept times 2^-16, so that no scale leaves bf16's range (e2m1 and e4m3 bits become bf16 by a shift and one
// product with 2^126 * scale and 2^120 * scale); the logits' scale and the output put it back. All of it is exact.
//
// The running maximum of a head starts at its sink, so it is finite, and moves only when a logit passes it by 8 (in
// log 2): weights stay below 256 and the sums are seldom rescaled.
//
// Compile-time constants: H (heads, at most 64), ROPE (channels that turn, a multiple of 8), FP4 (entries are
// Fp4Record, else Fp8Record), SPLITS (1, 2, 4, 8), SPLIT_WEIGHTS (weights in two bf16 parts), GROUP_HEADS (0, or with
// SPLITS = 1 the heads whose output shares a power of two and leaves as e4m3 codes: 4, 8 or 16).

#include "types.cuh"

#define D 512
#define BLOCK 64                       // keys
#define M_ROWS 64                      // heads, padded
#define FP8_RECORD (D + D / 32)
#define FP4_RECORD (D / 2 + D / 16)
#define ENTRY_RECORD (FP4 ? FP4_RECORD : FP8_RECORD)
#define KEY_SHIFT 16
#define SLACK 8.0f

#define COLUMN_BYTES (64 * 128)        // 64 rows of 64 channels: one swizzled column block
#define TILE_BYTES (8 * COLUMN_BYTES)  // 64 rows of 512 channels
#define AT_QUERY 0
#define AT_KEYS TILE_BYTES
#define AT_WEIGHTS (3 * TILE_BYTES)
#define WEIGHT_PARTS (1 + SPLIT_WEIGHTS)
#define AT_RAW (AT_WEIGHTS + WEIGHT_PARTS * COLUMN_BYTES)  // [4 warps][8 pieces][32 lanes][16 bytes]
#define RAW_BYTES (4 * 8 * 512)
#define AT_SMALL (AT_RAW + RAW_BYTES)

static_assert(H <= M_ROWS && ROPE % 8 == 0 && ROPE <= D / 2, "shape");

struct Small {
  u64 key_full[2], key_free[2], query_full, query_free, weight_full, weight_free;
  u32 seen[2][4];                      // per key buffer and producer warp: two bits per key
  float shrink[M_ROWS];                // factor of the sums before this block's weights are added
  float finish[2][M_ROWS];             // 2^16 / total, by parity of the row
  float largest[2][M_ROWS / 4];        // of the output, by consumer and group of heads
};

struct Arguments {
  const u16* query;
  const u8* step_records;
  const u8* ring;
  const int* window_index;
  const u8* entries;
  const int* entry_slots;
  const float* sink;
  const float* cosines;
  const float* sines;
  u16* out;
  int rows, query_stride, width, num_selected;
  int quantize;                        // round the output by Q8
  float* scales;                       // with GROUP_HEADS: of the codes, see attention_codes.cuh
};

// ---------------------------------------------------------------- instructions
#include "attention_instructions.cuh"

// ---------------------------------------------------------------- matrix operands

// Matrix operand in shared memory, 128-byte swizzle. Rows of 128 bytes in groups of 8 (1024 bytes apart); for the
// transposed operand also column blocks `COLUMN_BYTES` apart. In a cluster an address also carries the number of the
// CTA above its low 24 bits: the field of the descriptor next to the address must not get it.
__device__ __forceinline__ u64 operand(u32 address, u32 offset) {
  const u32 low = ((address >> 4 & 0x3FFF) | (COLUMN_BYTES >> 4) << 16) + (offset >> 4);
  return (u64)low | (u64)(1024 >> 4 | 1u << 30) << 32;
}

// ---------------------------------------------------------------- number formats

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Bytes `low` and `high` of `word`, e4m3, as two bf16 times 2^-120.
__device__ __forceinline__ u32 widen_e4m3(u32 word, u32 low, u32 high) {
  const u32 x = permute(word, word, high << 12 | high << 8 | low << 4 | low);
  return (x & 0x80008000u) | ((x >> 4) & 0x07F007F0u);
}
// Nibbles 2k and 2k + 1 of a word, e2m1, as two bf16 times 2^-126. `lifted` is the word shifted left by 4.
__device__ __forceinline__ u32 widen_e2m1(u32 word, u32 lifted, u32 k) {
  const u32 x = permute(lifted, word, (4 + k) << 12 | (4 + k) << 8 | k << 4 | k);
  return (x & 0x80008000u) | ((x >> 6) & 0x01C001C0u);
}

// Two values of a Q8 group as bf16: rounded to e4m3 after division by 2^exponent.
__device__ __forceinline__ u32 round_q8(float low, float high, float inverse, float scale) {
  const float2 v = round_e4m3(low * inverse, high * inverse);
  return to_bf16_pair(v.x * scale, v.y * scale);
}

// ---------------------------------------------------------------- producer

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Column block and chunk (8 channels) of row `row` in a swizzled tile.
__device__ __forceinline__ u32 chunk_address(u32 tile, u32 row, u32 column_block, u32 chunk) {
  return tile + column_block * COLUMN_BYTES + row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Two lanes share a key; the swizzled places of a lane's four chunks in its row.
struct Places {
  u32 chunk[4];
};

// 32 channels of an Fp4 record, as four chunks. The two low bytes of `scales` belong to 16 channels each.
__device__ __forceinline__ void expand_fp4(const uint4& piece, u32 scales, u32 column, const Places& places) {
  scales = (permute(scales, scales, 0x1100) >> 4) & 0x07F007F0u;
  scales = times(times(scales, 0x79007900u), 0x79007900u);  // twice 2^115: scale * 2^(126 - KEY_SHIFT)
  const u32 scale[2] = {permute(scales, scales, 0x1010), permute(scales, scales, 0x3232)};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const u32 word = word_of(piece, c), lifted = word << 4, s = scale[c / 2];
    store_shared(column + places.chunk[c], times(widen_e2m1(word, lifted, 0), s), times(widen_e2m1(word, lifted, 1), s),
                 times(widen_e2m1(word, lifted, 2), s), times(widen_e2m1(word, lifted, 3), s));
  }
}
// 16 channels of an Fp8 record, as two chunks; `scale` is two bf16.
__device__ __forceinline__ void expand_fp8(const uint4& piece, u32 scale, u32 column, u32 first, u32 second) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const u32 a = word_of(piece, 2 * c), b = word_of(piece, 2 * c + 1);
    store_shared(column + (c ? second : first), times(widen_e4m3(a, 0, 1), scale), times(widen_e4m3(a, 2, 3), scale),
                 times(widen_e4m3(b, 0, 1), scale), times(widen_e4m3(b, 2, 3), scale));
  }
}

// The query of one row into shared memory; not yet rotated and not yet complete.
__device__ __forceinline__ void copy_query(const Arguments& a, u32 tile, int row, int thread) {
  const u16* source = a.query + (long long)row * a.query_stride;
#pragma unroll 8
  for (int i = 0; i < M_ROWS * 64 / 128; ++i) {
    const u32 at = i * 128 + thread, head = at / 64, chunk = at % 64;
    const u16* from = source + (head < H ? head : 0) * D + chunk * 8;
    copy_async(chunk_address(tile, head, chunk / 8, chunk % 8), from, head < H ? 16 : 0);
  }
  copy_commit();
}
__device__ __forceinline__ u32 turn(u32 pair, float cosine, float sine) {
  const float x = low_bf16(pair), y = high_bf16(pair);
  return to_bf16_pair(fmaf(x, cosine, -(y * sine)), fmaf(x, sine, y * cosine));
}
// Called by the 128 threads that called copy_query.
__device__ __forceinline__ void complete_query(const Arguments& a, u32 tile, int row, int thread) {
  copy_wait<0>();
  named_barrier(2, 128);
  const float* cosines = a.cosines + (long long)row * (ROPE / 2);
  const float* sines = a.sines + (long long)row * (ROPE / 2);
  for (int i = thread; i < M_ROWS * (ROPE / 8); i += 128) {
    const u32 head = i % M_ROWS, piece = i / M_ROWS, chunk = (D - ROPE) / 8 + piece;
    const u32 address = chunk_address(tile, head, chunk / 8, chunk % 8);
    const uint4 x = load_shared(address);
    const float4 c = *(const float4*)(cosines + 4 * piece), s = *(const float4*)(sines + 4 * piece);
    store_shared(address, turn(x.x, c.x, s.x), turn(x.y, c.y, s.y), turn(x.z, c.z, s.z), turn(x.w, c.w, s.w));
  }
  fence_for_tensor_cores();
}

struct Range {
  int begin, end, window;  // key blocks of this CTA; blocks before `window` hold window keys
};
__device__ __forceinline__ Range block_range(const Arguments& a, int split) {
  const int window = (a.width + BLOCK - 1) / BLOCK, all = window + (a.num_selected + BLOCK - 1) / BLOCK;
  return {all * split / SPLITS, all * (split + 1) / SPLITS, window};
}

// Index of key `key` in a block of a row; -1 for none. Rows and blocks past the end have none.
__device__ __forceinline__ int key_index(const Arguments& a, int row, int block, const Range& range, int key) {
  if (row >= a.rows || block >= range.end) return -1;
  const bool window = block < range.window;
  const int number = (window ? block : block - range.window) * BLOCK + key, count = window ? a.width : a.num_selected;
  if (number >= count) return -1;
  return (window ? a.window_index : a.entry_slots)[(long long)row * count + number];
}
__device__ __forceinline__ const u8* record_of(const Arguments& a, bool window, int index) {
  if (window) {
    if (index == -1) return nullptr;
    return index >= 0 ? a.step_records + (long long)index * FP8_RECORD : a.ring + (long long)(-2 - index) * FP8_RECORD;
  }
  return index >= 0 ? a.entries + (long long)index * ENTRY_RECORD : nullptr;
}

// What the producer reads and expands at a time: a block of Fp4 records or one half (256 channels) of a block of Fp8
// records. Each lane reads, of its key, eight pieces of 16 bytes and the scales.
struct Unit {
  const u8* record;                    // null: no such key
  bool fp4;
  int half;
};

// A lane's scales, 16 bits for each piece (fp4) or pair of pieces (fp8), in the order of use. Words go in pairs of
// 16-byte loads that are issued a unit ahead.
struct Scales {
  uint4 low, high;
};
__device__ __forceinline__ Scales load_scales(const Unit& unit) {
  Scales scales;
  scales.low = scales.high = make_uint4(0, 0, 0, 0);
  if (unit.record) {
    scales.low = load_record(unit.record + (unit.fp4 ? D / 2 : D));
    if (unit.fp4) scales.high = load_record(unit.record + D / 2 + 16);
  }
  return scales;
}
// Word p: the scales of pieces 2 p and 2 p + 1.
__device__ __forceinline__ uint4 order_scales(const Scales& scales, const Unit& unit, int side) {
  if (unit.fp4) {
    const u32 pick = side ? 0x7632 : 0x5410;
    return {permute(scales.low.x, scales.low.y, pick), permute(scales.low.z, scales.low.w, pick),
            permute(scales.high.x, scales.high.y, pick), permute(scales.high.z, scales.high.w, pick)};
  }
  const u32 a = unit.half ? scales.low.z : scales.low.x, b = unit.half ? scales.low.w : scales.low.y;
  return {a >> (8 * side), a >> (8 * side + 16), b >> (8 * side), b >> (8 * side + 16)};
}

// The way of a lane's pieces from a record to the staging place.
struct Copy {
  const u8* from;                      // piece 0; pairs of pieces are 64 bytes apart
  int odd;                             // bytes from the first to the second of a pair
  int bytes;                           // 16, or 0 for zeros
};
__device__ __forceinline__ Copy copy_of(const Arguments& a, const Unit& unit, int side) {
  if (!unit.record) return {(const u8*)a.query, 0, 0};
  return {unit.record + (unit.fp4 ? 16 * side : 256 * unit.half + 32 * side), unit.fp4 ? 32 : 16, 16};
}
__device__ __forceinline__ void copy_pair(u32 to, const Copy& copy, int pair) {
  const u8* from = copy.from + (copy.bytes ? 64 * pair : 0);
  copy_async(to + pair * 1024, from, copy.bytes);
  copy_async(to + pair * 1024 + 512, from + copy.odd, copy.bytes);
  copy_commit();
}

__device__ __forceinline__ void produce(const Arguments& a, Small& small, u32 shared, int split, int first, int stride) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int key = warp * 16 + lane / 2, side = lane % 2;
  const Range range = block_range(a, split);
  if (range.begin == range.end) return;
  const u32 raw = shared + AT_RAW + warp * 4096 + lane * 16;
  Places places;
#pragma unroll
  for (int c = 0; c < 4; ++c) places.chunk[c] = chunk_address(0, key, 0, 4 * side + c);

  // The block to read next, and its index; the index of the block after it is on its way.
  int next_row = first, next_block = range.begin, index = key_index(a, first, range.begin, range, key);
  auto next_unit = [&](const Unit& last) -> Unit {
    if (!last.fp4 && last.half == 0) return {last.record, false, 1};
    const bool window = next_block < range.window;
    const Unit unit = {record_of(a, window, index), FP4 && !window, 0};
    if (++next_block == range.end) next_block = range.begin, next_row += stride;
    index = key_index(a, next_row, next_block, range, key);
    return unit;
  };

  copy_query(a, shared + AT_QUERY, first, thread);
  Unit unit = next_unit({nullptr, true, 0});
  Copy copy = copy_of(a, unit, side);
#pragma unroll 1
  for (int pair = 0; pair < 4; ++pair) copy_pair(raw, copy, pair);
  Scales raw_scales = load_scales(unit);
  int step = 0, item = 0;
  for (int row = first; row < a.rows; row += stride, ++item) {
    for (int block = range.begin; block < range.end; ++block, ++step) {
      const int buffer = step & 1;
      const u32 tile = shared + AT_KEYS + buffer * TILE_BYTES;
      barrier_wait_forever(&small.key_free[buffer], ((step >> 1) & 1) ^ 1);
      const u32 seen = __ballot_sync(~0u, unit.record != nullptr);
      if (lane == 0) small.seen[buffer][warp] = seen;
      for (bool more = true; more;) {
        more = !unit.fp4 && unit.half == 0;
        uint4 scales = order_scales(raw_scales, unit, side);
        const Unit next = next_unit(unit);
        raw_scales = load_scales(next);
        copy = copy_of(a, next, side);
        u32 column = tile + unit.half * 4 * COLUMN_BYTES;
#pragma unroll 1
        for (int pair = 0; pair < 4; ++pair) {
          copy_wait<3>();
          const uint4 even = load_shared(raw + pair * 1024), odd = load_shared(raw + pair * 1024 + 512);
          if (unit.fp4) {
            expand_fp4(even, scales.x, column, places);
            expand_fp4(odd, scales.x >> 16, column + COLUMN_BYTES, places);
            column += 2 * COLUMN_BYTES;
          } else {
            const u32 scale = min((scales.x & 0xFF) + 120 - KEY_SHIFT, 254u) * 0x00800080u;
            expand_fp8(even, scale, column, places.chunk[0], places.chunk[1]);
            expand_fp8(odd, scale, column, places.chunk[2], places.chunk[3]);
            column += COLUMN_BYTES;
          }
          scales = {scales.y, scales.z, scales.w, 0};
          copy_pair(raw, copy, pair);
        }
        unit = next;
      }
      fence_for_tensor_cores();
      warp_arrive(&small.key_full[buffer]);
      if (block == range.begin) {
        if (item > 0) {
          barrier_wait_forever(&small.query_free, (item & 1) ^ 1);
          copy_query(a, shared + AT_QUERY, row, thread);
        }
        complete_query(a, shared + AT_QUERY, row, thread);
        warp_arrive(&small.query_full);
      }
    }
  }
  copy_wait<0>();
}

// ---------------------------------------------------------------- output

// Two adjacent channels of heads `head` and `head` + 8 as bf16 into the tile that finish_heads reads.
__device__ __forceinline__ void stage(u8* tile, int head, int quad, int chunk, u32 upper, u32 lower) {
  u8* to = tile + (chunk / 8) * COLUMN_BYTES + head * 128 + (((chunk % 8) ^ (head & 7)) << 4) + 4 * quad;
  *(u32*)to = upper;
  *(u32*)(to + 1024) = lower;
}

// SPLITS = 1. `factors`: 2^16 / total of heads `head` and `head` + 8.
__device__ __forceinline__ void stage_sums(const float (&sums)[128], const float (&factors)[2], u8* tile, int head, int quad, int first_chunk) {
#pragma unroll
  for (int t = 0; t < 32; ++t)
    stage(tile, head, quad, first_chunk + t, to_bf16_pair(sums[4 * t] * factors[0], sums[4 * t + 1] * factors[0]),
          to_bf16_pair(sums[4 * t + 2] * factors[1], sums[4 * t + 3] * factors[1]));
}

// Eight channels rounded by Q8; the four lanes that hold a group call it together.
__device__ __forceinline__ uint4 quantize(const uint4& x) {
  float largest = 1e-4f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    largest = fmaxf(largest, fmaxf(fabsf(low_bf16(word_of(x, i))), fabsf(high_bf16(word_of(x, i)))));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  // log2(largest / 448) rounded up, plus 127: 448 is 1.75 * 2^8, and no bf16 value lies so close above it that the
  // quotient would round to a power of two
  const u32 exponent = ((__float_as_uint(largest) + 0x1FFFFFu) >> 23) - 8;
  const float scale = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
  return {round_q8(low_bf16(x.x), high_bf16(x.x), inverse, scale), round_q8(low_bf16(x.y), high_bf16(x.y), inverse, scale),
          round_q8(low_bf16(x.z), high_bf16(x.z), inverse, scale), round_q8(low_bf16(x.w), high_bf16(x.w), inverse, scale)};
}

// A warp rotates back, rounds and writes staged heads, over `columns` blocks of 64 channels.
__device__ __forceinline__ void finish_heads(const Arguments& a, u32 tile, int row, int first_head, int heads, int first_column, int columns) {
  const int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
  for (int column = first_column; column < first_column + columns; ++column) {
    const int channel = 64 * column + 8 * chunk, turning = channel - (D - ROPE);
    float4 c = {1, 1, 1, 1}, s = {0, 0, 0, 0};
    if (turning >= 0) {
      const long long at = (long long)row * (ROPE / 2) + turning / 2;
      c = *(const float4*)(a.cosines + at), s = *(const float4*)(a.sines + at);
    }
#pragma unroll 2
    for (int i = 0; i < heads; i += 4) {
      const int head = first_head + i + lane / 8;
      uint4 x = load_shared(chunk_address(tile, head, column, chunk));
      if (turning >= 0) x = {turn(x.x, c.x, -s.x), turn(x.y, c.y, -s.y), turn(x.z, c.z, -s.z), turn(x.w, c.w, -s.w)};
      if (a.quantize) x = quantize(x);
      if (head < H) store_global(a.out + ((long long)row * H + head) * D + channel, x);
    }
  }
}

#if GROUP_HEADS
#include "attention_codes.cuh"
#endif

// SPLITS = 1, when both consumers are done with the row's last block: its key buffer holds the result in between.
__device__ __forceinline__ void finish_row(const Arguments& a, Small& small, u8* shared_pointer, const float (&sums)[128],
                                           const float (&factors)[2], int row, int consumer, int last_step) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  u8* tile = shared_pointer + AT_KEYS + (last_step & 1) * TILE_BYTES;
  stage_sums(sums, factors, tile, warp * 16 + lane / 4, lane % 4, 32 * consumer);
  __syncwarp();
#if GROUP_HEADS
  finish_codes(a, small, shared_address(tile), row, warp, consumer);
#else
  finish_heads(a, shared_address(tile), row, warp * 16, 16, 4 * consumer, 4);
#endif
  if (last_step >= 0) warp_arrive(&small.key_free[last_step & 1]);
}

#if SPLITS > 1
#define TILES (64 / SPLITS)            // 8-channel tiles that a CTA of the cluster finishes
// Send sums to the CTAs that finish them. Their key buffers hold [SPLITS][TILES][128 threads] of four floats.
__device__ __forceinline__ void send_sums(float (&sums)[128], u32 shared, int split, int consumer, int thread) {
#pragma unroll
  for (int t = 0; t < 32; ++t) {
    const int tile = 32 * consumer + t;
    const u32 local = shared + AT_KEYS + ((split * TILES + tile % TILES) * 128 + thread) * 16;
    store_remote(remote_address(local, tile / TILES), sums[4 * t], sums[4 * t + 1], sums[4 * t + 2], sums[4 * t + 3]);
  }
}
// Largest and total of the CTA's heads to all CTAs: [SPLITS][64] pairs in the place of the weights.
__device__ __forceinline__ void send_stats(u32 shared, int split, int head, float largest, float total) {
#pragma unroll
  for (int rank = 0; rank < SPLITS; ++rank)
    store_remote(remote_address(shared + AT_WEIGHTS + (split * M_ROWS + head) * 8, rank), largest, total);
}
// Add the splits' sums of this CTA's channels and write them; the query's place holds the result in between.
__device__ __forceinline__ void combine(const Arguments& a, u8* shared_pointer, int split, int consumer, int thread, int row, int head) {
  const float2* stats = (const float2*)(shared_pointer + AT_WEIGHTS);
  float factors[SPLITS][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = stats[head + 8 * r].x, total = 0;
#pragma unroll
    for (int s = 1; s < SPLITS; ++s) largest = fmaxf(largest, stats[s * M_ROWS + head + 8 * r].x);
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const float2 stat = stats[s * M_ROWS + head + 8 * r];
      factors[s][r] = exp2_fast(stat.x - largest);
      total += factors[s][r] * stat.y;
    }
    const float finish = __fdiv_rn((float)(1 << KEY_SHIFT), total);
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) factors[s][r] *= finish;
  }
#pragma unroll 2
  for (int tile = consumer * (TILES / 2); tile < (consumer + 1) * (TILES / 2); ++tile) {
    float v[4] = {};
#pragma unroll
    for (int s = 0; s < SPLITS; ++s) {
      const float4 x = *(const float4*)(shared_pointer + AT_KEYS + ((s * TILES + tile) * 128 + thread) * 16);
      v[0] += x.x * factors[s][0];
      v[1] += x.y * factors[s][0];
      v[2] += x.z * factors[s][1];
      v[3] += x.w * factors[s][1];
    }
    stage(shared_pointer + AT_QUERY, head, thread % 4, split * TILES + tile, to_bf16_pair(v[0], v[1]), to_bf16_pair(v[2], v[3]));
  }
  named_barrier(1, 256);
  const int warp = consumer * 4 + thread / 32;
  finish_heads(a, shared_address(shared_pointer + AT_QUERY), row, warp * 8, 8, split * (8 / SPLITS), 8 / SPLITS);
}
#endif

// ---------------------------------------------------------------- consumers

__device__ __forceinline__ void rescale(float (&sums)[128], float first, float second) {
  if (__any_sync(~0u, first != 1.0f || second != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 128; i += 4) sums[i] *= first, sums[i + 1] *= first, sums[i + 2] *= second, sums[i + 3] *= second;
  }
}

__device__ __forceinline__ void hide_unseen(float (&logits)[32], const uint4& seen, int quad) {
  if ((seen.x & seen.y & seen.z & seen.w) == ~0u) return;
#pragma unroll
  for (int i = 0; i < 32; ++i) {  // key 8 (i / 4) + 2 quad + i % 2
    const u32 bits = word_of(seen, i / 8) >> (16 * ((i / 4) % 2) + 4 * quad);
    if (!(bits >> (2 * (i % 2)) & 1)) logits[i] = __int_as_float(0xFF800000);
  }
}

// Logits of two heads -> weights as bf16 pairs (tile t of 8 keys, head r at 2 t + r: the order of the matrix operand).
// `total` counts this thread's columns only; `shrink` is what earlier sums must be multiplied by.
__device__ __forceinline__ void softmax(const float (&logits)[32], float (&largest)[2], float (&total)[2], float (&shrink)[2],
                                        u32 (&weights)[WEIGHT_PARTS][16], float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = logits[2 * r];
#pragma unroll
    for (int t = 0; t < 8; ++t) top = fmaxf(top, fmaxf(logits[4 * t + 2 * r], logits[4 * t + 2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
    shrink[r] = 1.0f;
    if (top > largest[r] + SLACK) {
      shrink[r] = exp2_fast(largest[r] - top);
      largest[r] = top;
    }
    total[r] *= shrink[r];
  }
#pragma unroll
  for (int t = 0; t < 8; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float x = exp2_fast(fmaf(logits[4 * t + 2 * r], scale, -largest[r]));
      const float y = exp2_fast(fmaf(logits[4 * t + 2 * r + 1], scale, -largest[r]));
      const u32 pair = to_bf16_pair(x, y);
      weights[0][2 * t + r] = pair;
      if (SPLIT_WEIGHTS) {
        weights[WEIGHT_PARTS - 1][2 * t + r] = to_bf16_pair(x - low_bf16(pair), y - high_bf16(pair));
        total[r] += x + y;
      } else {
        total[r] += low_bf16(pair) + high_bf16(pair);  // what the values are multiplied by
      }
    }
}

// Hand weights and factors to the other consumer.
__device__ __forceinline__ void share_weights(Small& small, u8* shared_pointer, const u32 (&weights)[WEIGHT_PARTS][16],
                                              const float (&shrink)[2], int head, int quad) {
#pragma unroll
  for (int part = 0; part < WEIGHT_PARTS; ++part)
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *(u32*)(shared_pointer + AT_WEIGHTS + part * COLUMN_BYTES + (head + 8 * r) * 128 + ((t ^ (head & 7)) << 4) + 4 * quad) =
            weights[part][2 * t + r];
  if (quad == 0) small.shrink[head] = shrink[0], small.shrink[head + 8] = shrink[1];
  fence_for_tensor_cores();
  warp_arrive(&small.weight_full);
}

__device__ __forceinline__ void consume_left(const Arguments& a, Small& small, u8* shared_pointer, u32 shared, int split, int first, int stride) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, quad = lane % 4;
  const int head = warp * 16 + lane / 4;
  const Range range = block_range(a, split);
  const float log2e = 1.4426950408889634f, scale = 0.044194173824159216f * log2e * (1 << KEY_SHIFT);  // 512^-0.5
  const float sinks[2] = {head < H ? a.sink[head] * log2e : 0.0f, head + 8 < H ? a.sink[head + 8] * log2e : 0.0f};
  float sums[128];
  int step = 0, item = 0;
  for (int row = first; row < a.rows; row += stride, ++item) {
    float largest[2] = {sinks[0], sinks[1]};
    float total[2];  // this thread's columns only
    total[0] = total[1] = split == 0 && quad == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = 0;
    if (range.begin < range.end) barrier_wait_forever(&small.query_full, item & 1);
    for (int block = range.begin; block < range.end; ++block, ++step) {
      const u32 keys = shared + AT_KEYS + (step & 1) * TILE_BYTES;
      barrier_wait_forever(&small.key_full[step & 1], (step >> 1) & 1);
      float logits[32];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        const u32 at = (k / 4) * COLUMN_BYTES + (k % 4) * 32;
        mma_logits(logits, operand(shared + AT_QUERY, at), operand(keys, at), k != 0);
      }
      wgmma_commit();
      mma_wait(logits);
      if (block == range.end - 1) warp_arrive(&small.query_free);
      hide_unseen(logits, *(const uint4*)small.seen[step & 1], quad);
      float shrink[2];
      u32 weights[WEIGHT_PARTS][16];
      softmax(logits, largest, total, shrink, weights, scale);
      barrier_wait_forever(&small.weight_free, (step & 1) ^ 1);
      share_weights(small, shared_pointer, weights, shrink, head, quad);
      rescale(sums, shrink[0], shrink[1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int part = 0; part < WEIGHT_PARTS; ++part) {
          const u32* w = weights[part] + 4 * k;
          const u32 four[4] = {w[0], w[1], w[2], w[3]};
          mma_sum(sums, four, operand(keys, k * 2048));
        }
      wgmma_commit();
      mma_wait(sums);
      if (block + 1 < range.end) warp_arrive(&small.key_free[step & 1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
    }
#if SPLITS == 1
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors[r] = __fdiv_rn((float)(1 << KEY_SHIFT), total[r]);
      if (quad == 0) small.finish[item & 1][head + 8 * r] = factors[r];
    }
    named_barrier(1, 256);
    finish_row(a, small, shared_pointer, sums, factors, row, 0, step - 1);
#else
    meet_cluster();  // all key buffers of the cluster are done with
    send_sums(sums, shared, split, 0, thread);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (quad == 0) send_stats(shared, split, head + 8 * r, largest[r], total[r]);
    meet_cluster();
    combine(a, shared_pointer, split, 0, thread, row, head);
#endif
  }
}

__device__ __forceinline__ void consume_right(const Arguments& a, Small& small, u8* shared_pointer, u32 shared, int split, int first, int stride) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int head = warp * 16 + lane / 4;
  const Range range = block_range(a, split);
  float sums[128];
  int step = 0, item = 0;
  for (int row = first; row < a.rows; row += stride, ++item) {
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = 0;
    for (int block = range.begin; block < range.end; ++block, ++step) {
      const u32 values = shared + AT_KEYS + (step & 1) * TILE_BYTES + 4 * COLUMN_BYTES;
      barrier_wait_forever(&small.weight_full, step & 1);
      barrier_wait_forever(&small.key_full[step & 1], (step >> 1) & 1);
      rescale(sums, small.shrink[head], small.shrink[head + 8]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int part = 0; part < WEIGHT_PARTS; ++part)
          mma_sum(sums, operand(shared + AT_WEIGHTS, part * COLUMN_BYTES + 32 * k), operand(values, k * 2048));
      wgmma_commit();
      mma_wait(sums);
      warp_arrive(&small.weight_free);
      if (block + 1 < range.end) warp_arrive(&small.key_free[step & 1]);
    }
#if SPLITS == 1
    named_barrier(1, 256);
    const float factors[2] = {small.finish[item & 1][head], small.finish[item & 1][head + 8]};
    finish_row(a, small, shared_pointer, sums, factors, row, 1, step - 1);
#else
    meet_cluster();
    send_sums(sums, shared, split, 1, thread);
    meet_cluster();
    combine(a, shared_pointer, split, 1, thread, row, head);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) sparse_attention(
    const u16* query, const u8* step_records, const u8* ring, const int* window_index, const u8* entries,
    const int* entry_slots, const float* sink, const float* cosines, const float* sines, u16* out,
    int rows, int query_stride, int width, int num_selected, int quantize
#if GROUP_HEADS
    , float* scales
#endif
    ) {
#if !GROUP_HEADS
  float* const scales = nullptr;
#endif
  extern __shared__ __align__(1024) u8 shared_pointer[];
  const u32 shared = shared_address(shared_pointer);
  Small& small = *(Small*)(shared_pointer + AT_SMALL);
  const Arguments a = {query, step_records, ring, window_index, entries, entry_slots, sink, cosines, sines, out,
                       rows, query_stride, width, num_selected, quantize, scales};
  const int split = SPLITS == 1 ? 0 : blockIdx.x % SPLITS;
  const int first = blockIdx.x / SPLITS, stride = gridDim.x / SPLITS;  // SPLITS > 1: one row per cluster
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&small.key_full[i], 4);
      barrier_init(&small.key_free[i], 8);
    }
    barrier_init(&small.query_full, 4);
    barrier_init(&small.query_free, 4);
    barrier_init(&small.weight_full, 4);
    barrier_init(&small.weight_free, 4);
    barrier_init_done();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int role = threadIdx.x / 128;
  if (role == 2) {
    give_registers<88>();
    produce(a, small, shared, split, first, stride);
    if (SPLITS > 1) {
      meet_cluster();
      meet_cluster();
    }
  } else if (role == 0) {
    take_registers<240>();  // 240 + 176 + 88 = 3 * 168, what the launch gets
    consume_left(a, small, shared_pointer, shared, split, first, stride);
  } else {
    take_registers<176>();
    consume_right(a, small, shared_pointer, shared, split, first, stride);
  }
}
