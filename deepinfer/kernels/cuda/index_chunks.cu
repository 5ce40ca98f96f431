// Index scores of chunks of rows, as int16 order keys: score = sum_h g_h * relu(q_h . k), rounded to bf16. wgmma.
//
// Keys are operand A of wgmma.m64nNk16, from registers: each consumer warpgroup expands two sets of 64 packed keys to
// exact bf16 and keeps them for many rows. Queries are operand B: a tile of N / HEADS rows with all their heads is N
// columns, which tensor copies bring with the 128-byte swizzle. A lane then holds all of one key's products with a
// quarter of the heads, so the sum over heads takes a maximum and a product each, and two shuffles at the end. While
// the products of one set run, the other's are summed.
//
// The producer warp streams query tiles, their weights and, where keys change, packed keys through a ring.
//
// A unit of work is a query tile times KEYS keys, of those that its last row sees. Rows of one sequence within GROUP
// rows form a block, unless they score nothing; a tile ends with its block. The units of all blocks are numbered, by
// block, then keys, then tile. They are cut into equal contiguous pieces, about PIECE units long, which are dealt out
// in turn: sequences of any number and length balance, and CTAs at work read the same queries, from L2.
//
// A score is summed by one warp in an order that depends on neither its place in a tile nor the other rows.
//
// Compile-time constants: HEADS (16, 32, 64), PER_BLOCK (entries per cache block, a multiple of 8), WGS (consumer
// warpgroups), N (64, 96 or 128, a multiple of HEADS), STAGES, GROUP (rows, a multiple of N / HEADS), PIECE.

#include "types.cuh"

#define CHANNELS 128
#define RECORD 68
#define TILE_ROWS (N / HEADS)
#define KEYS (128 * WGS)              // of a unit: two sets of 64 for each warpgroup
#define CONSUMER_WARPS (4 * WGS)
#define THREADS (128 * WGS + 128)     // the producer's warpgroup is whole to give up its registers
#define PRODUCER_REGISTERS (WGS == 2 ? 40 : 32)
#define CONSUMER_REGISTERS (WGS == 2 ? 232 : 160)  // a launch gets 168 or 128 for every thread
#define BOX_BYTES (N * CHANNELS)      // half of the channels of a tile, 2 bytes each
#define WEIGHT_BYTES (2 * N)
#define RUN_BYTES (8 * RECORD)        // 8 keys, which are contiguous
// Shared memory, from a multiple of 1024 on, which is what the swizzle counts from.
#define KEYS_OFFSET (STAGES * 2 * BOX_BYTES)
#define WEIGHTS_OFFSET (KEYS_OFFSET + KEYS * RECORD)
#define WORK_OFFSET (WEIGHTS_OFFSET + STAGES * WEIGHT_BYTES)
#define BARRIER_OFFSET (WORK_OFFSET + STAGES * WORK_BYTES)
#define WARP_SUMS_OFFSET (BARRIER_OFFSET + 8 * (2 * STAGES + 1))
#define ENDS_OFFSET (WARP_SUMS_OFFSET + 4 * (THREADS / 32))
#define WORK_BYTES (16 + 4 * (TILE_ROWS + 3 & ~3))

static_assert(HEADS % 16 == 0 && N % HEADS == 0 && TILE_ROWS <= 32 && PER_BLOCK % 8 == 0, "shape");
static_assert(GROUP % TILE_ROWS == 0 && (WGS == 2 || WGS == 3), "geometry");

struct __align__(64) TensorMap {
  u64 opaque[16];
};

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#define WGMMA_KIND "k16.f32.bf16.bf16"
#define WGMMA_LAYOUT ", 0"
#include "moe_instructions.cuh"

__device__ __forceinline__ void wait_for_phase(u32 barrier, u32 parity) {
  // Fails after seconds. Unlike behind barrier_wait's loop, its trap is a block apart: as a predicated instruction it
  // costs the compiler twenty registers, and without a trap it serialises wgmma.
  asm volatile("{ .reg .pred done, more; .reg .u32 tries;\n"
               "mov.u32 tries, 0;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra ready;\n"
               "add.u32 tries, tries, 1;\n"
               "setp.lt.u32 more, tries, 4000000;\n"
               "@more bra again;\n"
               "trap;\n"
               "ready: }" :: "r"(barrier), "r"(parity) : "memory");
}

