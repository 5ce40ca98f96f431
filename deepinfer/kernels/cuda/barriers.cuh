// Barriers in shared memory (mbarrier), by address or by pointer. A phase of a barrier ends when as many threads have
// arrived as it was made for and all bytes that it expects are there; a wait for a phase of the given parity returns at
// once when it has ended. Kernels whose wait needs another form have their own: dense_wgmma.cu and index_chunks.cu.
#include "memory.cuh"

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barriers_ready() {  // for the copy engine as well
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {  // and arrive
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  // Fails after seconds, instead of hanging. (Written in C++ the loop serialises wgmma.)
  asm volatile("{ .reg .pred done, more; .reg .u32 tries;\n"
               "mov.u32 tries, 0;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "add.u32 tries, tries, 1;\n"
               "setp.lt.and.u32 more, tries, 4000000, !done;\n"
               "@more bra again;\n"
               "@!done trap; }" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- by pointer
__device__ __forceinline__ void barrier_init(u64* barrier, u32 count) { barrier_init(shared_address(barrier), count); }

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) { barrier_expect(shared_address(barrier), bytes); }

__device__ __forceinline__ void barrier_arrive(u64* barrier) { barrier_arrive(shared_address(barrier)); }

__device__ __forceinline__ void barrier_wait_forever(u64* barrier, u32 parity) {  // short code, but where barrier_wait fails it hangs
  asm volatile("{ .reg .pred done;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again; }" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}
