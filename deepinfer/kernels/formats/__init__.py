"""Numbers in few bits: functions that Triton kernels call, none of them a kernel.

Bits are those of :mod:`deepinfer.ops.number_formats`. :mod:`.float32` has powers of two and bf16 rounding, :mod:`.e2m1`
is FP4, :mod:`.e4m3` is FP8 and Q8. Kernels that read a format in another layout or by a hardware conversion (attention,
dense products) decode it themselves, since their machine code has been measured that way.
"""
