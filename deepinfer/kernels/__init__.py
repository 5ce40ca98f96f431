"""GPU kernels: Triton, or CUDA C++ compiled at run time. Their meaning is the reference in :mod:`deepinfer.ops`."""
