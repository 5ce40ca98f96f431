"""The residual streams in flight, and the hyper-connection of one sublayer in two launches (spec 4.2).

A sublayer's output is not written when it is known but when the next sublayer reads: one kernel then writes, reads and
makes the partial sums of the next mixes while the streams pass through the registers once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.hyper_connection.finish import hc_finish
from deepinfer.kernels.hyper_connection.parts import Mixes, Update
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.kernels.moe.expert_inputs import round_activation
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
class InputForms:
    """What a sublayer reads beside its normed input: the same rounded to FP8 in groups of 32, in these forms."""

    rounded: bool = True
    """Values in bf16."""
    codes: bool = False
    """Codes with the scales of their groups. Not together with ``row_codes``."""
    row_codes: bool = False
    """Codes with one scale per row."""


@dataclass(frozen=True, slots=True)
class SublayerInput:
    """What a sublayer works on."""

    x: Tensor
    """``[rows, hidden]`` bf16, normed."""
    rounded: Tensor | None
    """The same, rounded to FP8 in groups of 32: values in bf16; None where nobody reads them."""
    codes: Tensor | None = None
    """The same as e4m3 codes uint8 ``[rows, hidden]``, where asked for."""
    scales: Tensor | None = None
    """float32 ``[rows, hidden / 32]``, powers of two."""
    row_codes: RowCodes | None = None
    """``rounded`` as codes with one scale per row, where asked for."""

    @property
    def operand(self) -> Tensor | RowCodes:
        """What products with FP8 weights take."""
        operand = self.rounded if self.row_codes is None else self.row_codes
        assert operand is not None
        return operand

    def of_rows(self, rows: Tensor, forms: InputForms) -> SublayerInput:
        """The same for some rows, ``[kept]`` int64, in the forms in which so few are read."""
        x, row_codes, codes, scales = self.x[rows], self.row_codes, self.codes, self.scales
        rounded = None
        if forms.rounded:
            rounded = round_activation(x) if self.rounded is None else self.rounded[rows]
        return SublayerInput(
            x,
            rounded,
            None if codes is None else codes[rows],
            None if scales is None else scales[rows],
            row_codes.of_rows(rows) if row_codes is not None and forms.row_codes else None,
        )


class HyperConnection:
    """Reads the streams for one sublayer and makes its mixes.

    Args:
        kind: ``"attn"`` or ``"ffn"``.
        forms: in which the sublayer takes an input of so many rows.
    """

    def __init__(
        self, config: TextConfig, kind: str, weights: PackedSource, forms: Callable[[int], InputForms]
    ) -> None:
        self.norm_eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        self.fn = weights.fp32(f"hc_{kind}_fn")
        self.scale = weights.fp32(f"hc_{kind}_scale")
        self.base = weights.fp32(f"hc_{kind}_base")
        self.norm = weights.bf16(f"{kind}_norm.weight")
        self.forms = forms

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
        forms = self.forms(len(read.h))
        finished = hc_finish(
            read.partial,
            read.h,
            self.norm,
            self.scale,
            self.base,
            self.norm_eps,
            self.hc_eps,
            self.iterations,
            wants_xq=forms.rounded,
            wants_codes=forms.codes,
            wants_row_codes=forms.row_codes,
            scale_dtype=torch.float32,
        )
        if features is not None and read.feature is not None:
            features.append(read.feature)
        assert finished.mixes is not None
        residual.trunk, residual.update, residual.mixes = read.trunk, None, finished.mixes
        residual.read_mix = finished.mixes.read
        return SublayerInput(finished.x, finished.xq, finished.codes, finished.scales, finished.row_codes)


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
