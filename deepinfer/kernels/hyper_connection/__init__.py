"""Hyper-connections: the trunk of several streams between two sublayers.

:mod:`.enter` is what layers call: one launch for few rows (CUDA: :mod:`.cluster_cuda`), else the two of
:mod:`.write_read` and :mod:`.finish`, with the same bits. They must equal
:mod:`deepinfer.ops.hyper_connection` (write, read, mixes) with :func:`deepinfer.ops.norm.rms_norm` and Q8 behind it.
CUDA: :mod:`.launches_cuda`, for those two. Triton: both files themselves, out of the functions of :mod:`.stages`.
:mod:`.parts` has what they take and pass on: forms of an update, mixes and their logits, partial sums.
"""
