"""The routed experts by our own kernels for Hopper: FP4 weights decoded to exact bf16, sums in float32.

Few rows: two launches, bound by reading the weights once (``moe_skinny.cu``). Many rows: tensor cores at full width
(``moe_wgmma.cu``). Both read one packed copy of the weights (:mod:`.packing`) and are exact but for their float32 sums,
whose order does not depend on the batch within either. With precision ``fast`` many rows take the FP8 tensor cores
(:mod:`.grouped_fp8`): the same operands, sums of fewer bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.moe import packing
from deepinfer.kernels.moe.expert_inputs import round_activation
from deepinfer.kernels.moe.experts import ExpertInput, ExpertOutput, PackedExperts, Precision, RoutedExperts
from deepinfer.kernels.moe.grouped_fp8 import GroupedFp8Experts
from deepinfer.kernels.moe.grouped_skinny import GroupedSkinny, Plan, SharedActivation, new_output
from deepinfer.kernels.moe.grouped_wgmma import FEW_PAIRS, GroupedExperts
from deepinfer.kernels.moe.router import Routing

PLANS: tuple[tuple[int, float, Plan, Plan], ...] = (
    (6, 0, Plan(1, 5, 1, 20, evict_first=True, ahead=True), Plan(1, 3, 2, 12, evict_first=True)),
    (24, 0, Plan(1, 2, 2, evict_first=True), Plan(1, 2, 2, evict_first=True)),
    (96, 0, Plan(1, 2, 2, 20, evict_first=True), Plan(1, 2, 2, 20, evict_first=True)),
    (0, 5, Plan(1, 1, 2, 20), Plan(1, 1, 2, 20)),
    (0, 11, Plan(2, 1, 2), Plan(2, 1, 2)),
    (0, 16, Plan(3, 1, 2, 12), Plan(3, 1, 2, 12)),
)
"""(most pairs, most pairs per expert, plan of gate-up, plan of down) for steps with few pairs per expert: the first of
whose limits one holds. Above, the kernels for many: from a length of prompts on that a start meets on both sides
(``deepinfer/worker/warm_up.py``), since kernels that follow differ, too.

From 320 rows of the released size on, fastest on an H200 under lasting load (``bench/gpu/lasting_load.py``, records in
``bench/results/h200_experts_instructions.json``), milliseconds of a whole layer with blocks of 8, 16, 24 pairs and with
the kernels for many: 2.33, 2.31 for 320 rows (5 pairs per expert); 2.48, 2.39 for 384; 2.46, 2.55, 3.07 (16, 24, many)
for 510; 2.69, 2.74, 3.19 for 642; 3.84, 3.38, 3.65 for 1,026; 4.75, 4.32 (24, many) for 1,536. For fewer rows both
products take 37 us for 1 row, 206 for 8, 658 for 32, 1,037 for 64, 1,618 for 256 (``bench/gpu/check_experts.py``)."""

MIN_FP8_PAIRS = 48
"""Fewest pairs per expert for which the FP8 tensor cores are faster, with gather and sum, 384 experts of the released
size on an H200 (``bench/gpu/check_grouped_fp8.py``): 2.8 against 2.4 ms with 16 pairs, 3.4 against 3.8 with 64, 5.3
against 6.2 with 128."""


def row_limits(num_experts: int, num_selected: int) -> tuple[int, ...]:
    """Numbers of rows up to which an entry of :data:`PLANS` serves, or a tile or precision of the kernels for many."""
    pairs = [max(most, most_per_expert * num_experts) for most, most_per_expert, *_ in PLANS]
    pairs += [FEW_PAIRS * num_experts, MIN_FP8_PAIRS * num_experts - 1]
    return tuple(sorted({int(most // num_selected) for most in pairs}))


def is_usable(gate_up: PackedExperts, down: PackedExperts) -> bool:
    """Whether the kernels take these sizes and scales, on this device."""
    for part in (gate_up, down):
        n, half = part.codes.shape[1:]
        if not packing.accepts(n, 2 * half, part.codes.device) or int(part.scales.max()) > packing.MAX_SCALE_BYTE:
            return False
    return True


def repack(weights: PackedExperts, *, is_paired: bool) -> Tensor:
    """All experts' tiles ``[experts, K / 64, N / 64, 2176]``, in the memory of ``weights`` where that is one piece."""
    num_experts, n, half = weights.codes.shape
    shape = num_experts, 2 * half // packing.TILE, n // packing.TILE, packing.TILE_BYTES
    if weights.memory is None:
        packed = torch.empty(shape, dtype=torch.uint8, device=weights.codes.device)
    else:
        packed = weights.memory.view(shape)
    for expert in range(num_experts):
        codes, scales = weights.codes[expert], weights.scales[expert]
        if weights.memory is not None:
            codes, scales = codes.clone(), scales.clone()
        packing.pack_expert(codes, scales, packed[expert], is_paired=is_paired)
    return packed


