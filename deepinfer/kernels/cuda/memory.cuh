// Shared memory by its 32-bit address, and the three ways to fill it from global memory behind a thread's back: cp.async,
// which the thread waits for itself; bulk copies and tensor copies, for which a barrier (barriers.cuh) counts the bytes.
#include "types.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
  return v;
}

// ---- cp.async
__device__ __forceinline__ void copy_async(u32 to, const void* from, u32 bytes) {  // 16 bytes, those past `bytes` zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void copy_wait() {  // for all groups but the last ones
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

__device__ __forceinline__ void wait_for_copies() {  // all of them
  copy_commit();
  copy_wait<0>();
}

// ---- bulk copies
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_bulk_once(u32 to, const void* from, u32 bytes, u32 barrier) {  // leaves L2 first
  asm volatile("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
               "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], policy; }" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// ---- tensor copies
// The box of a matrix that begins at a row and a column; `map` describes the matrix and its boxes (nvrtc.tensor_map).
__device__ __forceinline__ void copy_box(u32 to, const void* map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
