"""All of a hyper-connection between two sublayers: one launch where clusters of CTAs allow it, else two."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels.hyper_connection import cluster_cuda as cuda
from deepinfer.kernels.hyper_connection.cluster_cuda import ClusterShape, Sublayer
from deepinfer.kernels.hyper_connection.finish import hc_finish
from deepinfer.kernels.hyper_connection.launches_cuda import accepts_mix
from deepinfer.kernels.hyper_connection.parts import Mixes, MixLogits, Update, new_mixes, update_arguments
from deepinfer.kernels.hyper_connection.write_read import hc_write_read

MAX_CLUSTER_ROWS = 256
"""Above, two launches."""


class Entered(NamedTuple):
    """Results of :func:`hc_enter`; None where not asked for."""

    trunk: Tensor
    """``[rows, M, hidden]`` bf16"""
    feature: Tensor | None
    """``[rows, hidden]`` bf16, mean of the streams."""
    x: Tensor
    """``[rows, hidden]`` bf16, the sublayer's input."""
    xq: Tensor | None
    """``[rows, hidden]`` bf16: x rounded by Q8."""
    codes: Tensor | None
    """``[rows, hidden]`` uint8, e4m3 codes of x."""
    scales: Tensor | None
    """``[rows, hidden / 32]``: ue8m0 bytes (uint8), or the powers of two in float32."""
    mixes: Mixes | MixLogits
    """Of this sublayer."""


def hc_enter(
    trunk: Tensor,
    read_mix: Tensor | None,
    prior: Mixes | MixLogits | None,
    update: Update | None,
    sublayer: Sublayer,
    *,
    wants_feature: bool = False,
    wants_xq: bool = True,
    wants_codes: bool = False,
    scale_dtype: torch.dtype = torch.uint8,
    may_leave_logits: bool = False,
    early: bool = False,
    out: Tensor | None = None,
    shape: ClusterShape | None = None,
    overlap: bool = True,
) -> Entered:
    """Write a sublayer's output into the streams, read the next one's input from them and make its mixes.

    The result does not depend on the number of launches.

    Args:
        trunk: ``[rows, M, hidden]`` bf16, contiguous.
        read_mix: ``[rows, M]`` float32 (rows may be strided). None with :class:`MixLogits`, which hold it.
        prior: mixes of the sublayer that writes; None with ``update`` and a ``read_mix``.
        update: output of the sublayer that writes; None: the trunk is only read and returned.
        scale_dtype: of the codes' scales, uint8 or float32.
        may_leave_logits: the mixes may be made later: by the next :func:`hc_enter`, or by :func:`make_mixes`.
        early: at least one launch lies between the one that left ``prior``'s logits and this one, so they can be read
            before this one waits for its predecessor (see ``nvrtc``).
        out: for the new trunk; may be ``trunk`` itself.
        shape: takes one launch, whatever the number of rows.
        overlap: may load weights before the preceding kernel has ended.
    """
    rows, streams, hidden = trunk.shape
    assert trunk.is_contiguous()
    is_lazy = isinstance(prior, MixLogits)
    assert (read_mix is None) == is_lazy
    assert is_lazy or (prior is None) == (update is None)
    if shape is None and rows <= MAX_CLUSTER_ROWS and cuda.accepts(streams, hidden, trunk.device):
        shape = cuda.choose_shape(hidden)
    of_mixes = (
        () if read_mix is None else (read_mix, *((prior.write, prior.stream) if isinstance(prior, Mixes) else ()))
    )
    if shape is not None and all(map(accepts_mix, of_mixes)):
        if isinstance(prior, MixLogits):
            assert prior.constants == (sublayer.hc_eps, sublayer.iterations)
        packed, mixes = new_mixes(trunk, rows, streams)
        results = cuda.Results(
            trunk if update is None else (torch.empty_like(trunk) if out is None else out),
            trunk.new_empty(rows, hidden) if wants_feature else None,
            trunk.new_empty(rows, hidden),
            trunk.new_empty(rows, hidden) if wants_xq else None,
            trunk.new_empty(rows, hidden, dtype=torch.uint8) if wants_codes else None,
            trunk.new_empty(rows, hidden // 32, dtype=scale_dtype) if wants_codes else None,
            packed,
        )
        arguments = update_arguments(update)
        if cuda.enter(
            trunk, read_mix, prior, arguments, sublayer, results, may_leave_logits, shape, early, overlap
        ):  # fmt: skip
            left = MixLogits(packed, sublayer.hc_eps, sublayer.iterations) if may_leave_logits else mixes
            return Entered(
                results.trunk, results.feature, results.x, results.rounded, results.codes, results.scales, left
            )
    if isinstance(prior, MixLogits):
        prior = make_mixes(prior)
        read_mix = prior.read
    read = hc_write_read(
        trunk, read_mix, sublayer.fn, update, None if update is None else prior, wants_feature=wants_feature, out=out,
        overlap=overlap,
    )  # fmt: skip
    assert read.h is not None
    assert read.partial is not None
    finished = hc_finish(
        read.partial, read.h, sublayer.norm_weight, sublayer.scale, sublayer.base, sublayer.norm_eps, sublayer.hc_eps,
        sublayer.iterations, wants_xq=wants_xq, wants_codes=wants_codes, scale_dtype=scale_dtype, overlap=overlap,
    )  # fmt: skip
    assert finished.mixes is not None
    return Entered(read.trunk, read.feature, *finished[:4], finished.mixes)


def make_mixes(prior: MixLogits) -> Mixes:
    """What ``prior`` stands for."""
    rows, width = prior.logits.shape
    packed, mixes = new_mixes(prior.logits, rows, int(width**0.5))  # (2 + M) * M lies between M**2 and (M + 1)**2
    cuda.make_mixes(prior, packed)
    return mixes
