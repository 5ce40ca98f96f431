// Between two sublayers: new streams from the trunk and the last sublayer's output, the next input h read from them, and
// partial sums of the next mixes (fn times the new streams) and of the squares of h and of the streams.
//
// A warp has 32 columns of all 4 streams and 16 rows at a time. Its part of fn lies in shared memory as sums of three
// bf16: a float32 has 24 bits, so products with it are exact on tensor cores. Lane 4 g + q holds 8 neighbouring columns
// of rows g and g + 8: with columns renamed alike on both sides, that is an operand of the tensor cores as it is.
//
// Sums over columns: a warp's 32, then 8 warps pairwise (here those of one block, the rest in the second kernel), then
// groups of 256 columns. So a row's bits depend neither on the shape of the blocks nor on other rows.
//
// Compile-time constants: HIDDEN (a multiple of 256), KIND and K of the update (see hyper_connection/stages.py), WARPS
// (side by side, 1, 2, 4 or 8), HALVES (sets of warps that share fn and take turns at the row tiles), FEATURE.

typedef unsigned int u32;
typedef unsigned short u16;

#ifndef THREADS
#define THREADS (32 * WARPS * HALVES)
#endif
#define SLICES (HIDDEN / (32 * WARPS))
#define FN_WORDS (4 * 3 * 3 * 32)  // of 16 bytes, for a warp's columns
#define SUM_STRIDE 28              // floats of a row of 26 sums

static_assert(HIDDEN % 256 == 0, "groups of 256 columns");

struct __align__(16) Words { u32 of[4]; };     // 8 bf16
struct __align__(16) Floats { float of[4]; };
struct __align__(8) Pair { float of[2]; };

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

// ---------------------------------------------------------------- instructions
__device__ __forceinline__ u32 pack(float low, float high) {  // to two bf16
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void meet_half(int half) {
  if (half == 0) asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
  else asm volatile("bar.sync 2, %0;" ::"n"(32 * WARPS) : "memory");
}
__device__ __forceinline__ void wait_for_earlier_kernels() {  // and let the next one start
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

// ---------------------------------------------------------------- fn
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ u32 cut(float& low, float& high) {  // the upper 16 bits of both; the rest stays
  const u32 a = __float_as_uint(low), b = __float_as_uint(high);
  low -= __uint_as_float(a & 0xFFFF0000u), high -= __uint_as_float(b & 0xFFFF0000u);
  return (a >> 16) | (b & 0xFFFF0000u);
}

// This half's share of the streams, split for the products; `mine` is this lane's place.
__device__ __forceinline__ void prepare_fn(const Arguments& a, Words* mine, int half, int group, int column) {
  const int count = 4 / HALVES;
  Floats raw[count][3][2];
#pragma unroll
  for (int s = 0; s < count; ++s)
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const float* from = a.fn + ((8 * n + group) * 4 + half * count + s) * (long long)HIDDEN + column;
      raw[s][n][0] = *(const Floats*)from, raw[s][n][1] = *(const Floats*)(from + 4);
    }
  __syncwarp();  // for the compiler: every load is on its way before any is waited for
#pragma unroll
  for (int s = 0; s < count; ++s)
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        Words words;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          Floats& pair = raw[s][n][p / 2];
          words.of[p] = cut(pair.of[p % 2 * 2], pair.of[p % 2 * 2 + 1]);
        }
        mine[(((half * count + s) * 3 + n) * 3 + part) * 32] = words;
      }
}

// ---------------------------------------------------------------- a tile
// The update's parts at 8 columns of one row, and their sum: float32 values of bf16.
struct Update {
#if KIND == 3
  Floats parts[K][2];
#else
  Words parts[KIND == 2 ? K + 1 : 1];
  bool counts[KIND == 2 ? K + 1 : 1];
#endif

