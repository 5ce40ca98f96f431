// Sparse attention of few rows, from the raw query to the rounded output: what attention.cu computes, cut for latency.
//
// One row has 0.2 MB of keys: the time goes into waiting, for memory and for code, since every step pushes both out of
// the L2. So the work of a row is spread over many CTAs, and the code is short.
//
// A cluster of `splits` CTAs has 16 heads of a row; each CTA a range of its keys, in tiles of 8, TILES at a time. Warp w
// has channels [64 w, 64 w + 64) of all of them. Lane 4 g + q loads, of key g of each tile and of heads g and g + 8, the
// channels [64 w + 16 q, + 16): with channels renamed alike on both sides these are operands of the tensor cores as they
// are, and a transposition in registers makes them the operands of the second product. So keys never pass through shared
// memory; logits do, to be summed over the warps. Maxima and totals meet first, while the second product runs; then each
// CTA scales its sums and sends 512 / splits channels to each CTA of the cluster, which adds them in the order of splits.
//
// Where a key is missing another record is read in its place: any bytes make finite keys (neither format's NaN survives
// the way they are widened), and their weights are zero.
//
// Keys are kept times 2^-16, so that no scale leaves bf16's range; see attention.cu.
//
// Compile-time constants: H (heads), ROPE (channels that turn, a multiple of 16), FP4 (entries are Fp4Record, else
// Fp8Record), SPLIT_WEIGHTS (weights in two bf16 parts).

#include "types.cuh"

#define D 512
#define THREADS 256
#define WARPS 8
#define TILES 5
#define GROUP_HEADS 16                 // of a CTA
#define HEAD_GROUPS ((H + GROUP_HEADS - 1) / GROUP_HEADS)
#define MAX_SPLITS 16
#define FP8_RECORD (D + D / 32)
#define FP4_RECORD (D / 2 + D / 16)
#define ENTRY_RECORD (FP4 ? FP4_RECORD : FP8_RECORD)
#define KEY_SHIFT 16
#define WEIGHT_PARTS (1 + SPLIT_WEIGHTS)
#define LOGIT_STRIDE (GROUP_HEADS * 48 + 8)  // floats of one warp's logits
#define WEIGHT_STRIDE 112              // bytes of one head's 48 weights: loads of matrices meet no bank twice

static_assert(ROPE % 16 == 0 && ROPE <= D / 2, "shape");

struct __align__(16) Shared {
  union {
    float logits[WARPS * LOGIT_STRIDE];
    float4 sums[GROUP_HEADS * D / 4];  // [splits][8: vector, half][8: head % 8][32 / splits: 16 channels]
  };
  u8 weights[WEIGHT_PARTS][GROUP_HEADS * WEIGHT_STRIDE];
  float2 stats[MAX_SPLITS][GROUP_HEADS];  // largest and total
  float shrink[GROUP_HEADS];           // factor of the sums before these keys' weights are added
  float angles[ROPE];                  // cosines, then sines
  u64 stats_full, sums_full;
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
  int log_splits;                      // 2 to 4
};

// ---------------------------------------------------------------- instructions
#include "barriers.cuh"
#include "clusters.cuh"
#include "launch.cuh"
#include "matrices.cuh"
#include "numbers.cuh"

__device__ __forceinline__ void cluster_arrive() {  // after it others may send to this CTA's barriers
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// To another CTA's memory and, in bytes, its barrier.
__device__ __forceinline__ void send(u32 to, u32 barrier, float a, float b, float c, float d) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
               :: "r"(to), "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void send(u32 to, u32 barrier, float a, float b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];"
               :: "r"(to), "r"(barrier), "f"(a), "f"(b) : "memory");
}

