// Grouped matrix product of the routed experts for many pairs (row, expert) on the FP8 tensor cores, `numerics="fast"`.
//
// As moe_wgmma.cu, which see, but for the operands: wgmma.m64nNk32 multiplies e4m3 by e4m3. An activation row is e4m3
// with one power of two (moe_fp8_rows.cu). A weight row is e4m3 with one power of two as well: a code times the scale of
// its 32 columns, relative to the largest scale of the row, is looked up in a table of 8 bytes by PRMT, four codes at a
// time. Both powers multiply the sums at the end.
//
// Exactness: a weight is exact unless the scale of its group is more than 2**11 below the largest of its row; such a
// group counts as 2**11 below. The tensor cores align the 32 products of a step and the sum so far to the largest of
// them and cut off about 14 bits below: that, and not the operands, is the error of this kernel.
//
// Columns: a line of activations has 128 bytes, 128 columns of a row. Within each 32 columns byte 16 o + 4 t + i is
// column 8 t + 2 j + o with j = 2, 0, 3, 1 for i = 0, 1, 2, 3: the order in which the packed codes come out.
//
// Compile-time constants: K_TILES (64 columns each, an even number), EXPERTS, ROW_TILES (64 weight rows each), SWIGLU
// (rows are in the order of pair_gate_and_up: write the activation as e4m3 lines, with an exponent for every 32 columns;
// else rows of bf16), BLOCK (8 or 16), WGS (consumer warpgroups), MF (tiles of each), NMAX, STAGES (one line along K).

#include "types.cuh"

#define CODE_BYTES 2048
#define TILE_BYTES 2176
#define LINE_BYTES 128
#define TILES (WGS * MF)              // of a CTA
#define TILE_GROUPS ((ROW_TILES + TILES - 1) / TILES)
#define STEPS (K_TILES / 2)
#define CONSUMER_WARPS (4 * WGS)
#define THREADS (32 * CONSUMER_WARPS + 128)
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS (WGS == 2 ? 232 : WGS == 3 ? 152 : 104)  // a launch gets 168, 128 or 96 for every thread
#define X_BYTES (NMAX * LINE_BYTES)
#define W_BYTES (2 * TILES * TILE_BYTES)
#define ROOM_STRIDE 144               // bytes of a pair's 32 float32 or 64 bf16 results, without bank conflicts
#define ROOM_BYTES (NMAX * ROOM_STRIDE)
// The powers of two of a piece of work, float32 of its pairs and bytes of its weight rows. The producer may be STAGES
// pieces ahead of the one whose results are on their way out.
#define SIDES (STAGES + 1)
#define SIDE_BYTES (4 * NMAX + 64 * TILES)
// Shared memory, from a multiple of 1024 on, which is what the swizzle counts from.
#define W_OFFSET (STAGES * X_BYTES)
#define ROOM_OFFSET (W_OFFSET + STAGES * W_BYTES)
#define SIDE_OFFSET (ROOM_OFFSET + WGS * ROOM_BYTES)
#define BARRIER_OFFSET (SIDE_OFFSET + SIDES * SIDE_BYTES)
#define WORK_OFFSET (BARRIER_OFFSET + 16 * STAGES)
#define PARTS_OFFSET (WORK_OFFSET + 16 * STAGES)

static_assert(K_TILES % 2 == 0, "a line has two tiles");
static_assert(NMAX % BLOCK == 0 && NMAX <= 160, "widths");

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#define WGMMA_KIND "k32.f32.e4m3.e4m3"
#define WGMMA_LAYOUT ""
#include "moe_instructions.cuh"

