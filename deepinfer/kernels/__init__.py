"""GPU kernels: Triton, or CUDA C++ compiled at run time. Their meaning is the reference in :mod:`deepinfer.ops`.

A room per concept of the model. In each of them a plain name holds what layers call, and chooses who works; beside it
``*_cuda.py`` launches a file of ``cuda/`` (Hopper, the released widths), and ``*_triton.py`` is the Triton kernel where
both exist. Without such a neighbour the plain file is Triton itself. Everything Triton runs on a CPU through its
interpreter, and the CUDA files are compiled for the CPU and emulated: see ``tests/kernels``.

===================  ==================================================================================
dense                products with stored FP8 and bf16 weights
attention            query latent and window key; sparse attention over window and entries
indexer              which compressed entries a row attends to
compressor           pools rows into the entries and index keys that both of them read
hyper_connection     the trunk of several streams between two sublayers
moe                  router, order of the pairs, routed experts, their sum
engram               the n-gram memory: lookup, gate, and where its table lives
sampling             a token per row, and the accepted prefix of drafts
step_tables          windows, slots and angles of a step's rows, once for all layers
formats              numbers in few bits, as functions for Triton kernels
nvrtc, cuda          compiles, caches and launches CUDA C++; the sources
===================  ==================================================================================

Only code that runs on a GPU (and the tests here) imports the Triton files: Triton need not be installed elsewhere.
"""