// Loads of what other kernels write, past the L1: nothing is read twice.
__device__ __forceinline__ u32 load_byte(const u8* p) {
  u32 v;
  asm volatile("ld.global.cg.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ int load_int(const void* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_pair(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_four(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_global(u16* p, u32 a, u32 b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// ---------------------------------------------------------------- number formats

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// 16 channels of a key: e4m3 codes or, in `low`, e2m1 codes, and the byte of their scale.
struct Codes {
  uint2 low, high;
  u32 scale;
};

// As bf16 pairs.
__device__ __forceinline__ void expand(u32 (&pairs)[8], const Codes& codes, bool fp4) {
  const uint2 &low = codes.low, &high = codes.high;
  u32 words[4] = {low.x, low.y, high.x, high.y};
  u32 factor = min(codes.scale + 120 - KEY_SHIFT, 254u) * 0x00800080u;
  if (FP4 && fp4) {  // one code to the upper half of each byte
    words[0] = permute(low.x << 4, low.x, 0x5140), words[1] = permute(low.x << 4, low.x, 0x7362);
    words[2] = permute(low.y << 4, low.y, 0x5140), words[3] = permute(low.y << 4, low.y, 0x7362);
    factor = times(times(codes.scale * 0x00100010u & 0x07F007F0u, 0x79007900u), 0x79007900u);  // twice 2^115
  }
  const u32 shift = FP4 && fp4 ? 6 : 4, mask = FP4 && fp4 ? 0x01C001C0u : 0x07F007F0u;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const u32 x = permute(words[j / 2], words[j / 2], j % 2 ? 0x3322 : 0x1100);
    pairs[j] = times((x & 0x80008000u) | (x >> shift & mask), factor);
  }
}

__device__ __forceinline__ u32 turn(u32 pair, float cosine, float sine) {
  const float x = low_bf16(pair), y = high_bf16(pair);
  return to_bf16_pair(fmaf(x, cosine, -(y * sine)), fmaf(x, sine, y * cosine));
}

// Two values of a Q8 group as bf16: rounded to e4m3 after division by 2^exponent.
__device__ __forceinline__ u32 round_q8(u32 pair, float inverse, float scale) {
  const float2 v = round_e4m3(low_bf16(pair) * inverse, high_bf16(pair) * inverse);
  return to_bf16_pair(v.x * scale, v.y * scale);
}

// ---------------------------------------------------------------- keys and queries

// Heads `head` and `head` + 8, 16 channels each, as four operands; turned if need be.
__device__ __forceinline__ void fetch_query(u32 (&query)[4][4], const Arguments& a, int row, int head, int channel) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // channels [8 (i / 2), + 8) of head + 8 (i % 2); heads past the last are not written
    const int h = min(head + 8 * (i % 2), H - 1);
    const uint4 x = load_four(a.query + (long long)row * a.query_stride + h * D + channel + 8 * (i / 2));
    query[i / 2 * 2][i % 2] = x.x, query[i / 2 * 2][2 + i % 2] = x.y;
    query[i / 2 * 2 + 1][i % 2] = x.z, query[i / 2 * 2 + 1][2 + i % 2] = x.w;
  }
  if (channel < D - ROPE) return;
  const long long at = (long long)row * (ROPE / 2) + (channel - (D - ROPE)) / 2;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint2 c = load_pair(a.cosines + at + 2 * k), s = load_pair(a.sines + at + 2 * k);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      query[k][i] = turn(query[k][i], __uint_as_float(i < 2 ? c.x : c.y), __uint_as_float(i < 2 ? s.x : s.y));
  }
}

// Where this lane's part of the keys is found: key `lane` / 4 of every tile.
struct Keys {
  const int *window_index, *entry_slots;  // of key 0 in tile 0
  const u8 *step_records, *ring, *entries;
  int window_tiles;                    // tiles before it hold window keys
  int window_end, entry_end;           // number of the first key past the end, of 8 times tile + lane / 4

  __device__ __forceinline__ Keys(const Arguments& a, int row, int window_tiles, int end)
      : step_records(a.step_records), ring(a.ring), entries(a.entries), window_tiles(window_tiles) {
    window_index = a.window_index + (long long)row * a.width;
    entry_slots = a.entry_slots + (long long)row * a.num_selected - 8 * window_tiles;
    window_end = min(a.width, 8 * end), entry_end = min(8 * window_tiles + a.num_selected, 8 * end);
  }

