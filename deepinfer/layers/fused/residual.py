"""The residual streams in flight, and the hyper-connection of one sublayer (spec 4.2).

A sublayer's output is not written when it is known but when the next sublayer reads: it then writes, reads and
sums for the next mixes while the streams pass through the registers once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.kernels.hyper_connection.cluster_cuda import Sublayer
from deepinfer.kernels.hyper_connection.enter import hc_enter, make_mixes
from deepinfer.kernels.hyper_connection.parts import Mixes, MixLogits, Update, new_mixes
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.layers.fused.weights import PackedSource


class Residual:
    """The streams between two sublayers.

    Args:
        trunk: ``[rows, M, hidden]`` bf16.
        read_mix: ``[rows, M]`` float32, with which the next sublayer reads.
    """

    def __init__(self, trunk: Tensor, read_mix: Tensor) -> None:
        self.trunk = trunk
        """Without ``update``."""
        self.update: Update | None = None
        """Output of the last sublayer, not yet written; None at the start and behind an n-gram layer."""
        self.prior: Mixes | MixLogits | None = None
        """Of the last sublayer; None at the start."""
        self._first_read_mix = read_mix

    @property
    def mixes(self) -> Mixes | None:
        """Of the last sublayer, made by a launch of its own if that has not happened yet."""
        if isinstance(self.prior, MixLogits):
            self.prior = make_mixes(self.prior)
        return self.prior

    @property
    def read_mix(self) -> Tensor:
        """``[rows, M]`` float32, with which the next sublayer reads; as :attr:`mixes`."""
        mixes = self.mixes
        return self._first_read_mix if mixes is None else mixes.read

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with some rows only (spec 6.1). Nothing may be pending.

        Args:
            rows: ``[kept]`` int64.
        """
        assert self.update is None
        mixes = self.mixes
        self.trunk = self.trunk[rows]
        if mixes is None:
            self._first_read_mix = self._first_read_mix[rows]
            return
        _, kept = new_mixes(mixes.read, len(rows), self.trunk.shape[1])
        for mine, theirs in zip(kept, mixes, strict=True):
            mine.copy_(theirs[rows])
        self.prior = kept


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
        self.sublayer = Sublayer(
            weights.fp32(f"hc_{kind}_fn"),
            weights.bf16(f"{kind}_norm.weight"),
            weights.fp32(f"hc_{kind}_scale"),
            weights.fp32(f"hc_{kind}_base"),
            config.rms_norm_eps,
            config.hc_eps,
            config.hc_sinkhorn_iters,
        )
        self.wants_codes = wants_codes

    def enter(self, residual: Residual, features: list[Tensor] | None = None) -> SublayerInput:
        """Write what is pending, read the sublayer's input, and leave the mixes for its output in ``residual``.

        Args:
            features: gets the mean of the streams, ``[rows, hidden]`` bf16.
        """
        update = residual.update
        # Read only: perhaps no launch lies between this one and the one that left the mixes.
        prior = None if update is None else residual.prior
        read_mix = None if isinstance(prior, MixLogits) else residual.read_mix
        entered = hc_enter(
            residual.trunk,
            read_mix,
            prior,
            update,
            self.sublayer,
            wants_feature=features is not None,
            wants_codes=self.wants_codes,
            scale_dtype=torch.float32,
            may_leave_logits=True,
            early=True,  # every sublayer has launches of its own
        )
        if features is not None and entered.feature is not None:
            features.append(entered.feature)
        assert entered.xq is not None
        residual.trunk, residual.update, residual.prior = entered.trunk, None, entered.mixes
        return SublayerInput(entered.x, entered.xq, entered.codes, entered.scales)


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
