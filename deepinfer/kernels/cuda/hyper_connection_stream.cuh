// A tile of 16 rows and 32 columns in one warp: written, read, multiplied by fn. For the kernels that include this file
// behind their Arguments, SERIAL, TILES and STORE_H.
//
// A warp's part of fn lies in shared memory as sums of three bf16: a float32 has 24 bits, so products with it are exact on
// tensor cores. Lane 4 g + q holds 8 neighbouring columns of rows g and g + 8: with columns renamed alike on both sides,
// that is an operand of the tensor cores as it is.

#define FN_WORDS (4 * 3 * 3 * 32)         // of 16 bytes, for 32 columns
#define FN_SHARE (12 * SERIAL / TILES)    // of the 12 pieces of each slice, for one warp to prepare
#define ROW_FLOATS 28                     // of a row of mixes (24 and a mask) or of 26 sums: 16-byte loads meet no bank twice
#define TILE_FLOATS (16 * ROW_FLOATS)
#define MASK 24                           // place of the mask of experts that count

// ---------------------------------------------------------------- fn
__device__ __forceinline__ u32 cut(float& low, float& high) {  // the upper 16 bits of both; the rest stays
  const u32 a = __float_as_uint(low), b = __float_as_uint(high);
  low -= __uint_as_float(a & 0xFFFF0000u), high -= __uint_as_float(b & 0xFFFF0000u);
  return (a >> 16) | (b & 0xFFFF0000u);
}

// One warp's share of the fn of its column: loaded, and later split for the products.
struct FnShare {
  Floats raw[FN_SHARE][2];

  __device__ __forceinline__ void fetch(const Arguments& a, int set, int group, int column) {
#pragma unroll
    for (int i = 0; i < FN_SHARE; ++i) {
      const int piece = set * FN_SHARE + i, slice = piece / 12, s = piece % 12 / 3, n = piece % 3;
      const float* from = a.fn + ((8 * n + group) * 4 + s) * (long long)HIDDEN + column + 32 * slice;
      raw[i][0] = *(const Floats*)from, raw[i][1] = *(const Floats*)(from + 4);
    }
    __syncwarp();  // for the compiler: every load is on its way before any is waited for
  }

  __device__ __forceinline__ void split(Words* mine, int set) {  // `mine` is this lane's place
#pragma unroll
    for (int i = 0; i < FN_SHARE; ++i)
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        Words words;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          Floats& pair = raw[i][p / 2];
          words.of[p] = cut(pair.of[p % 2 * 2], pair.of[p % 2 * 2 + 1]);
        }
        mine[((set * FN_SHARE + i) * 3 + part) * 32] = words;
      }
  }
};

// ---------------------------------------------------------------- mixes
// Of 16 rows, in shared memory: write mix, stream mix, read mix, mask. A warp loads its own.
struct TileMixes {
  Floats parts[3];
  u32 mask;

  __device__ __forceinline__ void fetch(const Arguments& a, int first_row, int lane) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int index = lane + 32 * i, piece = index % 6;
      const long long row = min(first_row + index / 6, a.rows - 1);
      const float* from = a.read_mix + row * a.read_stride;
      if (KIND && piece < 5) from = piece ? a.stream_mix + row * a.mix_stride + 4 * (piece - 1) : a.write_mix + row * a.mix_stride;
      if (AHEAD) load_older(parts[i], from);
      else parts[i] = *(const Floats*)from;
    }
#if KIND == 2
    mask = ~0u;
    if (a.experts) {
      const long long row = min(first_row + lane % 16, a.rows - 1);
      int experts[K];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (AHEAD) load_older(experts[k], a.experts + row * K + k);
        else experts[k] = a.experts[row * K + k];
      }
      mask = 0;
#pragma unroll
      for (int k = 0; k < K; ++k) mask |= (experts[k] >= 0) << k;
    }