// d[64, N] = a[64, 16] * b[16, N], plus d where `adds`.
#define PRODUCT(width, numbers, operands, a0, a1, a2, a3, b0, adds0)                                                 \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #adds0 ", 0;\n"                                                \
               "wgmma.mma_async.sync.aligned.m64n" #width WGMMA_KIND " {" numbers "}, {%" #a0 ", %" #a1             \
               ", %" #a2 ", %" #a3 "}, %" #b0 ", add, 1, 1" WGMMA_LAYOUT "; }"                                      \
               : operands : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

__device__ __forceinline__ void product(float* d, const u32* a, u64 b, int adds) {
#if N == 64
  PRODUCT(64, P32, O32, 32, 33, 34, 35, 36, 37);
#elif N == 96
  PRODUCT(96, P48, O48, 48, 49, 50, 51, 52, 53);
#else
  static_assert(N == 128, "width");
  PRODUCT(128, P64, O64, 64, 65, 66, 67, 68, 69);
#endif
}

__device__ __forceinline__ void copy_word(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void arrive_when_copied(u32 barrier) {  // when this lane's words are there
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// ---------------------------------------------------------------- the kernel
#include "index_order_key.cuh"

struct Arguments {
  const u16* weights;   // [rows, HEADS] bf16, row stride even
  const u8* keys;       // [num_entries, RECORD]
  const int* table;     // [sequences, blocks]
  const int* sequence;  // [rows]
  const int* visible;   // [rows], never falling along a sequence's rows that score
  short* out;           // [rows, out_stride], the stride even
  int weights_stride, table_stride, out_stride, rows, min_scored;
};

struct __align__(16) Work {  // a unit, as the consumers need it
  int row, first_key;
  int count;                 // units with these keys, this the first of them; 0: no more
  int most;                  // entries that its last row sees
  int limits[TILE_ROWS];     // entries that each row sees; 0 outside of the block
};
static_assert(sizeof(Work) == WORK_BYTES, "room");

struct Ring {  // as one thread sees it
  u32 base, stage, parity;
  __device__ __forceinline__ u32 full() const { return base + BARRIER_OFFSET + 8 * stage; }
  __device__ __forceinline__ u32 empty() const { return base + BARRIER_OFFSET + 8 * (STAGES + stage); }
  __device__ __forceinline__ u32 keys_free() const { return base + BARRIER_OFFSET + 8 * (2 * STAGES); }
  __device__ __forceinline__ u32 queries() const { return base + stage * 2 * BOX_BYTES; }
  __device__ __forceinline__ u32 weights() const { return base + WEIGHTS_OFFSET + stage * WEIGHT_BYTES; }
  __device__ __forceinline__ void next() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

// ---- the plan: which units there are
__device__ __forceinline__ bool scores(const Arguments& a, int row) { return a.visible[row] > a.min_scored; }

__device__ __forceinline__ int units_of(const Arguments& a, int row) {  // of the tile that ends with this row
  if (!scores(a, row)) return 0;
  const int next = row + 1;
  if (next % TILE_ROWS != 0 && next < a.rows && a.sequence[next] == a.sequence[row] && scores(a, next)) return 0;
  return (a.visible[row] + KEYS - 1) / KEYS;
}

// ends[r] = number of units of the tiles that end with rows 0 to r. All threads of the CTA.
__device__ __forceinline__ void count_units(const Arguments& a, int* ends, int* warp_sums) {
  const int each = (a.rows + THREADS - 1) / THREADS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = min((int)threadIdx.x * each, a.rows), last = min(first + each, a.rows);
  int sum = 0;
#pragma unroll 4
  for (int row = first; row < last; ++row) ends[row] = sum += units_of(a, row);
  int before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  for (int row = first; row < last; ++row) ends[row] += before;
  __syncthreads();
}

// The smallest x from `low` on for which the claim holds, else `high`. From there on it holds. All lanes of a warp.
template <class Claim> __device__ __forceinline__ int first_where(int low, int high, Claim claim) {
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int step = (high - low + 31) / 32, asked = low + lane * step;
    const int denied = __popc(__ballot_sync(~0u, asked < high && !claim(asked)));
    if (denied == 0) break;
    high = min(high, low + denied * step);
    low += (denied - 1) * step + 1;
  }
  return low;
}

struct Block {
  const int* ends;
  int begin, end;  // rows
  __device__ __forceinline__ int before(int row) const { return row > 0 ? ends[row - 1] : 0; }
  __device__ __forceinline__ int last_tile() const { return (end - 1) / TILE_ROWS; }
  __device__ __forceinline__ int units_before(int tile) const {
    return before(min(max(tile * TILE_ROWS, begin), end)) - before(begin);
  }
  __device__ __forceinline__ int key_tiles(int tile) const { return units_before(tile + 1) - units_before(tile); }
  __device__ __forceinline__ int first_tile(int key_tile) const {  // that sees it, else the last
    int low = begin / TILE_ROWS, high = last_tile();
    while (low < high) {
      const int middle = (low + high) / 2;
      if (key_tiles(middle) > key_tile) high = middle;
      else low = middle + 1;
    }
    return low;
  }
  __device__ __forceinline__ int units_until(int key_tile) const {  // of the keys before it
    const int first = first_tile(key_tile);
    return units_before(first) + key_tile * (last_tile() + 1 - first);
  }
};

__device__ __forceinline__ Block block_of(const Arguments& a, const int* ends, int row) {
  const int group = row / GROUP * GROUP, sequence = a.sequence[row];
  const auto is_member = [&](int r) { return a.sequence[r] == sequence && scores(a, r); };
  const int begin = first_where(group, row, is_member);
  return {ends, begin, first_where(row + 1, min(group + GROUP, a.rows), [&](int r) { return !is_member(r); })};
}

// ---- the producer
__device__ __forceinline__ void send_keys(const Arguments& a, const Ring& ring, const int* table, int first, int runs) {
  for (int run = threadIdx.x % 32; run < runs; run += 32) {
    const int entry = first + 8 * run;
    const long long slot = (long long)table[entry / PER_BLOCK] * PER_BLOCK + entry % PER_BLOCK;
    copy_bulk(ring.base + KEYS_OFFSET + run * RUN_BYTES, a.keys + slot * RECORD, RUN_BYTES, ring.full());
  }
}

// A lane of the consumers reads its heads' weights of a row at once: pair p of heads is word [p % 4, p / 4].
__device__ __forceinline__ void send_weights(const Arguments& a, const Ring& ring, int row) {
  for (int i = threadIdx.x % 32; i < N / 2; i += 32) {
    const int r = i / (HEADS / 2), pair = i % (HEADS / 2);
    const u16* from = a.weights + (long long)min(row + r, a.rows - 1) * a.weights_stride + 2 * pair;
    copy_word(ring.weights() + ((r * 4 + pair % 4) * (HEADS / 8) + pair / 4) * 4, from);
  }
  arrive_when_copied(ring.full());
}

struct Segment { int key_tile, tile, count; };  // units with the same keys

__device__ __forceinline__ void send(const Arguments& a, const TensorMap* map, Ring& ring, Work* work, u32& keys_parity,
                                     const Block& block, const Segment& segment) {
  const int lane = threadIdx.x % 32, first_key = segment.key_tile * KEYS;
  const int runs = min(KEYS / 8, (a.visible[block.end - 1] - first_key + 7) / 8);
  const int* table = a.table + (long long)a.sequence[block.begin] * a.table_stride;
  wait_for_phase(ring.keys_free(), keys_parity ^ 1);
  keys_parity ^= 1;
  for (int i = 0; i < segment.count; ++i) {
    const int row = (segment.tile + i) * TILE_ROWS;
    wait_for_phase(ring.empty(), ring.parity ^ 1);
    Work& unit = work[ring.stage];
    if (lane < TILE_ROWS) {
      const bool is_inside = row + lane >= block.begin && row + lane < block.end;
      unit.limits[lane] = is_inside ? a.visible[row + lane] : 0;
    }
    send_weights(a, ring, row);
    __syncwarp();
    if (lane == 0) {
      unit.row = row, unit.first_key = first_key, unit.count = segment.count - i;
      unit.most = a.visible[min(row + TILE_ROWS, block.end) - 1];
      barrier_expect(ring.full(), 2 * BOX_BYTES + (i == 0 ? runs * RUN_BYTES : 0));
      copy_box(ring.queries(), map, 0, row * HEADS, ring.full());
      copy_box(ring.queries() + BOX_BYTES, map, 64, row * HEADS, ring.full());
    }
    __syncwarp();
    if (i == 0) send_keys(a, ring, table, first_key, runs);
    ring.next();
  }
}

__device__ __forceinline__ void produce(const Arguments& a, const TensorMap* map, Ring ring, Work* work,
                                        const int* ends) {
  const int total = ends[a.rows - 1], lane = threadIdx.x % 32, ctas = gridDim.x;
  const int pieces = ctas * max((total + ctas * PIECE / 2) / (ctas * PIECE), 1), each = total / pieces;
  u32 keys_parity = 0;
  for (int piece = blockIdx.x; piece < pieces; piece += ctas) {
    int position = piece * each + min(piece, total % pieces);
    const int stop = position + each + (piece < total % pieces);
    while (position < stop) {
      const int row = first_where(0, a.rows, [&](int r) { return ends[r] > position; });
      const Block block = block_of(a, ends, row);
      const int place = position - block.before(block.begin), last = block.key_tiles(block.last_tile()) - 1;
      int key_tile = first_where(0, last, [&](int k) { return block.units_until(k + 1) > place; });
      int tile = block.first_tile(key_tile) + place - block.units_until(key_tile);
      for (; key_tile <= last && position < stop; ++key_tile) {
        const int count = min(block.last_tile() + 1 - tile, stop - position);
        send(a, map, ring, work, keys_parity, block, {key_tile, tile, count});
        position += count;
        tile = block.first_tile(key_tile + 1);
      }
    }
  }
  wait_for_phase(ring.empty(), ring.parity ^ 1);
  arrive_when_copied(ring.full());
  if (lane == 0) {
    work[ring.stage].count = 0;
    barrier_arrive(ring.full());
  }
}

// ---- the consumers
// A byte of a word, two codes, to two bf16: times 2^-126 by their bits, then twice by a power of two. The scale 0 is 0.
__device__ __forceinline__ u32 expand(u32 word, u32 select, u32 scale) {
  const u32 codes = __byte_perm(word, word >> 4, select);  // a code at bit 0 and one at bit 16
  return times(times((codes << 12 & 0x80008000u) | (codes << 6 & 0x01C001C0u), 0x7E807E80u), scale);
}

// A warp's 16 keys as operands of eight products; operand rows g and g + 8 are keys 2 g and 2 g + 1.
__device__ __forceinline__ void load_keys(u32 (&to)[32], const char* keys) {
  const int lane = threadIdx.x % 32;
  const u32 select = 0x4400 + 0x1111 * (lane % 4);
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const u32* words = (const u32*)(keys + (lane / 4 * 2 + high) * RECORD);
    const u32 scales = words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // 8 channels each
      const u32 scale = (scales >> i / 4 * 8 & 255) * 0x00800080u;
      to[i / 2 * 4 + i % 2 * 2 + high] = expand(words[i], select, scale);
    }
  }
}