  // 16 channels of TILES keys from `tile` on; `seen`: by tile, lanes whose key exists.
  __device__ __forceinline__ void fetch(Codes (&codes)[TILES], u32 (&seen)[TILES], int tile) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, first = 8 * tile + lane / 4;
    int index[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const bool window = tile + t < window_tiles;
      index[t] = -1;
      if (first + 8 * t < (window ? window_end : entry_end)) index[t] = load_int((window ? window_index : entry_slots) + first + 8 * t);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const bool window = tile + t < window_tiles, old = window && index[t] < 0, fp4 = FP4 && !window;
      const int number = old ? -2 - index[t] : index[t];
      const bool exists = number >= 0;
      const u8* from = !exists || (window && !old) ? step_records : window ? ring : entries;
      from += (exists ? number : 0) * (unsigned long long)(fp4 && exists ? FP4_RECORD : FP8_RECORD);
      seen[t] = __ballot_sync(~0u, exists);
      const u8* mine = from + (16 * quad + 64 * warp >> fp4);
      codes[t].low = load_pair(mine), codes[t].high = load_pair(mine + 8);
      codes[t].scale = load_byte(from + (fp4 ? D / 2 + 4 * warp + quad : D + 2 * warp + quad / 2));
    }
  }
};

// ---------------------------------------------------------------- logits and weights

// Where a head's logits start among a warp's: neither stores of operands nor loads of two heads meet a bank twice.
__device__ __forceinline__ int logit_place(int head) { return head * 48 + (head >> 1 & 1) * 8; }

// This warp's channels' share of the logits. Leaves the keys as operands of the second product.
__device__ __forceinline__ void multiply_keys(Shared& shared, u32 (&keys)[TILES][8], const u32 (&query)[4][4],
                                              const Codes (&codes)[TILES], int num_fp8) {
  const int lane = threadIdx.x % 32, head = lane / 4, quad = lane % 4;
  float* mine = shared.logits + threadIdx.x / 32 * LOGIT_STRIDE + 2 * quad;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    expand(keys[t], codes[t], t >= num_fp8);
    float logits[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(logits, query[k], keys[t][2 * k], keys[t][2 * k + 1]);
#pragma unroll
    for (int j = 0; j < 8; ++j) keys[t][j] = transpose(keys[t][j]);
    *(float2*)(mine + logit_place(head) + 8 * t) = {logits[0], logits[1]};
    *(float2*)(mine + logit_place(head + 8) + 8 * t) = {logits[2], logits[3]};
  }
}

// Sixteen lanes have a head; `largest` is the same in all, `total` counts a lane's keys only.
__device__ __forceinline__ void softmax(Shared& shared, const u32 (&seen)[TILES], float& largest, float& total) {
  const int lane = threadIdx.x % 32, head = threadIdx.x / 16, key = lane % 16;
  const float scale = 0.044194173824159216f * 1.4426950408889634f * (1 << KEY_SHIFT);  // 512^-0.5, to units of log 2
  float logits[3];
  float top = largest;
#pragma unroll
  for (int j = 0; j < 3; ++j) {  // key 16 j + key of 48, the last 8 of which don't exist
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += shared.logits[w * LOGIT_STRIDE + logit_place(head) + 16 * j + key];
    const u32 lanes = key < 8 ? seen[2 * j] : 2 * j + 1 < TILES ? seen[2 * j + 1 < TILES ? 2 * j + 1 : 0] : 0;
    logits[j] = lanes >> 4 * (key % 8) & 1 ? sum * scale : __int_as_float(0xFF800000);
    top = fmaxf(top, logits[j]);
  }
#pragma unroll
  for (int step = 8; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float shrink = exp2_fast(largest - top);
  if (key == 0) shared.shrink[head] = shrink;
  largest = top, total *= shrink;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    const float weight = exp2_fast(logits[j] - top);
    const u32 rounded = to_bf16_pair(weight, 0.0f);
    const int at = head * WEIGHT_STRIDE + 2 * (16 * j + key);
    *(u16*)(shared.weights[0] + at) = (u16)rounded;
    if (SPLIT_WEIGHTS) *(u16*)(shared.weights[WEIGHT_PARTS - 1] + at) = (u16)to_bf16_pair(weight - low_bf16(rounded), 0.0f);
    total += SPLIT_WEIGHTS ? weight : low_bf16(rounded);  // what the values are multiplied by
  }
}