  __device__ __forceinline__ void fetch(const Arguments& a, long long row, int column) {
#if KIND == 1
    parts[0] = *(const Words*)((const u16*)a.update + row * HIDDEN + column);
#elif KIND == 2
    parts[0] = *(const Words*)(a.shared + row * HIDDEN + column);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      counts[k + 1] = !a.experts || a.experts[row * K + k] >= 0;
      parts[k + 1] = *(const Words*)((const u16*)a.update + (row * K + k) * HIDDEN + column);
    }
#elif KIND == 3
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        parts[k][i] = *(const Floats*)((const float*)a.update + (k * (long long)a.rows + row) * HIDDEN + column + 4 * i);
#endif
  }

  __device__ __forceinline__ void sum(int pair, float& low, float& high) const {
#if KIND == 1
    low = low_of(parts[0].of[pair]), high = high_of(parts[0].of[pair]);
#elif KIND == 2
    low = low_of(parts[0].of[pair]), high = high_of(parts[0].of[pair]);
#pragma unroll
    for (int k = 1; k <= K; ++k) {  // a select, not a factor: what nobody wrote may hold NaN
      low += counts[k] ? low_of(parts[k].of[pair]) : 0.0f;
      high += counts[k] ? high_of(parts[k].of[pair]) : 0.0f;
    }
#elif KIND == 3
    low = parts[0][pair / 2].of[pair % 2 * 2], high = parts[0][pair / 2].of[pair % 2 * 2 + 1];
#pragma unroll
    for (int k = 1; k < K; ++k)
      low += parts[k][pair / 2].of[pair % 2 * 2], high += parts[k][pair / 2].of[pair % 2 * 2 + 1];
#endif
#if KIND >= 2
    const u32 rounded = pack(low, high);
    low = low_of(rounded), high = high_of(rounded);
#endif
  }
};

// Two neighbouring columns of one row: the streams become the new ones.
__device__ __forceinline__ void write(u32 (&streams)[4], float low, float high, const Floats& write_mix,
                                      const Floats (&stream_mix)[4]) {
  u32 written[4];
#pragma unroll
  for (int target = 0; target < 4; ++target) {
    float of_low = write_mix.of[target] * low, of_high = write_mix.of[target] * high;
#pragma unroll
    for (int source = 0; source < 4; ++source) {
      of_low = fmaf(stream_mix[source].of[target], low_of(streams[source]), of_low);
      of_high = fmaf(stream_mix[source].of[target], high_of(streams[source]), of_high);
    }
    written[target] = pack(of_low, of_high);
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) streams[s] = written[s];
}

struct Row {
  Words streams[4];
  Update update;
  Floats read_mix, write_mix, stream_mix[4];
  float of_h, of_trunk;  // sums of squares

  __device__ __forceinline__ void fetch(const Arguments& a, long long row, int column) {
#pragma unroll
    for (int s = 0; s < 4; ++s) streams[s] = *(const Words*)(a.trunk + (row * 4 + s) * HIDDEN + column);
    update.fetch(a, row, column);
  }

  __device__ __forceinline__ void fetch_mixes(const Arguments& a, long long row) {
    read_mix = *(const Floats*)(a.read_mix + row * a.read_stride);
    if (KIND) {
      write_mix = *(const Floats*)(a.write_mix + row * a.mix_stride);
#pragma unroll
      for (int s = 0; s < 4; ++s) stream_mix[s] = *(const Floats*)(a.stream_mix + row * a.mix_stride + 4 * s);
    }
  }

  __device__ __forceinline__ void write_and_read(const Arguments& a, int row, int column) {
    Words h, feature;
    of_h = of_trunk = 0.0f;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      u32 pair[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) pair[s] = streams[s].of[p];
      if (KIND) {
        float low, high;
        update.sum(p, low, high);
        write(pair, low, high, write_mix, stream_mix);
      }
      float low = read_mix.of[0] * low_of(pair[0]), high = read_mix.of[0] * high_of(pair[0]);
      float mean_low = low_of(pair[0]), mean_high = high_of(pair[0]);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const float x = low_of(pair[s]), y = high_of(pair[s]);
        of_trunk = fmaf(x, x, of_trunk), of_trunk = fmaf(y, y, of_trunk);
        if (s) low = fmaf(read_mix.of[s], x, low), high = fmaf(read_mix.of[s], y, high), mean_low += x, mean_high += y;
        streams[s].of[p] = pair[s];
      }
      h.of[p] = pack(low, high);
      feature.of[p] = pack(mean_low * 0.25f, mean_high * 0.25f);
      const float x = low_of(h.of[p]), y = high_of(h.of[p]);
      of_h = fmaf(x, x, of_h), of_h = fmaf(y, y, of_h);
    }
    if (row < a.rows) {
      const long long at = (long long)row * HIDDEN + column;
      if (KIND)
#pragma unroll
        for (int s = 0; s < 4; ++s) *(Words*)(a.new_trunk + ((long long)row * 4 + s) * HIDDEN + column) = streams[s];
      *(Words*)(a.h + at) = h;
      if (FEATURE) *(Words*)(a.feature + at) = feature;
    }
  }
};

