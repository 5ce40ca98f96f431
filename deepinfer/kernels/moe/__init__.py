"""Mixture of experts: who computes what, the routed experts, and the sum.

Must equal :func:`deepinfer.ops.moe.route` and :func:`deepinfer.ops.moe.moe`. Choices: :mod:`.router` and
:mod:`.expert_blocks` (the order of the pairs) between CUDA (:mod:`.router_cuda`) and Triton; :mod:`.experts` between
our kernels for Hopper (:mod:`.experts_hopper`: :mod:`.packing`, :mod:`.grouped_skinny` for few rows and
:mod:`.grouped_wgmma` for many), the library ``humming`` (:mod:`.experts_humming`) and Triton (:mod:`.experts_triton`).
Triton alone:
:mod:`.expert_inputs` (rounding on the way in), :mod:`.swiglu` (between the products), :mod:`.expert_sum` (the way out).
"""
