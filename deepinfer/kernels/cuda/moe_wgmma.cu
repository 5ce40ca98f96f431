// Grouped matrix product of the routed experts for many pairs (row, expert): FP4 weights, bf16 activations, wgmma.
//
// The weights are operand A of wgmma.m64nNk16, from registers: each consumer warp takes its lanes' codes from shared
// memory and decodes them to exact bf16 (layout and decoding: deepinfer/kernels/moe/packing.py). The activations are
// operand B, in shared memory with the 128-byte swizzle. One producer thread streams both through a ring of stages by
// bulk copies; it runs on into the next piece of work while the consumers finish the last.
//
// A piece of work is WGS * MF tiles of 64 weight rows times at most NMAX pairs of one expert. An expert's pairs are cut
// into equal parts, in units of BLOCK pairs, and the instruction's width N is that of the part. CTAs are persistent and
// take the next piece from a counter. Sums run along K in order: a pair's bits are the same in every batch.
//
// Activations stand in the order of the experts (expert_blocks.py, blocks of BLOCK), padding included, as [K / 64]
// [capacity] lines of 128 bytes that are what shared memory has to hold: the 64 columns of one row in the order of
// packing.py, 16-byte piece i at piece i ^ row % 8. Padding rows hold anything: that reaches only their own results.
//
// Compile-time constants: GATHER (1: the kernel that brings rows into that order, 0: the product), K_TILES (64 columns
// each). Gather: TOP (pairs per row). Product: EXPERTS, ROW_TILES (64 weight rows each), SWIGLU (rows are in the order
// of pair_gate_and_up: write the rounded activation as such lines; else rows of bf16), BLOCK (8 or 16), WGS (consumer
// warpgroups), MF (tiles of each), KT (tiles along K of a stage), NMAX, STAGES, MIN_CTAS.

#include "types.cuh"

#define CODE_BYTES 2048
#define TILE_BYTES 2176
#define LINE_BYTES 128
#if GATHER
#define THREADS ((2 * K_TILES + 31) / 32 * 32)
#else
#define TILES (WGS * MF)              // of a CTA
#define TILE_GROUPS ((ROW_TILES + TILES - 1) / TILES)
#define STEPS (K_TILES / KT)
#define CONSUMER_WARPS (4 * WGS)
#define REGISTER_BOUND (MF * NMAX > 128 || WGS > 2)  // consumers need registers that the producer's warpgroup gives up
#define THREADS (32 * CONSUMER_WARPS + (REGISTER_BOUND ? 128 : 32))
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS (WGS == 2 ? 232 : WGS == 3 ? 152 : 104)  // a launch gets 168, 128 or 96 for every thread
#define X_BYTES (KT * NMAX * LINE_BYTES)
#define W_BYTES (TILES * KT * TILE_BYTES)
#define ROOM_STRIDE 144               // bytes of a pair's 32 float32 or 64 bf16 results, without bank conflicts
#define ROOM_BYTES (NMAX * ROOM_STRIDE)
// Shared memory, from a multiple of 1024 on, which is what the swizzle counts from.
#define W_OFFSET (STAGES * X_BYTES)
#define ROOM_OFFSET (W_OFFSET + STAGES * W_BYTES)
#define BARRIER_OFFSET (ROOM_OFFSET + WGS * ROOM_BYTES)
#define WORK_OFFSET (BARRIER_OFFSET + 16 * STAGES)
#define PARTS_OFFSET (WORK_OFFSET + 16 * STAGES)

static_assert(K_TILES % KT == 0, "a stage is whole");
static_assert(MF * KT % 2 == 0, "two operand buffers take turns");
static_assert(NMAX % BLOCK == 0 && NMAX <= 160, "widths");
#endif

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#if !GATHER
#define WGMMA_KIND "k16.f32.bf16.bf16"
#define WGMMA_LAYOUT ", 0"
#include "moe_instructions.cuh"
#endif

