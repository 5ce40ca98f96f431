// The router's logits of few rows: partial[s, rows, EXPERTS] = x[rows, slice s] @ gate[EXPERTS, slice s]^T in float32.
//
// A block of threads (CTA) has 32 experts, one slice of SLICE columns and ROWS rows, all of it in shared memory at once.
// Its 8 warps are 2 halves of the experts times 4 quarters of the slice; the quarters are added in order. The selection
// adds the slices, in order too: a logit's bits depend neither on the number of rows nor on the other rows.
//
// Compile-time constants: HIDDEN (a multiple of 8), EXPERTS, NT (8-row tiles of a CTA).

#include "types.cuh"

#define SLICE 512
#define THREADS 256
#define ROWS (8 * NT)
#define STRIDE (2 * SLICE + 16)  // bytes of a row in shared memory: rows start in different banks
#define SUM_STRIDE 36            // floats of a row of 32 sums, for the same reason
#define GATE_BYTES (32 * STRIDE)

static_assert(HIDDEN % 8 == 0, "a copy is 16 bytes");
static_assert(4 * ROWS * SUM_STRIDE * 4 <= GATE_BYTES + ROWS * STRIDE, "the sums take the place of the operands");

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#include "matrices.cuh"
#include "memory.cuh"

// ---------------------------------------------------------------- the kernel
// `count` rows of a matrix [limit, HIDDEN] from `row` on, SLICE columns from `column` on; zeros outside.
__device__ __forceinline__ void copy_rows(u32 to, const u16* matrix, int row, int count, int limit, int column) {
  for (int i = threadIdx.x; i < count * (SLICE / 8); i += THREADS) {
    const int r = i / (SLICE / 8), c = i % (SLICE / 8) * 8;
    const bool exists = row + r < limit && column + c < HIDDEN;
    copy_async(to + r * STRIDE + c * 2, exists ? matrix + (long long)(row + r) * HIDDEN + column + c : matrix,
               exists ? 16 : 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
route_logits(const u16* x, const u16* gate, float* partial, int rows) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = warp % 2, quarter = warp / 2;
  const int first_expert = blockIdx.x * 32, slice = blockIdx.y, first_row = blockIdx.z * ROWS;
  const u32 gate_shared = shared_address(shared), x_shared = gate_shared + GATE_BYTES;

  copy_rows(gate_shared, gate, first_expert, 32, EXPERTS, slice * SLICE);  // does not depend on earlier kernels
  wait_for_earlier_kernels();
  let_next_kernel_start();
  copy_rows(x_shared, x, first_row, ROWS, rows, slice * SLICE);
  wait_for_copies();
  __syncthreads();

  float sum[NT][4] = {};
  const u32 gate_lane = gate_shared + (half * 16 + lane % 16) * STRIDE + lane / 16 * 16 + quarter * (SLICE / 2);
  const u32 x_lane = x_shared + lane % 8 * STRIDE + lane / 8 * 16 + quarter * (SLICE / 2);
#pragma unroll
  for (int step = 0; step < SLICE / 4 / 32; ++step) {  // 32 columns
    u32 a[2][4];
    load_matrices(a[0], gate_lane + step * 64);
    load_matrices(a[1], gate_lane + step * 64 + 32);
#pragma unroll
    for (int tile = 0; tile < NT; ++tile) {
      u32 b[4];
      load_matrices(b, x_lane + tile * 8 * STRIDE + step * 64);
      multiply(sum[tile], a[0], b[0], b[1]);
      multiply(sum[tile], a[1], b[2], b[3]);
    }
  }
  __syncthreads();

  float* sums = (float*)shared;  // [4, ROWS, SUM_STRIDE]
#pragma unroll
  for (int tile = 0; tile < NT; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = tile * 8 + lane % 4 * 2 + i % 2, expert = half * 16 + lane / 4 + i / 2 * 8;
      sums[(quarter * ROWS + row) * SUM_STRIDE + expert] = sum[tile][i];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * 32; i += THREADS) {
    const int row = i / 32, expert = i % 32;
    if (first_row + row >= rows || first_expert + expert >= EXPERTS) continue;
    const float* part = sums + row * SUM_STRIDE + expert;
    float total = part[0];
#pragma unroll
    for (int q = 1; q < 4; ++q) total += part[q * ROWS * SUM_STRIDE];
    partial[((long long)slice * rows + first_row + row) * EXPERTS + first_expert + expert] = total;
  }
}