__device__ __forceinline__ float over_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// sums[n]: columns 8 n + 2 q, + 1 of rows g and g + 8.
__device__ __forceinline__ void products(float (&sums)[3][4], const Row (&rows)[2], const Words* mine) {
  float part_sums[3][3][4] = {};  // apart, because a product waits for the one before it in the same sum
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const Words &top = rows[0].streams[s], &bottom = rows[1].streams[s];
    const u32 left[4] = {top.of[0], bottom.of[0], top.of[1], bottom.of[1]};
    const u32 right[4] = {top.of[2], bottom.of[2], top.of[3], bottom.of[3]};
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        const Words b = mine[((s * 3 + n) * 3 + part) * 32];
        multiply(part_sums[part][n], left, b.of[0], b.of[1]);
        multiply(part_sums[part][n], right, b.of[2], b.of[3]);
      }
  }
#pragma unroll
  for (int n = 0; n < 3; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = (part_sums[2][n][i] + part_sums[1][n][i]) + part_sums[0][n][i];
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hc_write_read(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, half = threadIdx.x / (32 * WARPS);
  const int group = lane / 4, quad = lane % 4, column = (blockIdx.x * WARPS + warp) * 32 + 8 * quad;
  Words* mine = (Words*)shared + warp * FN_WORDS + lane;
  // [2][WARPS][16][SUM_STRIDE], in turns
  float* half_sums = (float*)((Words*)shared + WARPS * FN_WORDS) + half * (2 * WARPS * 16 * SUM_STRIDE);

  prepare_fn(a, mine, half, group, column);  // does not depend on earlier kernels
  wait_for_earlier_kernels();
  if (HALVES > 1) __syncthreads();
  int turn = 0;
  for (int tile = blockIdx.y * HALVES + half; tile * 16 < a.rows; tile += a.row_groups * HALVES, turn ^= 1) {
    Row rows[2];
    // A row that does not exist may hold anything: it meets no other.
    const int safe[2] = {min(tile * 16 + group, a.rows - 1), min(tile * 16 + 8 + group, a.rows - 1)};
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i].fetch(a, safe[i], column);
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i].fetch_mixes(a, safe[i]);
    __syncwarp();  // as above
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i].write_and_read(a, tile * 16 + 8 * i + group, column);
    float sums[3][4];
    products(sums, rows, mine);
    float* own = half_sums + (turn * WARPS + warp) * (16 * SUM_STRIDE);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_h = over_quad(rows[i].of_h), of_trunk = over_quad(rows[i].of_trunk);
      const int r = 8 * i + group, row = tile * 16 + r;
      float* record = a.partial + (long long)row * a.record_stride;
      float* to = WARPS > 1 ? own + r * SUM_STRIDE : record + blockIdx.x * 32;
      if (WARPS == 1 && row >= a.rows) continue;
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        const Pair pair = {sums[n][2 * i], sums[n][2 * i + 1]};
        *(Pair*)(to + 8 * n + 2 * quad) = pair;
      }
      if (quad == 0) {
        *(WARPS > 1 ? to + 24 : record + SLICES * 32 + blockIdx.x) = of_h;
        *(WARPS > 1 ? to + 25 : record + SLICES * 33 + blockIdx.x) = of_trunk;
      }
    }
    if (WARPS == 1) continue;
    meet_half(half);
    const float* all = half_sums + turn * WARPS * (16 * SUM_STRIDE);
    for (int i = threadIdx.x % (32 * WARPS); i < 16 * 26; i += 32 * WARPS) {
      const int r = i / 26, sum = i % 26, row = tile * 16 + r;
      float parts[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) parts[w] = all[w * (16 * SUM_STRIDE) + r * SUM_STRIDE + sum];
#pragma unroll
      for (int step = 1; step < WARPS; step *= 2)
#pragma unroll
        for (int w = 0; w < WARPS; w += 2 * step) parts[w] += parts[w + step];
      if (row < a.rows)
        a.partial[(long long)row * a.record_stride +
                  (sum < 24 ? (int)blockIdx.x * 32 + sum : (8 + sum) * SLICES + (int)blockIdx.x)] = parts[0];
    }
  }
}
