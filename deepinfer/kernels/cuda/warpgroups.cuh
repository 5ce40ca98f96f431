// Kernels whose warpgroups multiply (wgmma) while others bring the operands: the order of products, which run on their own
// until they are waited for, and registers, which warps that need few give to those that need many. The products
// themselves are with the kernels: their shapes and operands differ.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {  // for all groups but the last ones
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// All warps of a warpgroup; each thread has PER_THREAD registers then.
template <int PER_THREAD> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PER_THREAD));
}

template <int PER_THREAD> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(PER_THREAD));
}
