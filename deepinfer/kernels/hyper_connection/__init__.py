"""Hyper-connections: the trunk of several streams between two sublayers.

:mod:`.write_read` and :mod:`.finish` are the two launches that layers call; they choose, and must equal
:mod:`deepinfer.ops.hyper_connection` (write, read, mixes) with :func:`deepinfer.ops.norm.rms_norm` and Q8 behind it.
CUDA: :mod:`.launches_cuda`, for both. Triton: both files themselves, out of the functions of :mod:`.stages`.
:mod:`.parts` has what they take and pass on: forms of an update, mixes, partial sums.
"""