__device__ __forceinline__ u32 load_byte(u32 address) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high, u32 selector) {  // __byte_perm clears bits of the selector
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// ---------------------------------------------------------------- the product
struct Arguments {
  const char* weights;          // [EXPERTS, K_TILES, ROW_TILES, TILE_BYTES]
  const u8* row_powers;         // [EXPERTS, 64 * ROW_TILES]: see grouped_fp8.row_powers
  const char* x;                // [K_TILES / 2, capacity] lines
  const float* pair_powers;     // [capacity]: of the lines
  const float* pair_weights;    // [capacity], with SWIGLU
  void* out;                    // SWIGLU: [ROW_TILES / 4, capacity] lines, else bf16 [capacity, 64 * ROW_TILES]
  u8* exponents;                // with SWIGLU, [ROW_TILES, capacity]: of every 32 columns of out, plus 128
  const int* offsets;           // [EXPERTS + 1]: first row of each expert
  int* counter;                 // pieces of work taken beyond the first of every CTA
  int capacity;
  float limit;
};

struct __align__(16) Work { int first_row, width, first_tile, expert; };  // width 0: no more

struct Ring {  // as one thread sees it
  u32 base, stage, parity;
  __device__ __forceinline__ u32 full() const { return base + BARRIER_OFFSET + 8 * stage; }
  __device__ __forceinline__ u32 empty() const { return base + BARRIER_OFFSET + 8 * (STAGES + stage); }
  __device__ __forceinline__ u32 before() const {  // empty() of the stage before this one
    return base + BARRIER_OFFSET + 8 * (STAGES + (stage == 0 ? STAGES - 1 : stage - 1));
  }
  __device__ __forceinline__ u32 x() const { return base + stage * X_BYTES; }
  __device__ __forceinline__ u32 w() const { return base + W_OFFSET + stage * W_BYTES; }
  __device__ __forceinline__ void next() { if (++stage == STAGES) stage = 0, parity ^= 1; }
};

// before[e]: parts of the experts ahead of e, for e up to EXPERTS.
__device__ __forceinline__ void count_parts(int* before, const int* offsets, int lane) {
  int total = 0;
#pragma unroll 4
  for (int first = 0; first < EXPERTS; first += 32) {
    const int expert = min(first + lane, EXPERTS - 1);
    int sum = (offsets[expert + 1] - offsets[expert] + NMAX - 1) / NMAX;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (first + lane < EXPERTS) before[first + lane + 1] = total + sum;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) before[0] = 0;
  __syncwarp();
}

// Neighbouring pieces share weights, then activations.
__device__ __forceinline__ Work find_work(int item, const int* before, const int* offsets) {
  int expert = 0;
  for (int above = EXPERTS; above - expert > 1;) {  // before[expert] <= item / TILE_GROUPS < before[above]
    const int middle = (expert + above) / 2;
    if (before[middle] <= item / TILE_GROUPS) expert = middle;
    else above = middle;
  }
  const int parts = before[expert + 1] - before[expert], rest = item - before[expert] * TILE_GROUPS;
  const int part = rest % parts, first = offsets[expert], units = (offsets[expert + 1] - first) / BLOCK;
  const int begin = part * units / parts, end = (part + 1) * units / parts;
  return {first + begin * BLOCK, (end - begin) * BLOCK, rest / parts * TILES, expert};
}

__device__ __forceinline__ u32 side(u32 base, int piece) { return base + SIDE_OFFSET + piece % SIDES * SIDE_BYTES; }

__device__ __forceinline__ void produce(const Arguments& g, Ring ring, Work* work, const int* before) {
  const int items = before[EXPERTS] * TILE_GROUPS;
  int piece = 0;
  for (int item = blockIdx.x; item < items; ++piece) {
    const int taken = atomicAdd(g.counter, 1);  // early: its answer is needed when this item is on its way
    const Work now = find_work(item, before, g.offsets);
    const int tiles = min(TILES, ROW_TILES - now.first_tile), x_bytes = now.width * LINE_BYTES;
    const char* x = g.x + (long long)now.first_row * LINE_BYTES;
    const char* w = g.weights + ((long long)now.expert * K_TILES * ROW_TILES + now.first_tile) * TILE_BYTES;
    for (int c = 0; c < STEPS; ++c) {
      barrier_wait(ring.empty(), ring.parity ^ 1);
      const int bytes = x_bytes + 2 * tiles * TILE_BYTES;
      if (c == 0) {
        work[ring.stage] = now;
        barrier_expect(ring.full(), bytes + 4 * now.width + 64 * tiles);
        const u32 to = side(ring.base, piece);
        copy_bulk(to, g.pair_powers + now.first_row, 4 * now.width, ring.full());
        copy_bulk(to + 4 * NMAX, g.row_powers + ((long long)now.expert * ROW_TILES + now.first_tile) * 64, 64 * tiles,
                  ring.full());
      } else {
        barrier_expect(ring.full(), bytes);
      }
      copy_bulk(ring.x(), x, x_bytes, ring.full());
      copy_bulk(ring.w(), w, tiles * TILE_BYTES, ring.full());
      copy_bulk(ring.w() + TILES * TILE_BYTES, w + ROW_TILES * TILE_BYTES, tiles * TILE_BYTES, ring.full());
      x += (long long)g.capacity * LINE_BYTES, w += 2 * ROW_TILES * TILE_BYTES;
      ring.next();
    }
    item = gridDim.x + taken;
  }
  barrier_wait(ring.empty(), ring.parity ^ 1);
  work[ring.stage].width = 0;
  barrier_arrive(ring.full());
}

struct Codes { uint4 words; u32 scales; };  // of a lane: [half of 32 columns, row g or g + 8]

__device__ __forceinline__ Codes load_codes(u32 tile, int part, int lane) {
  return {load_shared(tile + part * 512 + lane * 16), load_word(tile + CODE_BYTES + lane / 4 * 16 + part * 4)};
}

// Bytes of the codes 0 to 3 and 4 to 7 without sign, for a group whose largest scale is 2**(12 - field) times its own:
// 0.5 has exponent field `field`, from 1 to 12, and no mantissa.
struct Table { u32 low, high; };

__device__ __forceinline__ Table make_table(u32 scale, int row_power) {
  const u32 field = max((int)scale - row_power, 1);
  return {field * 0x08080800u + 0x0C080000u, field * 0x08080808u + 0x1C181410u};
}

__device__ __forceinline__ u32 with_signs(u32 magnitudes, u32 signs) { return magnitudes | (signs & 0x80808080u); }

// A warp's 16 rows x 64 columns: two operands of four registers. packing.py says where the bits of the codes are. The
// three bits of code j of a word (for either half of it) go to a selector of PRMT, in nibbles 0 to 3 for j = 2, 0, 3, 1.
// Signs come to the tops of the bytes by a product: each factor 2**n takes one of the four bits there, and what else it
// makes stays below the next top.
__device__ __forceinline__ void decode(u32 (&a)[8], const Codes& codes, int power, int power_below) {
  const u32 words[4] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 u = words[2 * half], v = words[2 * half + 1];  // rows g, g + 8
    const Table top = make_table(__byte_perm(codes.scales, 0, 0x4440 + 2 * half), power);
    const Table bottom = make_table(__byte_perm(codes.scales, 0, 0x4441 + 2 * half), power_below);
    const u32 p = (u & 0x70077007u) | (u >> 2 & 0x03700370u) | (v & 0x04000400u);
    const u32 q = ((v & 0x70077007u) | (v >> 2 & 0x00700070u)) + (v & 0x00180018u) * 64 + (u & 0x00100010u) * 16;
    // signs of j = 2, 0, 3, 1: bits 0, 6, 10, 12 of u and 0, 6, 2, 12 of v, to bits 7, 15, 23, 31
    const u32 of_u = 1u << 7 | 1u << 9 | 1u << 13 | 1u << 19, of_v = 1u << 7 | 1u << 9 | 1u << 21 | 1u << 19;
    u32* to = a + 4 * half;
    to[0] = with_signs(pick_bytes(top.low, top.high, p), (__funnelshift_r(u, u, 9) & 0x1441) * of_u);
    to[1] = with_signs(pick_bytes(bottom.low, bottom.high, q), (__funnelshift_r(v, v, 9) & 0x1045) * of_v);
    to[2] = with_signs(pick_bytes(top.low, top.high, p >> 16), (__funnelshift_r(u, u, 25) & 0x1441) * of_u);
    to[3] = with_signs(pick_bytes(bottom.low, bottom.high, q >> 16), (__funnelshift_r(v, v, 25) & 0x1045) * of_v);
  }
}

