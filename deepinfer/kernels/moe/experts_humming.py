"""The routed experts through the library ``humming``: FP8 activations times FP4 weights, sums in float32.

``faithful`` products take the activations as Q8 makes them (one power of two per 32). The library turns a weight and
its scale into one e4m3 number, which is exact for scales within 11 binades of the largest of the expert (or of the
row): that is checked here. It writes 16-bit results, so the gate-up product goes out in float16, whose rounding is
eight times finer than that of bf16; a magnitude beyond 65,504 becomes infinite there and meets the clamp.

How exact that is. Each of the two products is its exact value, rounded once, but for the tensor cores' sums of 32 FP8
products, which keep about 13 bits below the largest: 1e-5 of the result's size, so 1 to 3 in 100 bf16 results and 7 in
100 float16 results are the other neighbour of the exact value. What shows is the rounding to float16 (2e-4 of the size)
between the products: it moves 3 in 1,000 inner activations across a rounding boundary of Q8, each by a sixteenth to an
eighth of itself. Through the down product that is an error of 2.5e-3 of a pair's output (a single large activation that
flips: up to 2e-2), beside 1.7e-3 from the bf16 output itself; 4 in 10 outputs are not the rounded exact value. With
bf16 between the products, as grouped products commonly have it, the error is 1.5e-2. The Triton products carry float32
between and have none of this.

One repacked copy of the weights serves both precisions.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.errors import EngineError
from deepinfer.kernels import nvrtc
from deepinfer.kernels.moe.expert_inputs import quantize_activation, scales_from_bytes
from deepinfer.kernels.moe.experts import ExpertInput, ExpertOutput, PackedExperts, Precision, RoutedExperts
from deepinfer.kernels.moe.router import Routing
from deepinfer.kernels.moe.swiglu import swiglu_quantized

_BINADES = 11
"""Span of weight scales that the library keeps exactly."""
_NUM_LOCKS = 2048
_FAST_ROWS = 2048
"""From here on a scale per row saves more than its rounding launches cost (8,192 rows: 3.8 ms against 8.6)."""


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("humming") is not None and torch.cuda.is_available()


def is_usable(gate_up: PackedExperts, down: PackedExperts) -> bool:
    """Whether the library is there, takes these sizes and keeps these weights exactly."""
    if not is_installed() or gate_up.codes.device.type != "cuda":
        return False
    widths = (gate_up.codes.shape[1], gate_up.codes.shape[2] * 2, down.codes.shape[1], down.codes.shape[2] * 2)
    return all(width % 128 == 0 for width in widths) and all(scale_span(part) != "wide" for part in (gate_up, down))


def scale_span(weights: PackedExperts) -> str:
    """How far the scales of non-zero groups lie below the largest: within the library's span for the whole
    ``expert``, only for each ``row``, or ``wide``. One read of the weights, an expert at a time."""
    is_within_rows = torch.ones((), dtype=torch.bool, device=weights.codes.device)
    is_within_experts = is_within_rows.clone()
    for codes, scales in zip(weights.codes, weights.scales, strict=True):
        # Two codes per byte, 16 bytes per scale; the sign bit says nothing about a value.
        has_value = ((codes & 0x77) != 0).unflatten(-1, (-1, 16)).any(-1)
        lowest = torch.where(has_value, scales, 255).to(torch.int16)  # [N, K / 32]
        row_largest = scales.amax(-1).to(torch.int16)
        row_lowest = lowest.amin(-1)
        is_within_rows &= (row_largest - row_lowest <= _BINADES).all()
        is_within_experts &= row_largest.max() - row_lowest.min() <= _BINADES
    if bool(is_within_experts):
        return "expert"
    return "row" if bool(is_within_rows) else "wide"


@dataclass(frozen=True, slots=True)
class Tile:
    """How the library cuts a product with few pairs: blocks of 8 pairs, ``n`` by ``k`` weights."""

    n: int
    k: int
    warp_n: int
    num_stages: int
    ctas_per_sm: int
    use_stream_k: bool

    def changes(self) -> dict[str, Any]:
        """Of the library's own choice."""
        return {
            "block_shape": [8, self.n, self.k], "warp_shape": [8, self.warp_n, 128], "num_stages": self.num_stages,
            "num_ctas_per_sm": self.ctas_per_sm, "use_stream_k": self.use_stream_k,
        }  # fmt: skip