// sums[j]: channels 2 j, + 1 of the lane's 16, of heads g and g + 8.
__device__ __forceinline__ void multiply_values(float (&sums)[8][4], const Shared& shared, const u32 (&values)[TILES][8]) {
  const int lane = threadIdx.x % 32;
  const float upper = shared.shrink[lane / 4], lower = shared.shrink[lane / 4 + 8];
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j][0] *= upper, sums[j][1] *= upper, sums[j][2] *= lower, sums[j][3] *= lower;
#pragma unroll 1
  for (int part = 0; part < WEIGHT_PARTS; ++part) {
    const u32 from = shared_address(shared.weights[part]) + lane % 16 * WEIGHT_STRIDE + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      u32 weights[4];
      load_matrices(weights, from + 32 * k);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        multiply(sums[j], weights, values[2 * k][j], 2 * k + 1 < TILES ? values[2 * k + 1 < TILES ? 2 * k + 1 : 0][j] : 0);
    }
  }
}

// ---------------------------------------------------------------- the cluster

__device__ __forceinline__ float sum_over_head(float x) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// What this CTA's sums of heads `head` and `head` + 8 are to be multiplied by: 2^16 times its share of the total. Four
// lanes share the work.
__device__ __forceinline__ void find_factors(float (&factors)[2], const Shared& shared, int splits, int split, int head) {
  const int quad = threadIdx.x % 4;
  float largest[2] = {shared.stats[split][head].x, shared.stats[split][head + 8].x}, total[2] = {};
  const float mine[2] = {largest[0], largest[1]};
#pragma unroll 1
  for (int s = quad; s < splits; s += 4)
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = fmaxf(largest[h], shared.stats[s][head + 8 * h].x);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
  }
#pragma unroll 1
  for (int s = quad; s < splits; s += 4)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 stat = shared.stats[s][head + 8 * h];
      total[h] += exp2_fast(stat.x - largest[h]) * stat.y;
    }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(~0u, total[h], 1);
    total[h] += __shfl_xor_sync(~0u, total[h], 2);
    factors[h] = exp2_fast(mine[h] - largest[h]) * __fdividef((float)(1 << KEY_SHIFT), total[h]);
  }
}

// Scaled sums to the CTAs that finish their channels.
__device__ __forceinline__ void send_sums(Shared& shared, const float (&sums)[8][4], int log_splits, int split) {
  const int lane = threadIdx.x % 32, head = lane / 4, block = threadIdx.x / 32 * 4 + lane % 4, log_blocks = 5 - log_splits;
  float factors[2];
  find_factors(factors, shared, 1 << log_splits, split, head);
  const float4* local = shared.sums + ((split * 64 + head) << log_blocks) + (block & (1 << log_blocks) - 1);
  u32 to = remote_address(shared_address(local), block >> log_blocks);
  const u32 barrier = remote_address(shared_address(&shared.sums_full), block >> log_blocks);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h, to += 128 << log_blocks)
      send(to, barrier, sums[2 * i][2 * h] * factors[h], sums[2 * i][2 * h + 1] * factors[h],
                   sums[2 * i + 1][2 * h] * factors[h], sums[2 * i + 1][2 * h + 1] * factors[h]);
}

