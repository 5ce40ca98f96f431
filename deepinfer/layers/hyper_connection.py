"""Hyper-connection of one sublayer: reads the streams, runs the sublayer, writes back (spec 4.2)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.config.model import TextConfig
from deepinfer.layers.weights import WeightSource
from deepinfer.ops.registry import Ops


class HyperConnection:
    """Wraps a sublayer ``F`` acting on one stream into an update of all streams.

    Args:
        kind: ``"attn"`` or ``"ffn"``, part of the tensor names.
    """

    def __init__(self, config: TextConfig, kind: str, weights: WeightSource, ops: Ops) -> None:
        self.ops = ops
        self.eps, self.hc_eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        self.shifted = config.hc_shifted
        self.fn = weights.wide(f"hc_{kind}_fn")
        self.scale = weights.wide(f"hc_{kind}_scale")
        self.base = weights.wide(f"hc_{kind}_base")
        self.norm = weights.wide(f"{kind}_norm.weight")

    def forward(self, trunk: Tensor, read_mix: Tensor, sublayer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """``trunk`` ``[rows, M, hidden]`` and the previous sublayer's ``read_mix`` ``[rows, M]`` to the next pair."""
        next_mix, write_mix, stream_mix = self._mixes(trunk)
        used = read_mix if self.shifted else next_mix
        x = self.ops.rms_norm(self.ops.hc_read(trunk, used), self.norm, self.eps)
        return self.ops.hc_write(trunk, sublayer(x), write_mix, stream_mix), next_mix

    def forward_cut(
        self,
        trunk: Tensor,
        read_mix: Tensor,
        rows: Tensor,
        publish: Callable[[Tensor], None],
        sublayer: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, for a sublayer behind which only some rows go on (spec 6.1).

        Args:
            rows: ``[kept]`` int64, at least one. The mixes and the pending write are made for these rows only.
            publish: gets the sublayer's input of every row.
            sublayer: gets the input of the kept rows.
        Returns:
            trunk ``[kept, M, hidden]`` and read mix ``[kept, M]``.
        """
        publish(self.input_of(trunk, read_mix))
        return self.forward(trunk[rows], read_mix[rows], sublayer)

    def input_of(self, trunk: Tensor, read_mix: Tensor) -> Tensor:
        """What the sublayer reads, ``[rows, hidden]``, without running it."""
        used = read_mix if self.shifted else self._mixes(trunk)[0]
        return self.ops.rms_norm(self.ops.hc_read(trunk, used), self.norm, self.eps)

    def _mixes(self, trunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.hc_mixes(trunk, self.fn, self.scale, self.base, self.eps, self.hc_eps, self.iterations)
