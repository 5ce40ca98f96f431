// The output of sparse attention as a product in FP8 takes it: e4m3 codes with one power of two for each row and group of
// GROUP_HEADS heads. attention.cu includes it.
//
// They are the codes of the values that finish_heads writes: rounded by Q8 in groups of 32 channels, then brought to one
// scale. A warp has 16 heads and half of their channels, so two warps meet in between to find the largest of each group.
// Until then codes and scale of eight channels wait where the channels were: 16 bytes, that only one lane reads and writes.

static_assert(SPLITS == 1 && H % GROUP_HEADS == 0, "a group has its heads in one CTA");
static_assert(GROUP_HEADS == 4 || GROUP_HEADS == 8 || GROUP_HEADS == 16, "a warp has whole groups, in steps of four heads");

#define WARP_GROUPS (16 / GROUP_HEADS)

// Exponent field of a Q8 scale, as in `quantize`, from the largest value, at least 1e-4.
__device__ __forceinline__ u32 exponent_for(float largest) { return ((__float_as_uint(largest) + 0x1FFFFFu) >> 23) - 8; }

// Eight channels as two words of codes and their scale; the four lanes that hold a Q8 group call it together. `largest`
// becomes that of the rounded values, if it was smaller: rounding keeps the order. A group that is not finite becomes NaN, and
// so does its row's product.
__device__ __forceinline__ uint4 codes_of_group(const uint4& x, float& largest) {
  float own = 1e-4f;
#pragma unroll
  for (int i = 0; i < 4; ++i) own = fmaxf(own, fmaxf(fabsf(low_bf16(word_of(x, i))), fabsf(high_bf16(word_of(x, i)))));
  own = fmaxf(own, __shfl_xor_sync(~0u, own, 1));
  own = fmaxf(own, __shfl_xor_sync(~0u, own, 2));
  const u32 exponent = exponent_for(own);
  const float scale = __uint_as_float(exponent << 23);
  const float inverse = __uint_as_float(own <= 3.3895314e38f ? (254 - exponent) << 23 : 0x7FC00000u);
  largest = fmaxf(largest, round_e4m3(own * inverse, 0.0f).x * scale);
  u32 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) codes[i] = to_e4m3_pair(low_bf16(word_of(x, i)) * inverse, high_bf16(word_of(x, i)) * inverse);
  return {permute(codes[0], codes[1], 0x5410), permute(codes[2], codes[3], 0x5410), __float_as_uint(scale), 0};
}

// Two warps, one of each consumer, rotate 16 staged heads back, round and write them. a.out: u8 [H / GROUP_HEADS, rows,
// GROUP_HEADS * D], a.scales: [H / GROUP_HEADS, rows rounded up to 4].
__device__ __forceinline__ void finish_codes(const Arguments& a, Small& small, u32 tile, int row, int warp, int consumer) {
  const int lane = threadIdx.x % 32, chunk = lane % 8, first_group = warp * WARP_GROUPS, first_column = 4 * consumer;
#pragma unroll 1
  for (int group = first_group; group < first_group + WARP_GROUPS; ++group) {
    float largest = 1e-4f;
#pragma unroll 1
    for (int column = first_column; column < first_column + 4; ++column) {
      const int turning = 64 * column + 8 * chunk - (D - ROPE);
      float4 c = {1, 1, 1, 1}, s = {0, 0, 0, 0};
      if (turning >= 0) {
        const long long at = (long long)row * (ROPE / 2) + turning / 2;
        c = *(const float4*)(a.cosines + at), s = *(const float4*)(a.sines + at);
      }
#pragma unroll 2
      for (int i = 0; i < GROUP_HEADS; i += 4) {
        const u32 address = chunk_address(tile, group * GROUP_HEADS + i + lane / 8, column, chunk);
        uint4 x = load_shared(address);
        if (turning >= 0) x = {turn(x.x, c.x, -s.x), turn(x.y, c.y, -s.y), turn(x.z, c.z, -s.z), turn(x.w, c.w, -s.w)};
        x = codes_of_group(x, largest);
        store_shared(address, x.x, x.y, x.z, x.w);
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (lane == 0) small.largest[consumer][group] = largest;
  }
  named_barrier(3 + warp, 64);
#pragma unroll 1
  for (int group = first_group; group < first_group + WARP_GROUPS && group * GROUP_HEADS < H; ++group) {
    const u32 exponent = exponent_for(fmaxf(small.largest[0][group], small.largest[1][group]));
    const float inverse = __uint_as_float((254 - exponent) << 23);
    const long long place = (long long)group * a.rows + row;
    if (consumer == 0 && lane == 0) a.scales[(long long)group * ((a.rows + 3) / 4 * 4) + row] = __uint_as_float(exponent << 23);
#pragma unroll 1
    for (int column = first_column; column < first_column + 4; ++column) {
      u8* to = (u8*)a.out + (place * GROUP_HEADS + lane / 8) * D + 64 * column + 8 * chunk;
#pragma unroll 2
      for (int i = 0; i < GROUP_HEADS; i += 4) {
        const uint4 x = load_shared(chunk_address(tile, group * GROUP_HEADS + i + lane / 8, column, chunk));
        const u32 factor = half_twice(__uint_as_float(x.z) * inverse);
        store_codes(to + i * D, times_half(x.x, factor), times_half(x.y, factor));
      }
    }
  }
}
