"""Products with stored weights, FP8 or bf16.

:mod:`.linear` is what layers hold: it chooses by rows and device, and must equal :func:`deepinfer.ops.linear.linear`
and ``grouped_linear`` on inputs that Q8 has rounded. :mod:`.plans` is the table of that choice, :mod:`.packing` the
layout of the weights that the CUDA kernels read. CUDA: :mod:`.skinny_cuda` for few rows, :mod:`.wgmma_cuda` for tens to
hundreds (cuBLAS above). Triton: :mod:`.linear_triton`, for every other device.
"""