#endif
  }

  __device__ __forceinline__ void store(float* stage, int lane) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int index = lane + 32 * i;
      *(Floats*)(stage + index / 6 * ROW_FLOATS + index % 6 * 4) = parts[i];
    }
    if (KIND == 2 && lane < 16) stage[lane * ROW_FLOATS + MASK] = __uint_as_float(mask);
    __syncwarp();
  }
};

// ---------------------------------------------------------------- a tile
// The update's parts at 8 columns of one row, and their sum: float32 values of bf16.
#define UPDATE_PIECES (KIND == 1 ? 1 : KIND == 2 ? K + 1 : KIND == 3 ? 2 * K : 0)  // of 16 bytes
struct Update {
#if KIND == 3
  Floats parts[K][2];
#else
  Words parts[KIND == 2 ? K + 1 : 1];
#endif

  __device__ __forceinline__ void fetch(const Arguments& a, long long row, int column) {
#if KIND == 1
    parts[0] = *(const Words*)((const u16*)a.update + row * HIDDEN + column);
#elif KIND == 2
    parts[0] = *(const Words*)(a.shared + row * HIDDEN + column);
#pragma unroll
    for (int k = 0; k < K; ++k) parts[k + 1] = *(const Words*)((const u16*)a.update + (row * K + k) * HIDDEN + column);
#elif KIND == 3
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        parts[k][i] = *(const Floats*)((const float*)a.update + (k * (long long)a.rows + row) * HIDDEN + column + 4 * i);
#endif
  }

  // Address of a piece.
  static __device__ __forceinline__ const void* piece(const Arguments& a, int i, long long row, int column) {
#if KIND == 1
    return (const u16*)a.update + row * HIDDEN + column;
#elif KIND == 2
    return i ? (const u16*)a.update + (row * K + i - 1) * HIDDEN + column : a.shared + row * HIDDEN + column;
#elif KIND == 3
    return (const float*)a.update + (i / 2 * (long long)a.rows + row) * HIDDEN + column + i % 2 * 4;
#else
    return nullptr;
#endif
  }

  __device__ __forceinline__ void take(u32 from) {  // pieces that lie 512 bytes apart in shared memory
#pragma unroll
    for (int i = 0; i < UPDATE_PIECES; ++i) {
      const uint4 v = load_shared(from + i * 512);
#if KIND == 3
      parts[i / 2][i % 2] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
#else
      parts[i] = {v.x, v.y, v.z, v.w};
#endif
    }
  }

  __device__ __forceinline__ void sum(int pair, u32 mask, float& low, float& high) const {
#if KIND == 1
    low = low_of(parts[0].of[pair]), high = high_of(parts[0].of[pair]);
#elif KIND == 2
    low = low_of(parts[0].of[pair]), high = high_of(parts[0].of[pair]);
#pragma unroll
    for (int k = 1; k <= K; ++k) {  // a select, not a factor: what nobody wrote may hold NaN
      low += mask >> (k - 1) & 1 ? low_of(parts[k].of[pair]) : 0.0f;
      high += mask >> (k - 1) & 1 ? high_of(parts[k].of[pair]) : 0.0f;
    }
#elif KIND == 3
    low = parts[0][pair / 2].of[pair % 2 * 2], high = parts[0][pair / 2].of[pair % 2 * 2 + 1];
#pragma unroll
    for (int k = 1; k < K; ++k)
      low += parts[k][pair / 2].of[pair % 2 * 2], high += parts[k][pair / 2].of[pair % 2 * 2 + 1];
#endif
#if KIND >= 2
    const u32 rounded = to_bf16_pair(low, high);
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
    written[target] = to_bf16_pair(of_low, of_high);
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) streams[s] = written[s];
}

struct Row {
  Words streams[4];
  Update update;
  float of_h, of_trunk;  // sums of squares

