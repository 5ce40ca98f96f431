// The CTAs of a cluster: who is who, a barrier of all their threads, and each other's shared memory. Only for launches with
// clusters, so kernels ask for their size first. Barriers of another form are with the kernels that need them.
#include "types.cuh"

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_barrier() {  // whole warps; what was written before is seen behind it
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in CTA `rank` that corresponds to `address` in this one.
__device__ __forceinline__ u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ int load_remote(u32 address) {
  int v;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