// 64 keys times N columns of queries; `queries` is the stage's address.
__device__ __forceinline__ void multiply(float (&sums)[N / 2], const u32 (&keys)[32], u32 queries) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // descriptor: 128-byte swizzle, 1024 bytes from 8 columns to the next 8, start address in units of 16 bytes
    const u32 low = ((1u << 16) | (queries >> 4 & 0x3FFF)) + (i / 4 * BOX_BYTES + i % 4 * 32) / 16;
    product(sums, keys + 4 * i, (u64)((1u << 30) | 64) << 32 | low, i > 0);
  }
  wgmma_commit();
}

struct __align__(HEADS == 16 ? 8 : 16) Weights { u32 pairs[HEADS / 8]; };

// Sum over heads and write the scores of a warp's 16 keys from `first_key` on.
__device__ __forceinline__ void finish(const Arguments& a, const float (&sums)[N / 2], const char* weights,
                                       const Work& work, int first_key) {
  const int t = threadIdx.x % 4, key = work.first_key + first_key + threadIdx.x % 32 / 4 * 2;
#pragma unroll
  for (int first_row = 0; first_row < TILE_ROWS; first_row += 4) {
    float low = 0, high = 0;  // this lane's row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i;
      if (row >= TILE_ROWS) break;
      const Weights mine = ((const Weights*)weights)[row * 4 + t];
      float first = 0, second = 0;
#pragma unroll
      for (int j = 0; j < HEADS / 8; ++j) {
        const float* s = sums + (row * (HEADS / 8) + j) * 4;
        const float one = __uint_as_float(mine.pairs[j] << 16), other = __uint_as_float(mine.pairs[j] & 0xFFFF0000u);
        first = fmaf(fmaxf(s[0], 0.0f), one, first);
        first = fmaf(fmaxf(s[1], 0.0f), other, first);
        second = fmaf(fmaxf(s[2], 0.0f), one, second);
        second = fmaf(fmaxf(s[3], 0.0f), other, second);
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        first += __shfl_xor_sync(~0u, first, step);
        second += __shfl_xor_sync(~0u, second, step);
      }
      if (t == i) low = first, high = second;
    }
    const int row = first_row + t, limit = row < TILE_ROWS ? work.limits[min(row, TILE_ROWS - 1)] : 0;
    short* out = a.out + (long long)(work.row + row) * a.out_stride + key;
    const u32 pair = (u32)(u16)order_key(low) | (u32)(u16)order_key(high) << 16;
    if (key + 1 < limit) *(u32*)out = pair;
    else if (key < limit) *out = (short)pair;
  }
}