class HopperExperts(RoutedExperts):
    """Routed experts of one layer; takes the packed weights over and repacks them in place.

    Args:
        batch_invariant: one order of summation for every number of rows: all take the kernels for many, in bf16.
        precision: ``fast`` takes FP8 for many rows, unless ``batch_invariant``.
    """

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        num_selected: int,
        limit: float,
        batch_invariant: bool = False,
        precision: Precision = "faithful",
    ) -> None:
        num_experts, hidden = down.codes.shape[:2]
        super().__init__(num_experts, hidden, down.codes.shape[2] * 2, num_selected, limit)
        self.batch_invariant = batch_invariant
        tiles, of_down = repack(gate_up, is_paired=True), repack(down, is_paired=False)
        if tiles.is_cuda:
            torch.cuda.synchronize(tiles.device)  # the kernels read weights before they wait for others
        self.gate_up, self.down = GroupedSkinny(tiles, num_selected, limit), GroupedSkinny(of_down, 1)
        self.many = GroupedExperts(tiles, of_down, hidden, self.width, num_experts, limit)
        self.fast = GroupedFp8Experts(tiles, of_down, limit) if precision == "fast" and not batch_invariant else None
        self.uses_fast = self.fast is not None
        """May be switched off to compare."""

    def plans(self, rows: int) -> tuple[Plan, Plan] | None:
        """Of gate-up and down; None where the kernels for many rows multiply."""
        if self.batch_invariant:
            return None
        pairs = rows * self.num_selected
        return next(
            (
                (gate_up, down)
                for most, most_per_expert, gate_up, down in PLANS
                if pairs <= max(most, most_per_expert * self.num_experts)
            ),
            None,
        )

    def block_of(self, rows: int) -> int:
        plans = self.plans(rows)
        return plans[0].block if plans is not None else self._many(rows).block

    def _many(self, rows: int) -> GroupedExperts | GroupedFp8Experts:
        pairs = rows * self.num_selected
        if self.fast is not None and self.uses_fast and pairs >= MIN_FP8_PAIRS * self.num_experts:
            return self.fast
        return self.many

    def row_limits(self) -> tuple[int, ...]:
        return row_limits(self.num_experts, self.num_selected)

    def takes_row_codes(self, rows: int) -> bool:
        return self.plans(rows) is None and self._many(rows) is self.fast

    def forward(self, inputs: ExpertInput, routing: Routing, shared_gate_up: Tensor | None = None) -> ExpertOutput:
        rows = inputs.x.shape[0]
        plans = self.plans(rows)
        if plans is None:
            values, place = self._forward_many(inputs, routing)
            return ExpertOutput(values, place, self._shared(shared_gate_up))
        x = _rounded(inputs)
        shared = None
        if shared_gate_up is not None:
            shared = SharedActivation(shared_gate_up, x.new_empty(rows, self.width))
        blocks = self._blocks(routing, plans[0].block)
        inner = new_output(rows * self.num_selected, self.gate_up)
        # The kernel before the first is the shared expert's product, behind the router. It lets this one begin when it
        # has waited for the order.
        is_behind = shared is not None and routing.blocks is blocks
        self.gate_up(x, blocks, inner, plans[0], weights=routing.weights, shared=shared, early=is_behind)
        values = new_output(rows * self.num_selected, self.down)
        self.down(inner, blocks, values, plans[1], early=True)
        return ExpertOutput(values, None, None if shared is None else shared.out, is_inner_older=True)

    def _forward_many(self, inputs: ExpertInput, routing: Routing) -> tuple[Tensor, Tensor]:
        many = self._many(len(inputs.x))
        blocks = self._blocks(routing, many.block)
        if isinstance(many, GroupedExperts):
            return many.forward(_rounded(inputs), routing.experts, routing.weights, blocks)
        x = _rounded(inputs) if inputs.row_codes is None else inputs.row_codes
        return many.forward(x, routing.experts, routing.weights, blocks)


def _rounded(inputs: ExpertInput) -> Tensor:
    return round_activation(inputs.x) if inputs.rounded is None else inputs.rounded
