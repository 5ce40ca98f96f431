// The router's logits of up to hundreds of rows: partial[s, rows, EXPERTS] = x[rows, slice s] @ gate[EXPERTS, slice s]^T in float32.
//
// A block of threads (CTA) has some experts, one slice of SLICE columns and ROWS rows, all of it in shared memory at once.
// Its warps are GROUPS of 16 MT experts times 4 quarters of the slice; the quarters are added in order. The selection adds
// the slices, in order too: a logit's bits depend neither on the number of rows nor on the shape of a CTA.
//
// Compile-time constants: HIDDEN (a multiple of 8), EXPERTS, NT (8-row tiles of a CTA), MT (tiles of 16 experts of a warp),
// GROUPS (of warps, each with its own experts).

#include "types.cuh"

#define SLICE 512
#define THREADS (128 * GROUPS)
#define ROWS (8 * NT)
#define COLUMNS (16 * MT * GROUPS)  // experts of a CTA
#define SUM_STRIDE (COLUMNS + 4)    // floats of a row of sums: rows start in different banks

static_assert(HIDDEN % 8 == 0, "a copy is 16 bytes");
static_assert(4 * ROWS * SUM_STRIDE * 4 <= (COLUMNS + ROWS) * SLICE * 2, "the sums take the place of the operands");

// ---------------------------------------------------------------- instructions
#include "launch.cuh"
#include "matrices.cuh"
#include "memory.cuh"

// ---------------------------------------------------------------- the kernel
// Where a row's 16 bytes with this index lie: 8 neighbouring rows meet no bank twice.
__device__ __forceinline__ u32 place_of(int row, int piece) { return row * (2 * SLICE) + ((piece ^ row % 8) << 4); }

// `count` rows of a matrix [limit, HIDDEN] from `row` on, SLICE columns from `column` on; zeros outside.
__device__ __forceinline__ void copy_rows(u32 to, const u16* matrix, int row, int count, int limit, int column) {
  for (int i = threadIdx.x; i < count * (SLICE / 8); i += THREADS) {
    const int r = i / (SLICE / 8), piece = i % (SLICE / 8), c = column + 8 * piece;
    const bool exists = row + r < limit && c < HIDDEN;
    copy_async(to + place_of(r, piece), exists ? matrix + (long long)(row + r) * HIDDEN + c : matrix, exists ? 16 : 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
route_logits(const u16* x, const u16* gate, float* partial, int rows) {
  extern __shared__ __align__(16) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % GROUPS, quarter = warp / GROUPS;
  const int first_expert = blockIdx.x * COLUMNS, slice = blockIdx.y, first_row = blockIdx.z * ROWS;
  const u32 gate_shared = shared_address(shared), x_shared = gate_shared + COLUMNS * SLICE * 2;

  copy_rows(gate_shared, gate, first_expert, COLUMNS, EXPERTS, slice * SLICE);  // does not depend on earlier kernels
  wait_for_earlier_kernels();
  let_next_kernel_start();
  copy_rows(x_shared, x, first_row, ROWS, rows, slice * SLICE);
  wait_for_copies();
  __syncthreads();

  float sum[MT][NT][4] = {};
#pragma unroll
  for (int step = 0; step < SLICE / 4 / 32; ++step) {  // 32 columns
    const int piece = quarter * (SLICE / 32) + step * 4;
    u32 a[MT][2][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        load_matrices(a[m][i], gate_shared + place_of((group * MT + m) * 16 + lane % 16, piece + 2 * i + lane / 16));
#pragma unroll
    for (int tile = 0; tile < NT; ++tile) {
      u32 b[4];
      load_matrices(b, x_shared + place_of(tile * 8 + lane % 8, piece + lane / 8));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        multiply(sum[m][tile], a[m][0], b[0], b[1]);
        multiply(sum[m][tile], a[m][1], b[2], b[3]);
      }
    }
  }
  __syncthreads();

  float* sums = (float*)shared;  // [4, ROWS, SUM_STRIDE]
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int tile = 0; tile < NT; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile * 8 + lane % 4 * 2 + i % 2, expert = (group * MT + m) * 16 + lane / 4 + i / 2 * 8;
        sums[(quarter * ROWS + row) * SUM_STRIDE + expert] = sum[m][tile][i];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
    const int row = i / COLUMNS, expert = i % COLUMNS;
    if (first_row + row >= rows || first_expert + expert >= EXPERTS) continue;
    const float* part = sums + row * SUM_STRIDE + expert;
    float total = part[0];
#pragma unroll
    for (int q = 1; q < 4; ++q) total += part[q * ROWS * SUM_STRIDE];
    partial[((long long)slice * rows + first_row + row) * EXPERTS + first_expert + expert] = total;
  }
}
