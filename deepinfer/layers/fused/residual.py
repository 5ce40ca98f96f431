"""The residual streams in flight, and the hyper-connection of one sublayer in two launches (spec 4.2).

A sublayer's output is not written when it is known but when the next sublayer reads: one kernel then writes, reads and
makes the partial sums of the next mixes while the streams pass through the registers once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.kernels.hyper_connection.finish import hc_finish
from deepinfer.kernels.hyper_connection.parts import Mixes, Update
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.layers.fused.weights import PackedSource


@dataclass(slots=True)
class Residual:
    """The streams between two sublayers."""

    trunk: Tensor
    """``[rows, M, hidden]`` bf16, without ``update``."""
    read_mix: Tensor
    """``[rows, M]`` float32, with which the next sublayer reads."""
    update: Update | None = None
    """Output of the last sublayer, not yet written; None at the start and behind an n-gram layer."""
    mixes: Mixes | None = None
    """Of the sublayer that ``update`` comes from."""


@dataclass(frozen=True, slots=True)
class SublayerInput:
    """What a sublayer works on."""

    x: Tensor
    """``[rows, hidden]`` bf16, normed."""
    rounded: Tensor
    """The same, rounded to FP8 in groups of 32: values in bf16."""
    codes: Tensor | None = None
    """The same as e4m3 codes uint8 ``[rows, hidden]``, where asked for."""
    scales: Tensor | None = None
    """float32 ``[rows, hidden / 32]``, powers of two."""

    def of_rows(self, rows: Tensor) -> SublayerInput:
        """The same for some rows, ``[kept]`` int64."""
        codes, scales = self.codes, self.scales
        return SublayerInput(
            self.x[rows],
            self.rounded[rows],
            None if codes is None else codes[rows],
            None if scales is None else scales[rows],
        )


class HyperConnection:
    """Reads the streams for one sublayer and makes its mixes.

    Args:
        kind: ``"attn"`` or ``"ffn"``.
        wants_codes: the sublayer's products take FP8 codes.
    """

    def __init__(self, config: TextConfig, kind: str, weights: PackedSource, wants_codes: bool) -> None:
        self.norm_eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        self.fn = weights.fp32(f"hc_{kind}_fn")
        self.scale = weights.fp32(f"hc_{kind}_scale")
        self.base = weights.fp32(f"hc_{kind}_base")
        self.norm = weights.bf16(f"{kind}_norm.weight")
        self.wants_codes = wants_codes

    def enter(self, residual: Residual, features: list[Tensor] | None = None) -> SublayerInput:
        """Write what is pending, read the sublayer's input, and leave the mixes for its output in ``residual``.

        Args:
            features: gets the mean of the streams, ``[rows, hidden]`` bf16.
        """
        read = hc_write_read(
            residual.trunk,
            residual.read_mix,
            self.fn,
            residual.update,
            residual.mixes if residual.update is not None else None,
            wants_feature=features is not None,
        )
        assert read.partial is not None
        assert read.h is not None
        finished = hc_finish(
            read.partial,
            read.h,
            self.norm,
            self.scale,
            self.base,
            self.norm_eps,
            self.hc_eps,
            self.iterations,
            wants_codes=self.wants_codes,
            scale_dtype=torch.float32,
        )
        if features is not None and read.feature is not None:
            features.append(read.feature)
        assert finished.mixes is not None
        assert finished.xq is not None
        residual.trunk, residual.update, residual.mixes = read.trunk, None, finished.mixes
        residual.read_mix = finished.mixes.read
        return SublayerInput(finished.x, finished.xq, finished.codes, finished.scales)


def flush(residual: Residual, features: list[Tensor] | None = None) -> None:
    """Write what is pending into the streams, without reading; ``features`` as for :meth:`HyperConnection.enter`."""
    wants_feature = features is not None
    if residual.update is None and not wants_feature:
        return
    mixes = residual.mixes if residual.update is not None else None
    written = hc_write_read(residual.trunk, None, None, residual.update, mixes, wants_feature=wants_feature)
    if features is not None and written.feature is not None:
        features.append(written.feature)
    residual.trunk, residual.update = written.trunk, None


def keep_rows(residual: Residual, rows: Tensor) -> None:
    """Go on with some rows only (spec 6.1). Nothing may be pending.

    Args:
        rows: ``[kept]`` int64.
    """
    assert residual.update is None
    residual.trunk, residual.read_mix = residual.trunk[rows], residual.read_mix[rows]
    if residual.mixes is not None:
        streams = residual.trunk.shape[1]
        packed = residual.mixes.read.new_empty(len(rows), (2 + streams) * streams)
        kept = Mixes(
            packed[:, :streams],
            packed[:, streams : 2 * streams],
            packed[:, 2 * streams :].unflatten(1, (streams, streams)),
        )
        for mine, theirs in zip(kept, residual.mixes, strict=True):
            mine.copy_(theirs[rows])
        residual.mixes = kept
