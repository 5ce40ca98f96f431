// Mixes of the logits that hyper_connection_cluster.cu left: the same bits as in that kernel. A thread has a row.
//
// Compile-time constants: ITERATIONS.

#include "hyper_connection_common.cuh"

#ifndef THREADS
#define THREADS 64
#endif

struct Arguments {
  const float* logits;  // [rows, 24]
  float* mixes;         // [rows, 24]
  int rows;
  float hc_eps;
};

#include "hyper_connection_mixes.cuh"

// ---------------------------------------------------------------- kernel
extern "C" __global__ void __launch_bounds__(THREADS) hc_mixes(const Arguments a) {
  wait_for_earlier_kernels();
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= a.rows) return;
  Floats logits[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) logits[i] = *(const Floats*)(a.logits + row * 24 + 4 * i);
  RowMixes made;
  made.make(logits, a.hc_eps);
  float* mixes = a.mixes + row * 24;
#pragma unroll
  for (int i = 0; i < 8; ++i) mixes[i] = made.gates[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) *(Floats*)(mixes + 8 + 4 * i) = *(const Floats*)made.streams[i];
}