// 64 rows x 64 columns of weights times `width` pairs, FIRST to LAST, whose half lines begin at address x. The width is
// chosen in here because the compiler serialises the products of a kernel that has a loop for each width.
template <int FIRST, int LAST>
__device__ __forceinline__ void multiply_tile(float (&sum)[NMAX / 2], const u32 (&a)[8], u32 x, int width) {
  if constexpr (FIRST == LAST) {
    wgmma_fence();
#pragma unroll
    for (u32 q = 0; q < 2; ++q) {
      // descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next 8, start address in units of 16 bytes
      const u32 low = ((1u << 16) | (x >> 4 & 0x3FFF)) + 2 * q, high = (1u << 30) | 64;
      Wgmma<FIRST>::run(sum, a + 4 * q, (u64)high << 32 | low);
    }
    wgmma_commit();
  } else {
    constexpr int MIDDLE = (FIRST + LAST) / 2 / BLOCK * BLOCK;
    if (width <= MIDDLE) multiply_tile<FIRST, MIDDLE>(sum, a, x, width);
    else multiply_tile<MIDDLE + BLOCK, LAST>(sum, a, x, width);
  }
}

__device__ __forceinline__ float activation(float gate, float up, float limit) {
  gate = fmaxf(fminf(gate, limit), -1e4f);  // the lower bound only keeps an infinite gate from NaN
  return gate * reciprocal(1.0f + exp2_fast(gate * -1.4426950408889634f)) * fmaxf(fminf(up, limit), -limit);
}