FEW_PAIRS: dict[tuple[int, int], tuple[tuple[int, Tile], ...]] = {
    (5120, 2304): ((6, Tile(128, 128, 32, 4, 2, False)),),  # 13.4 us instead of 19.6 for 6 pairs of 6 experts
}
"""By weight shape (N, K): measured better tiles, each up to a number of pairs, ascending."""


@dataclass(frozen=True, slots=True)
class _Tuned:
    block: int
    compute: str
    tuning: str


class _Product:
    """One grouped product: the repacked weights and the library's settings for each number of pairs."""

    def __init__(self, weights: PackedExperts, out_dtype: torch.dtype, batch_invariant: bool) -> None:
        from humming import dtypes
        from humming.config import WeightScale2Type
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        num_experts, self.n, half = weights.codes.shape
        self.k, self.device, self.out_dtype = half * 2, weights.codes.device, out_dtype
        self.batch_invariant = batch_invariant
        span = scale_span(weights)
        if span == "wide":
            raise EngineError(
                "the experts' weight scales differ too much within a row",
                why=f"the library keeps FP4 weights exactly only within {_BINADES} binades of a row's largest scale",
                fix="build the experts another way",
            )
        if span == "row":
            self.out_dtype = torch.bfloat16  # the row factors would leave the range of float16
        scale_2 = WeightScale2Type.NONE if span == "expert" else WeightScale2Type.CHANNEL
        schema = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1,
            bs_dtype=dtypes.float8e8m0,
            weight_scale_group_size=32,
            weight_scale_2_type=scale_2,
        )

        def config(group: int) -> Any:
            inputs = HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=group)
            return prepare_layer_config(
                self.n, self.k, schema, inputs, num_experts=num_experts, torch_dtype=self.out_dtype, device=self.device
            )

        # The layout of the weights is the same for both.
        self.configs = {False: config(32), True: config(0)}
        assert not any(c.use_packed_k_layout for c in self.configs.values())
        tensors = {
            "weight": weights.codes.view(torch.int32),
            "weight_scale": weights.scales.view(torch.float8_e8m0fnu),
        }
        if span == "row":
            ones = torch.ones(num_experts, self.n, dtype=self.out_dtype, device=self.device)
            tensors["weight_scale_2"] = ones
        packed = transform_humming_tensors(self.configs[False], tensors, already_padded=True, allow_inplace=True)
        self.weight, self.scale, self.scale_2 = packed["weight"], packed["weight_scale"], packed["weight_scale_2"]
        self.locks = torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=self.device)
        self._tuned: dict[tuple[int, bool, bool], _Tuned] = {}

    def tuned(self, pairs: int, per_row: bool, grouped: bool) -> _Tuned:
        key = (pairs, per_row, grouped)
        if key not in self._tuned:
            from humming.tune import get_heuristics_config

            kind = "grouped_contiguous" if grouped else "indexed"
            tuning = get_heuristics_config(
                self.configs[per_row],
                shape_m=pairs,
                gemm_type=kind,
                use_batch_invariant=self.batch_invariant,
                device=self.device,
            )
            if not (grouped or per_row or self.batch_invariant):
                tiles = FEW_PAIRS.get((self.n, self.k), ())
                tile = next((tile for most, tile in tiles if pairs <= most), None)
                tuning = tuning | (tile.changes() if tile else {})
            compute = {"gemm_type": kind, "use_batch_invariant": self.batch_invariant}
            self._tuned[key] = _Tuned(tuning["block_shape"][0], json.dumps(compute), json.dumps(tuning))
        return self._tuned[key]

    def run(self, codes: Tensor, scales: Tensor, out: Tensor, pairs: int, pairs_per_row: int, **order: Tensor) -> None:
        if nvrtc.is_noting():  # the library's kernels would run, on an order of pairs that nobody made
            return
        from humming.forward import humming_forward

        per_row = scales.shape[1] == 1
        tuned = self.tuned(pairs, per_row, "expert_layout" in order)
        humming_forward(
            self.configs[per_row],
            codes.view(torch.float8_e4m3fn),
            self.weight,
            weight_scale=self.scale,
            weight_scale_2=self.scale_2,
            input_scale=scales,
            outputs=out,
            locks=self.locks,
            top_k=pairs_per_row,
            compute_config=tuned.compute,
            tuning_config=tuned.tuning,
            use_pdl=False,
            **order,
        )