#if GATHER
// ---------------------------------------------------------------- gather
// Each row x[row], a thread for 32 columns, to the places of its pairs; with them their route weights.
// place: [rows * TOP], -1 for none. counters: [2], set to 0 for the two products that follow.
extern "C" __global__ void __launch_bounds__(THREADS)
moe_gather(const uint4* x, const int* place, const float* weights, char* ordered, float* ordered_weights, int* counters,
           int capacity) {  // not restrict: what an overlapped kernel reads is written while it runs
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int row = blockIdx.x, half = threadIdx.x;
  if (row == 0 && half < 2) counters[half] = 0;
  int to[TOP];
#pragma unroll
  for (int i = 0; i < TOP; ++i) {
    to[i] = place[row * TOP + i];
    if (half == 0 && to[i] >= 0) ordered_weights[to[i]] = weights[row * TOP + i];
  }
  if (half >= 2 * K_TILES) return;
  uint4 piece[4];  // 8 columns each
#pragma unroll
  for (int i = 0; i < 4; ++i) piece[i] = x[((long long)row * 2 * K_TILES + half) * 4 + i];
  const uint4 out[4] = {  // pair i of columns of every piece
    {piece[0].x, piece[1].x, piece[2].x, piece[3].x}, {piece[0].y, piece[1].y, piece[2].y, piece[3].y},
    {piece[0].z, piece[1].z, piece[2].z, piece[3].z}, {piece[0].w, piece[1].w, piece[2].w, piece[3].w}};
#pragma unroll
  for (int k = 0; k < TOP; ++k) {
    if (to[k] < 0) continue;
    char* line = ordered + ((long long)(half / 2) * capacity + to[k]) * LINE_BYTES;
#pragma unroll
    for (int i = 0; i < 4; ++i) *(uint4*)(line + ((half % 2 * 4 + i) ^ (to[k] % 8)) * 16) = out[i];
  }
}
#else
// ---------------------------------------------------------------- the product
struct Arguments {
  const char* weights;          // [EXPERTS, K_TILES, ROW_TILES, TILE_BYTES]
  const char* x;                // [K_TILES, capacity] lines
  const float* pair_weights;    // [capacity], with SWIGLU
  void* out;                    // SWIGLU: [ROW_TILES / 2, capacity] lines, else bf16 [capacity, 64 * ROW_TILES]
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

__device__ __forceinline__ void produce(const Arguments& g, Ring ring, Work* work, const int* before) {
  const int items = before[EXPERTS] * TILE_GROUPS;
  for (int item = blockIdx.x; item < items;) {
    const int taken = atomicAdd(g.counter, 1);  // early: its answer is needed when this item is on its way
    const Work now = find_work(item, before, g.offsets);
    const int tiles = min(TILES, ROW_TILES - now.first_tile), x_bytes = now.width * LINE_BYTES;
    const char* x = g.x + (long long)now.first_row * LINE_BYTES;
    const char* w = g.weights + ((long long)now.expert * K_TILES * ROW_TILES + now.first_tile) * TILE_BYTES;
    for (int c = 0; c < STEPS; ++c) {
      barrier_wait(ring.empty(), ring.parity ^ 1);
      if (c == 0) work[ring.stage] = now;
      barrier_expect(ring.full(), KT * (x_bytes + tiles * TILE_BYTES));
#pragma unroll
      for (int k = 0; k < KT; ++k) {
        copy_bulk(ring.x() + k * NMAX * LINE_BYTES, x, x_bytes, ring.full());
        copy_bulk(ring.w() + k * TILES * TILE_BYTES, w, tiles * TILE_BYTES, ring.full());
        x += (long long)g.capacity * LINE_BYTES, w += ROW_TILES * TILE_BYTES;
      }
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

// A warp's 16 rows x 64 columns: four operands of four registers; see packing.py.
__device__ __forceinline__ void decode(u32 (&a)[16], const Codes& codes) {
  const u32 words[4] = {codes.words.x, codes.words.y, codes.words.z, codes.words.w};
  const u32 mask = 0x81C081C0u, kept = 0x0C180C18u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 u = words[2 * half], v = words[2 * half + 1], rest = (u & kept) | (v << 2 & ~kept);  // rows g, g + 8
    const u32 top = __byte_perm(codes.scales, 0, 0x4040 + 0x0202 * half) << 7;
    const u32 bottom = __byte_perm(codes.scales, 0, 0x4141 + 0x0202 * half) << 7;
    u32* to = a + 8 * half;
    to[0] = times(u & mask, top), to[1] = times(v & mask, bottom);
    to[2] = times(__funnelshift_r(u, u, 6) & mask, top), to[3] = times(__funnelshift_r(v, v, 6) & mask, bottom);
    to[4] = times(u << 6 & mask, top), to[5] = times(v << 6 & mask, bottom);
    to[6] = times(__funnelshift_r(rest, rest, 4) & mask, top), to[7] = times(rest << 2 & mask, bottom);
  }
}

// 64 rows x 64 columns of weights times `width` pairs, FIRST to LAST, whose lines begin at address x. The width is
// chosen in here because the compiler serialises the products of a kernel that has a loop for each width.
template <int FIRST, int LAST>
__device__ __forceinline__ void multiply_tile(float (&sum)[NMAX / 2], const u32 (&a)[16], u32 x, int width) {
  if constexpr (FIRST == LAST) {
    wgmma_fence();
#pragma unroll
    for (u32 q = 0; q < 4; ++q) {
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

// A tile's 32 activations of every pair, times its route weight, rounded by Q8: [pair] lines of float32 in `room`.
// Four neighbouring lanes have one pair; pairs that share a phase of the loads are two apart, against bank conflicts.
__device__ __forceinline__ void store_rounded(const Arguments& g, const Work& work, u32 room, int tile, int part,
                                              int lane) {
  const int u = lane % 4, p = lane / 4 % 4 * 2 + lane / 16;
  for (int pair = part * 8 + p; pair < work.width; pair += 32) {
    const int row = work.first_row + pair;
    const float weight = g.pair_weights[row];
    float v[8];
#pragma unroll
    for (int t = 0; t < 4; ++t) load_floats(v[2 * t], v[2 * t + 1], room + pair * ROOM_STRIDE + t * 32 + u * 8);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= weight, largest = fmaxf(largest, fabsf(v[i]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // The smallest power of two that is at least max(largest, 1e-4) / 448; 448 is 1.75 * 2^8.
    const int exponent = ((__float_as_int(fmaxf(largest, 1e-4f)) + 0x1FFFFF) >> 23) - 135;
    const float down = __int_as_float((127 - exponent) << 23), up = __int_as_float((exponent + 127) << 23);
    u32 words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float2 pair = round_e4m3(v[2 * t] * down, v[2 * t + 1] * down);
      words[t] = to_bf16_pair(fmaf(pair.x, up, 0.0f), fmaf(pair.y, up, 0.0f));  // no negative zeros
    }
    char* line = (char*)g.out + ((long long)(tile / 2) * g.capacity + row) * LINE_BYTES;
    *(uint4*)(line + ((tile % 2 * 4 + u) ^ p) * 16) = {words[0], words[1], words[2], words[3]};  // row % 8 is p
  }
}

// A tile's 64 results of every pair: [pair] lines of bf16 in `room`.
__device__ __forceinline__ void store_rows(const Arguments& g, const Work& work, u32 room, int tile, int thread) {
  for (int i = thread; i < work.width * 8; i += 128) {
    const uint4 piece = load_shared(room + i / 8 * ROOM_STRIDE + i % 8 * 16);
    *(uint4*)((u16*)g.out + (long long)(work.first_row + i / 8) * (64 * ROW_TILES) + tile * 64 + i % 8 * 8) = piece;
  }
}

// A warpgroup's sums of one tile to `room`, from where its threads take them pair by pair.
__device__ __forceinline__ void finish_tile(const Arguments& g, const Work& work, const float (&sum)[NMAX / 2],
                                            u32 room, int group, int tile, int part, int lane) {
#pragma unroll
  for (int i = 0; i < NMAX / 8; ++i) {
    if (i % (BLOCK / 8) == 0 && i * 8 >= work.width) break;
#if SWIGLU
#pragma unroll
    for (int k = 0; k < 2; ++k)
      store_float(room + (i * 8 + lane % 4 * 2 + k) * ROOM_STRIDE + (part * 8 + lane / 4) * 4,
                  activation(sum[4 * i + k], sum[4 * i + 2 + k], g.limit));
#else
    store_matrices(room + (i * 8 + lane % 8) * ROOM_STRIDE + part * 32 + lane / 8 % 2 * 16,
                   to_bf16_pair(sum[4 * i], sum[4 * i + 1]), to_bf16_pair(sum[4 * i + 2], sum[4 * i + 3]));
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
__device__ __forceinline__ void accumulate(float (&sum)[MF][NMAX / 2], Ring& ring, int width, int group, int part,
                                           int lane) {
  const u32 mine = group * MF * TILE_BYTES;
  // Two operand buffers: one is decoded while the tensor cores read the other. Its codes are loaded another step ahead.
  u32 a[2][16];
  Codes codes = load_codes(ring.w() + mine, part, lane);
  for (int c = 0; c < STEPS; ++c) {
    const u32 x = ring.x(), w = ring.w() + mine;
#pragma unroll
    for (int s = 0; s < KT * MF; ++s) {
      decode(a[s % 2], codes);
      multiply_tile<BLOCK, NMAX>(sum[s % MF], a[s % 2], x + s / MF * NMAX * LINE_BYTES, width);
      if (s + 1 < KT * MF) {
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) moe_wgmma(const __grid_constant__ Arguments g) {
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
    if (REGISTER_BOUND) give_registers<PRODUCER_REGISTERS>();
    if (warp == CONSUMER_WARPS) {
      int* before = (int*)(shared + PARTS_OFFSET);
      count_parts(before, g.offsets, lane);
      if (lane == 0) produce(g, ring, work, before);
    }
  } else {
    if (REGISTER_BOUND) take_registers<CONSUMER_REGISTERS>();
    const int group = warp / 4, part = warp % 4;
    while (true) {
      barrier_wait(ring.full(), ring.parity);
      const Work now = work[ring.stage];
      if (now.width == 0) break;
      float sum[MF][NMAX / 2];
#pragma unroll
      for (int f = 0; f < MF; ++f)
#pragma unroll
        for (int i = 0; i < NMAX / 2; ++i) sum[f][i] = 0.0f;
      accumulate(sum, ring, now.width, group, part, lane);
      if (lane == 0) barrier_arrive(ring.empty());
      ring.next();
#pragma unroll
      for (int f = 0; f < MF; ++f)
        finish_tile(g, now, sum[f], ring.base + ROOM_OFFSET + group * ROOM_BYTES, group,
                    now.first_tile + group * MF + f, part, lane);
    }
  }
}
#endif