// Add the splits' sums of this CTA's channels, turn them back, round and write them. A thread has four channels of one
// head at a time; eight lanes (bits 0, 3 and 4) have a group of 32.
__device__ __forceinline__ void finish(const Arguments& a, const Shared& shared, int log_splits, int split, int row, int first_head) {
  const int lane = threadIdx.x % 32, log_blocks = 5 - log_splits, vector = lane / 8;
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < 64 >> log_splits; item += WARPS) {
    const int head = item % 2 * 4 + lane / 2 % 4, half = item / 2 % 2, block = item / 4 * 2 + lane % 2;
    const float4* from = shared.sums + (((2 * vector + half) * 8 + head) << log_blocks) + block;
    float4 v = {0, 0, 0, 0};
#pragma unroll 1
    for (int s = 0; s >> log_splits == 0; s += 4)
#pragma unroll
      for (int i = 0; i < 4; ++i, from += 64 << log_blocks) {
        const float4 x = *from;
        v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
      }
    u32 low = to_bf16_pair(v.x, v.y), high = to_bf16_pair(v.z, v.w);
    const int channel = ((split << log_blocks) + block) * 16 + 4 * vector, turning = channel - (D - ROPE);
    if (turning >= 0) {
      const float2 c = *(const float2*)(shared.angles + turning / 2);
      const float2 s = *(const float2*)(shared.angles + ROPE / 2 + turning / 2);
      low = turn(low, c.x, -s.x), high = turn(high, c.y, -s.y);
    }
    if (a.quantize) {
      float largest = fmaxf(fmaxf(fabsf(low_bf16(low)), fabsf(high_bf16(low))), fmaxf(fabsf(low_bf16(high)), fabsf(high_bf16(high))));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
      largest = fmaxf(1e-4f, fmaxf(largest, __shfl_xor_sync(~0u, largest, 16)));
      const u32 exponent = ((__float_as_uint(largest) + 0x1FFFFFu) >> 23) - 8;  // see attention.cu
      const float scale = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
      low = round_q8(low, inverse, scale), high = round_q8(high, inverse, scale);
    }
    const int h = first_head + 8 * half + head;
    if (h < H) store_global(a.out + ((long long)row * H + h) * D + channel, low, high);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) sparse_attention_few(const Arguments a) {
  __shared__ Shared shared;
  const int split = blockIdx.x & (1 << a.log_splits) - 1, item = blockIdx.x >> a.log_splits;
  const int row = item / HEAD_GROUPS, first_head = item % HEAD_GROUPS * GROUP_HEADS;
  const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * 64 + lane % 4 * 16;
  const int window_tiles = (a.width + 7) / 8, all = window_tiles + (a.num_selected + 7) / 8;
  const int begin = all * split >> a.log_splits, end = all * (split + 1) >> a.log_splits;
  const int my_head = threadIdx.x / 16;  // of the softmax
  const float sink = a.sink[min(first_head + my_head, H - 1)] * 1.4426950408889634f;
  if (threadIdx.x == 0) barrier_init(&shared.stats_full, 1), barrier_init(&shared.sums_full, 1);
  cluster_arrive();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  u32 query[4][4];
  fetch_query(query, a, row, first_head + lane / 4, channel);
  if (threadIdx.x < ROPE) {
    const float* from = threadIdx.x < ROPE / 2 ? a.cosines : a.sines;
    shared.angles[threadIdx.x] = __int_as_float(load_int(from + (long long)row * (ROPE / 2) + threadIdx.x % (ROPE / 2)));
  }
  if (threadIdx.x == 0) {
    barrier_expect(&shared.stats_full, (GROUP_HEADS * 8) << a.log_splits);
    barrier_expect(&shared.sums_full, GROUP_HEADS * D * 4);
  }
  const Keys source(a, row, window_tiles, end);
  float sums[8][4] = {};
  float largest = sink, total = split == 0 && lane % 16 == 0 ? 1.0f : 0.0f;
  int tile = begin;
  do {  // once at least: the barriers in it order the angles, too
    u32 keys[TILES][8], seen[TILES];
    Codes codes[TILES];
    source.fetch(codes, seen, tile);
    multiply_keys(shared, keys, query, codes, window_tiles - tile);
    __syncthreads();
    softmax(shared, seen, largest, total);
    __syncthreads();
    multiply_values(sums, shared, keys);
  } while ((tile += TILES) < end);
  total = sum_over_head(total);
  cluster_wait();
  if (lane % 16 >> a.log_splits == 0)
    send(remote_address(shared_address(&shared.stats[split][my_head]), lane % 16),
         remote_address(shared_address(&shared.stats_full), lane % 16), largest, total);
  // Whoever has the stats of all warps of the cluster knows that all are done with the logits, whose place the sums
  // take.
  barrier_wait_forever(&shared.stats_full, 0);
  send_sums(shared, sums, a.log_splits, split);
  barrier_wait_forever(&shared.sums_full, 0);
  finish(a, shared, a.log_splits, split, row, first_head);
}
