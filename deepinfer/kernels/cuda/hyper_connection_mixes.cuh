// Mixes of their logits. For the kernels that include this file behind ITERATIONS.
//
// Expressions are written so that the compiler has no choice of rounding: every kernel gives the same bits.

// ---------------------------------------------------------------- mixes
// One side's divisors, from the other's: a pass of Sinkhorn. The matrix is kept as c[i][j] over the divisors of its row and
// its column, so a pass changes 4 numbers instead of 16. An element over its sum plus eps then has the divisor
// sum of c / others + eps * own divisor of a pass ago. All are waiting for the sum, so it is taken over a common
// denominator, whose inverse is made meanwhile. Divisors lie between 1e-6 and 1e6: products of four stay in range.
__device__ __forceinline__ void pass(const float (&c)[4][4], bool is_rows, const float (&others)[4], float (&own)[4],
                                     float eps) {
  const float left = others[0] * others[1], right = others[2] * others[3], inverse = reciprocal(left * right);
  const float three[4] = {others[1] * right, others[0] * right, others[3] * left, others[2] * left};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float c0 = is_rows ? c[i][0] : c[0][i], c1 = is_rows ? c[i][1] : c[1][i];
    const float c2 = is_rows ? c[i][2] : c[2][i], c3 = is_rows ? c[i][3] : c[3][i];
    const float first = fmaf(c1, three[1], c0 * three[0]), second = fmaf(c3, three[3], c2 * three[2]);
    own[i] = fmaf(first + second, inverse, eps * own[i]);
  }
}

// Sinkhorn, in one thread: each pass waits for the one before.
__device__ __forceinline__ void balance(float (&c)[4][4], float eps) {
  float rows[4] = {1, 1, 1, 1}, columns[4] = {1, 1, 1, 1};
  pass(c, false, rows, columns, eps);
#pragma unroll 1
  for (int i = 1; i < ITERATIONS; ++i) {
    pass(c, true, columns, rows, eps);
    pass(c, false, rows, columns, eps);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = reciprocal(rows[i]), columns[i] = reciprocal(columns[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = c[i][j] * rows[i] * columns[j];
}

// A number of the read mix or the write mix, of its logit.
__device__ __forceinline__ float gate_of(int mix, float logit, float eps) {
  const float gate = 1.0f / (1.0f + expf(-logit));
  return mix < 4 ? gate + eps : 2.0f * gate;
}

// Of one row, by a warp: lane i < 24 has logit i. Lanes 8 to 23 hold the matrix, four of them a row.
__device__ __forceinline__ void store_mixes(float logit, int lane, float* mixes, float eps) {
  float largest = fmaxf(logit, __shfl_xor_sync(~0u, logit, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  const float power = expf(logit - largest);
  float total = power + __shfl_xor_sync(~0u, power, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  const float soft = power / total + eps;
  float c[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) c[i][j] = __shfl_sync(~0u, soft, 8 + 4 * i + j);
  balance(c, eps);
  if (lane < 8) mixes[lane] = gate_of(lane, logit, eps);
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) *(Floats*)(mixes + 8 + 4 * i) = *(const Floats*)c[i];
}

// The same of one row, by a thread, from its 24 logits.
struct RowMixes {
  float gates[8], streams[4][4];

  __device__ __forceinline__ void make(const Floats (&logits)[6], float eps) {
#pragma unroll
    for (int i = 0; i < 8; ++i) gates[i] = gate_of(i, logits[i / 4].of[i % 4], eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Floats& line = logits[2 + i];
      const float largest = fmaxf(fmaxf(line.of[0], line.of[1]), fmaxf(line.of[2], line.of[3]));
      float powers[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) powers[j] = expf(line.of[j] - largest);
      const float total = (powers[0] + powers[1]) + (powers[2] + powers[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) streams[i][j] = powers[j] / total + eps;
    }
    balance(streams, eps);
  }
};
