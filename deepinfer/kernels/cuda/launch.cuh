// Overlapped launches: what a kernel tells the machine about the one before it and the one after it. The rules are at the
// head of deepinfer/kernels/nvrtc.py. Each function is one instruction, which costs nothing in a launch without overlap.

__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