__device__ __forceinline__ void consume(const Arguments& a, char* shared, Ring ring) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int set = warp / 4 * 128 + warp % 4 * 16;  // the warp's keys in the first set; the other is 64 on
  const Work* work = (const Work*)(shared + WORK_OFFSET);
  const char* weights = shared + WEIGHTS_OFFSET;
  while (true) {
    wait_for_phase(ring.full(), ring.parity);
    int count = __shfl_sync(~0u, work[ring.stage].count, 0);
    if (count == 0) break;
    u32 keys[2][32];
    load_keys(keys[0], shared + KEYS_OFFSET + set * RECORD);
    load_keys(keys[1], shared + KEYS_OFFSET + (set + 64) * RECORD);
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.keys_free());
    // The first rows of a prompt's diagonal may see none of this warpgroup's keys.
    while (__shfl_sync(~0u, work[ring.stage].most - work[ring.stage].first_key, 0) <= warp / 4 * 128) {
      if (lane == 0) barrier_arrive(ring.empty());
      ring.next();
      if (--count == 0) break;
      wait_for_phase(ring.full(), ring.parity);
    }
    if (count == 0) continue;
    float sums[2][N / 2];
    multiply(sums[0], keys[0], ring.queries());
    multiply(sums[1], keys[1], ring.queries());
    for (int left = count - 1; left > 0; --left) {
      const Work& unit = work[ring.stage];
      const char* unit_weights = weights + ring.stage * WEIGHT_BYTES;
      const u32 empty = ring.empty();
      ring.next();
      wgmma_wait<1>();
      finish(a, sums[0], unit_weights, unit, set);
      wait_for_phase(ring.full(), ring.parity);
      multiply(sums[0], keys[0], ring.queries());
      wgmma_wait<1>();
      finish(a, sums[1], unit_weights, unit, set + 64);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty);
      multiply(sums[1], keys[1], ring.queries());
    }
    wgmma_wait<1>();
    finish(a, sums[0], weights + ring.stage * WEIGHT_BYTES, work[ring.stage], set);
    wgmma_wait<0>();
    finish(a, sums[1], weights + ring.stage * WEIGHT_BYTES, work[ring.stage], set + 64);
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty());
    ring.next();
  }
}

// query: a map of [rows * HEADS, CHANNELS], boxes of [N, 64], 128-byte swizzle.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
index_chunks(const __grid_constant__ Arguments a, const __grid_constant__ TensorMap query) {
  extern __shared__ char unaligned[];
  Ring ring = {(shared_address(unaligned) + 1023) & ~1023u, 0, 0};
  char* shared = unaligned + (ring.base - shared_address(unaligned));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(ring.base + BARRIER_OFFSET + 8 * s, 33);  // the producer's lanes, and the copies
      barrier_init(ring.base + BARRIER_OFFSET + 8 * (STAGES + s), CONSUMER_WARPS);
    }
    barrier_init(ring.keys_free(), CONSUMER_WARPS);
    barriers_ready();
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int* ends = (int*)(shared + ENDS_OFFSET);
  count_units(a, ends, (int*)(shared + WARP_SUMS_OFFSET));
  const int warp = threadIdx.x / 32;
  if (warp >= CONSUMER_WARPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == CONSUMER_WARPS) produce(a, &query, ring, (Work*)(shared + WORK_OFFSET), ends);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(a, shared, ring);
  }
}