  __device__ __forceinline__ void fetch_streams(const Arguments& a, long long row, int column) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const Words* from = (const Words*)(a.trunk + (row * 4 + s) * HIDDEN + column);
      if (AHEAD) load_older(streams[s], from);
      else streams[s] = *from;
    }
  }

  __device__ __forceinline__ void fetch(const Arguments& a, long long row, int column) {
    fetch_streams(a, row, column);
    update.fetch(a, row, column);
  }

  // The same by way of shared memory: lane by lane, each its own pieces of 16 bytes, 512 apart.
  static __device__ __forceinline__ void copy_streams(const Arguments& a, long long row, int column, u32 to) {
#pragma unroll
    for (int s = 0; s < 4; ++s) copy_async(to + s * 512, a.trunk + (row * 4 + s) * HIDDEN + column, 16);
  }
  static __device__ __forceinline__ void copy_update(const Arguments& a, long long row, int column, u32 to) {
#pragma unroll
    for (int i = 0; i < UPDATE_PIECES; ++i) copy_async(to + (4 + i) * 512, Update::piece(a, i, row, column), 16);
  }

  __device__ __forceinline__ void take(u32 from) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint4 v = load_shared(from + s * 512);
      streams[s] = {v.x, v.y, v.z, v.w};
    }
    update.take(from + 4 * 512);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < 4; ++s) streams[s] = Words{};
    of_h = of_trunk = 0.0f;
  }

  // Returns h.
  __device__ __forceinline__ Words write_and_read(const Arguments& a, const float* mixes, int row, int column) {
    const Floats write_mix = *(const Floats*)mixes, read_mix = *(const Floats*)(mixes + 20);
    Floats stream_mix[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) stream_mix[s] = *(const Floats*)(mixes + 4 + 4 * s);
    const u32 mask = KIND == 2 ? __float_as_uint(mixes[MASK]) : 0;
    Words h, feature;
    of_h = of_trunk = 0.0f;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      u32 pair[4];
#pragma unroll
      for (int s = 0; s < 4; ++s) pair[s] = streams[s].of[p];
      if (KIND) {
        float low, high;
        update.sum(p, mask, low, high);
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
      h.of[p] = to_bf16_pair(low, high);
      feature.of[p] = to_bf16_pair(mean_low * 0.25f, mean_high * 0.25f);
      const float x = low_of(h.of[p]), y = high_of(h.of[p]);
      of_h = fmaf(x, x, of_h), of_h = fmaf(y, y, of_h);
    }
    if (row < a.rows) {
      const long long at = (long long)row * HIDDEN + column;
      if (KIND)
#pragma unroll
        for (int s = 0; s < 4; ++s) *(Words*)(a.new_trunk + ((long long)row * 4 + s) * HIDDEN + column) = streams[s];
      if (STORE_H) *(Words*)(a.h + at) = h;
      if (FEATURE) *(Words*)(a.feature + at) = feature;
    }
    return h;
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

// What a slice, or some slices together, add to the sums of 16 rows: in lane 4 g + q those of rows g and g + 8.
struct Sums {
  float products[3][4], of_h[2], of_trunk[2];

  __device__ __forceinline__ void add_to(const Sums& left) {
#pragma unroll
    for (int n = 0; n < 3; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) products[n][i] = left.products[n][i] + products[n][i];
#pragma unroll
    for (int i = 0; i < 2; ++i) of_h[i] = left.of_h[i] + of_h[i], of_trunk[i] = left.of_trunk[i] + of_trunk[i];
  }

  // Of row 8 i + group: the products at `to`, the squares at their own places.
  __device__ __forceinline__ void store(int i, int quad, float* to, float* square_of_h, float* square_of_trunk) const {
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const Pair pair = {products[n][2 * i], products[n][2 * i + 1]};
      *(Pair*)(to + 8 * n + 2 * quad) = pair;
    }
    if (quad == 0) *square_of_h = of_h[i], *square_of_trunk = of_trunk[i];
  }
};