// A tile's 32 activations of every pair, times its route weight, rounded by Q8: [pair] lines of float32 in `room`, where
// finish_tile put them. Four neighbouring lanes have one pair; pairs that share a phase of the loads are two apart,
// against bank conflicts.
__device__ __forceinline__ void store_rounded(const Arguments& g, const Work& work, u32 room, int tile, int part,
                                              int lane) {
  const int u = lane % 4, p = lane / 4 % 4 * 2 + lane / 16;
  for (int pair = part * 8 + p; pair < work.width; pair += 32) {
    const int row = work.first_row + pair;
    const float weight = g.pair_weights[row];
    const u32 from = room + pair * ROOM_STRIDE + u % 2 * 64 + u / 2 * 16;
    const uint4 words[2] = {load_shared(from), load_shared(from + 32)};
    float v[8] = {__uint_as_float(words[0].x), __uint_as_float(words[0].y), __uint_as_float(words[0].z),
                  __uint_as_float(words[0].w), __uint_as_float(words[1].x), __uint_as_float(words[1].y),
                  __uint_as_float(words[1].z), __uint_as_float(words[1].w)};
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= weight, largest = fmaxf(largest, fabsf(v[i]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // The smallest power of two that is at least max(largest, 1e-4) / 448; 448 is 1.75 * 2^8.
    const int exponent = ((__float_as_int(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
    const float down = __int_as_float((127 - exponent) << 23);
    u32 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = to_e4m3_pair(v[2 * i] * down, v[2 * i + 1] * down);
    char* line = (char*)g.out + ((long long)(tile / 4) * g.capacity + row) * LINE_BYTES;
    const int piece = (tile % 4 * 2 + u / 2) ^ p;  // row % 8 is p
    *(u64*)(line + piece * 16 + u % 2 * 8) = (u64)(codes[2] | codes[3] << 16) << 32 | (codes[0] | codes[1] << 16);
    if (u == 0) g.exponents[(long long)tile * g.capacity + row] = exponent + 128;
  }
}

// A tile's 64 results of every pair: [pair] lines of bf16 in `room`.
__device__ __forceinline__ void store_rows(const Arguments& g, const Work& work, u32 room, int tile, int thread) {
  for (int i = thread; i < work.width * 8; i += 128) {
    const uint4 piece = load_shared(room + i / 8 * ROOM_STRIDE + i % 8 * 16);
    *(uint4*)((u16*)g.out + (long long)(work.first_row + i / 8) * (64 * ROW_TILES) + tile * 64 + i % 8 * 8) = piece;
  }
}

__device__ __forceinline__ float power_of_row(int row_power) { return __int_as_float((row_power - 120) << 23); }

// A warpgroup's sums of one tile to `room`, from where its threads take them pair by pair. A pair's 32 activations lie
// there in blocks of 8 columns, each in the order of a line: even columns, odd columns.
__device__ __forceinline__ void finish_tile(const Arguments& g, const Work& work, const float (&sum)[NMAX / 2],
                                            u32 room, u32 pair_powers, float power, float power_below, int group,
                                            int tile, int part, int lane) {
  const u32 place = part * 8 + lane / 4 % 2 * 4 + (0x2031 >> lane / 8 * 4 & 15);  // of column lane / 4
#pragma unroll
  for (int i = 0; i < NMAX / 8; ++i) {
    if (i % (BLOCK / 8) == 0 && i * 8 >= work.width) break;
    float of_pair[2], above[2], below[2];
    load_floats(of_pair[0], of_pair[1], pair_powers + (i * 8 + lane % 4 * 2) * 4);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      above[k] = sum[4 * i + k] * power * of_pair[k], below[k] = sum[4 * i + 2 + k] * power_below * of_pair[k];
#if SWIGLU
      store_float(room + (i * 8 + lane % 4 * 2 + k) * ROOM_STRIDE + place * 4, activation(above[k], below[k], g.limit));
#endif
    }
#if !SWIGLU
    store_matrices(room + (i * 8 + lane % 8) * ROOM_STRIDE + part * 32 + lane / 8 % 2 * 16,
                   to_bf16_pair(above[0], above[1]), to_bf16_pair(below[0], below[1]));
#endif
  }
  group_barrier(group);
  if (tile < ROW_TILES) {
#if SWIGLU
    store_rounded(g, work, room, tile, part, lane);
#else
    store_rows(g, work, room, tile, part * 32 + lane);
#endif
  }
  group_barrier(group);
}

// One warpgroup's sums of a piece of work, whose first stage is there.
__device__ __forceinline__ void accumulate(float (&sum)[MF][NMAX / 2], Ring& ring, const int (&powers)[MF][2],
                                           int width, int group, int part, int lane) {
  const u32 mine = group * MF * TILE_BYTES;
  // Two operand buffers: one is decoded while the tensor cores read the other. Its codes are loaded another step ahead.
  u32 a[2][8];
  Codes codes = load_codes(ring.w() + mine, part, lane);
  for (int c = 0; c < STEPS; ++c) {
    const u32 x = ring.x(), w = ring.w() + mine;
#pragma unroll
    for (int s = 0; s < 2 * MF; ++s) {
      decode(a[s % 2], codes, powers[s % MF][0], powers[s % MF][1]);
      multiply_tile<BLOCK, NMAX>(sum[s % MF], a[s % 2], x + s / MF * (LINE_BYTES / 2), width);
      if (s + 1 < 2 * MF) {
        codes = load_codes(w + ((s + 1) / MF * TILES + (s + 1) % MF) * TILE_BYTES, part, lane);
      } else if (c + 1 < STEPS) {
        ring.next();
        barrier_wait(ring.full(), ring.parity);
        codes = load_codes(ring.w() + mine, part, lane);
      }
      wgmma_wait<1>();
      // Everything but the latest step is done, so the stage before this one is free.
      if (s == 0 && c > 0 && lane == 0) barrier_arrive(ring.before());
    }
  }
  wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_fp8(const __grid_constant__ Arguments g) {
  extern __shared__ char unaligned[];
  Ring ring = {(shared_address(unaligned) + 1023) & ~1023u, 0, 0};
  char* shared = unaligned + (ring.base - shared_address(unaligned));
  Work* work = (Work*)(shared + WORK_OFFSET);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(ring.base + BARRIER_OFFSET + 8 * s, 1);
      barrier_init(ring.base + BARRIER_OFFSET + 8 * (STAGES + s), CONSUMER_WARPS);
    }
    barriers_ready();
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  __syncthreads();
  if (warp >= CONSUMER_WARPS) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == CONSUMER_WARPS) {
      int* before = (int*)(shared + PARTS_OFFSET);
      count_parts(before, g.offsets, lane);
      if (lane == 0) produce(g, ring, work, before);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const int group = warp / 4, part = warp % 4;
    for (int piece = 0;; ++piece) {
      barrier_wait(ring.full(), ring.parity);
      const Work now = work[ring.stage];
      if (now.width == 0) break;
      const u32 pair_powers = side(ring.base, piece);
      int powers[MF][2];  // of rows g and g + 8
#pragma unroll
      for (int f = 0; f < MF; ++f)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          powers[f][r] = load_byte(pair_powers + 4 * NMAX + (group * MF + f) * 64 + part * 16 + r * 8 + lane / 4);
      float sum[MF][NMAX / 2];
#pragma unroll
      for (int f = 0; f < MF; ++f)
#pragma unroll
        for (int i = 0; i < NMAX / 2; ++i) sum[f][i] = 0.0f;
      accumulate(sum, ring, powers, now.width, group, part, lane);
      if (lane == 0) barrier_arrive(ring.empty());
      ring.next();
#pragma unroll
      for (int f = 0; f < MF; ++f)
        finish_tile(g, now, sum[f], ring.base + ROOM_OFFSET + group * ROOM_BYTES, pair_powers,
                    power_of_row(powers[f][0]), power_of_row(powers[f][1]), group, now.first_tile + group * MF + f,
                    part, lane);
    }
  }
}