class HummingExperts(RoutedExperts):
    """Routed experts of one layer; takes the packed weights over and repacks them in place."""

    wants_codes = True

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        num_selected: int,
        limit: float,
        precision: Precision = "faithful",
        batch_invariant: bool = False,
    ) -> None:
        num_experts, hidden = down.codes.shape[:2]
        super().__init__(num_experts, hidden, down.codes.shape[2] * 2, num_selected, limit)
        self.precision = precision
        self.gate_up = _Product(gate_up, torch.float16, batch_invariant)
        self.down = _Product(down, torch.bfloat16, batch_invariant)

    def is_fast(self, rows: int) -> bool:
        """Whether a step of so many rows rounds coarser; never where a row must not depend on the others."""
        return self.precision == "fast" and rows >= _FAST_ROWS and not self.gate_up.batch_invariant

    def block_of(self, rows: int) -> int:
        if self.is_fast(rows):
            return 1
        return self.gate_up.tuned(rows * self.num_selected, False, False).block

    def forward(self, inputs: ExpertInput, routing: Routing, shared_gate_up: Tensor | None = None) -> ExpertOutput:
        way = self._fast if self.is_fast(inputs.x.shape[0]) else self._faithful
        return way(inputs, routing, shared_gate_up)

    def _faithful(self, inputs: ExpertInput, routing: Routing, shared: Tensor | None) -> ExpertOutput:
        rows, top, device = inputs.x.shape[0], self.num_selected, inputs.x.device
        pairs = rows * top
        if inputs.codes is None or inputs.scales is None:
            codes, scales = quantize_activation(inputs.x)
        else:
            is_bytes = inputs.scales.dtype == torch.uint8
            codes, scales = inputs.codes, scales_from_bytes(inputs.scales) if is_bytes else inputs.scales
        gate_up = torch.empty(pairs, 2 * self.width, dtype=self.gate_up.out_dtype, device=device)
        blocks = self._blocks(routing, self.block_of(rows))
        order = {"sorted_ids": blocks.ordered, "expert_ids": blocks.block_expert}
        self.gate_up.run(codes, scales, gate_up, pairs, top, num_tokens_padded=blocks.num_ordered, **order)
        values = torch.empty(pairs, self.hidden, dtype=torch.bfloat16, device=device)
        shared_inner = None
        if shared is not None:
            shared_inner = torch.empty(rows, self.width, dtype=torch.bfloat16, device=device)
        codes, scales = swiglu_quantized(
            gate_up, self.limit, routing.weights, experts=routing.experts, clear=values,
            shared=shared, shared_out=shared_inner,
        )  # fmt: skip
        down_block = self.down.tuned(pairs, False, False).block
        if down_block != blocks.block:
            blocks = self._blocks(routing, down_block)
            order = {"sorted_ids": blocks.ordered, "expert_ids": blocks.block_expert}
        self.down.run(codes, scales, values, pairs, 1, num_tokens_padded=blocks.num_ordered, **order)
        return ExpertOutput(values, None, shared_inner)

    def _fast(self, inputs: ExpertInput, routing: Routing, shared: Tensor | None) -> ExpertOutput:
        """One activation scale per row, pairs gathered in the order of their experts."""
        top, device = self.num_selected, inputs.x.device
        pairs = inputs.x.shape[0] * top
        blocks = self._blocks(routing, 1)
        codes, scales = quantize_activation(inputs.x, per_row=True, order=blocks, pairs_per_row=top)
        gate_up = torch.empty(pairs, 2 * self.width, dtype=self.gate_up.out_dtype, device=device)
        self.gate_up.run(codes, scales, gate_up, pairs, 1, expert_layout=blocks.offsets)
        codes, scales = swiglu_quantized(gate_up, self.limit, routing.weights, per_row=True, order=blocks)
        values = torch.empty(pairs, self.hidden, dtype=torch.bfloat16, device=device)
        self.down.run(codes, scales, values, pairs, 1, expert_layout=blocks.offsets)
        return ExpertOutput(values, blocks.place, self._shared(shared))
