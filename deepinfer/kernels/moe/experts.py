"""The routed experts of one layer on the GPU: their packed weights and the choice of who multiplies."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer.checkpoint.stored import StoredTensor
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.kernels.moe import packing
from deepinfer.kernels.moe.expert_blocks import ExpertBlocks, order_pairs
from deepinfer.kernels.moe.expert_inputs import round_activation
from deepinfer.kernels.moe.experts_triton import grouped_product
from deepinfer.kernels.moe.router import Routing
from deepinfer.kernels.moe.swiglu import swiglu_rounded

Precision = Literal["faithful", "fast"]
"""``faithful``: activations rounded by Q8 as the model says. ``fast``: in prefill the library takes a scale per row and
our kernels for Hopper the FP8 tensor cores (:mod:`.grouped_fp8`); the other ways round as ``faithful`` does."""


Way = Literal["hopper", "library", "triton"]
"""Who multiplies: :mod:`.experts_hopper`, :mod:`.experts_humming` or :mod:`.experts_triton`."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One matrix of every expert, as the checkpoint packs it."""

    codes: Tensor
    """uint8 ``[experts, N, K / 2]``: two e2m1 codes per byte, the even column in the low nibble."""
    scales: Tensor
    """uint8 ``[experts, N, K / 32]``: ue8m0."""
    memory: Tensor | None = None
    """uint8 ``[experts, bytes]``: codes and scales are views of it, so that an expert can be repacked in its place."""

    @classmethod
    def empty(cls, num_experts: int, n: int, k: int, device: torch.device) -> PackedExperts:
        """Room for all experts: in one piece for each where they will be repacked."""
        num_codes, num_scales = n * k // 2, n * k // 32
        if not packing.accepts(n, k, device):
            codes = torch.empty(num_experts, n, k // 2, dtype=torch.uint8, device=device)
            return cls(codes, torch.empty(num_experts, n, k // 32, dtype=torch.uint8, device=device))
        memory = torch.empty(num_experts, num_codes + num_scales, dtype=torch.uint8, device=device)
        codes, scales = memory.split([num_codes, num_scales], dim=1)
        return cls(codes.unflatten(1, (n, k // 2)), scales.unflatten(1, (n, k // 32)), memory)

    @classmethod
    def of_stack(cls, codes: Tensor, scales: Tensor) -> PackedExperts:
        """Of stacked tensors, copied where they will be repacked in one piece."""
        num_experts, n, half = codes.shape
        if not packing.accepts(n, 2 * half, codes.device):
            return cls(codes, scales)
        packed = cls.empty(num_experts, n, 2 * half, codes.device)
        packed.codes.copy_(codes)
        packed.scales.copy_(scales)
        return packed

    def apart(self) -> PackedExperts:
        """Codes and scales as dense tensors."""
        return self if self.memory is None else PackedExperts(self.codes.contiguous(), self.scales.contiguous())

    def put(self, expert: int, row: int, tensor: StoredTensor) -> None:
        """Copy one stored FP4 matrix to the rows of ``expert`` from ``row`` on."""
        assert tensor.scale is not None, tensor.name
        stop = row + tensor.shape[0]
        self.codes[expert, row:stop].copy_(tensor.data, non_blocking=True)
        self.scales[expert, row:stop].copy_(tensor.scale.view(torch.uint8), non_blocking=True)


@dataclass(frozen=True, slots=True)
class ExpertInput:
    """The experts' normed input. Codes and scales save a launch where :attr:`RoutedExperts.wants_codes`."""

    x: Tensor
    """bf16 ``[rows, hidden]``, not rounded by Q8 (the ``fast`` products round it in their own way)."""
    codes: Tensor | None = None
    """uint8 ``[rows, hidden]``: e4m3 codes of Q8."""
    scales: Tensor | None = None
    """``[rows, hidden / 32]``: Q8's scales, as float32 or as ue8m0 bytes (uint8, one launch more)."""
    rounded: Tensor | None = None
    """bf16 ``[rows, hidden]``: x rounded by Q8; saves a launch where codes are not wanted."""
    row_codes: RowCodes | None = None
    """``rounded`` as codes with one scale per row; in its place where :meth:`RoutedExperts.takes_row_codes`."""


@dataclass(frozen=True, slots=True)
class ExpertOutput:
    """What the routed experts return, before the sum over a row's experts."""

    values: Tensor
    """bf16 ``[pairs, hidden]``, each rounded; rows of pairs of expert -1 are undefined."""
    place: Tensor | None
    """int32 ``[pairs]``: the row of ``values`` of each pair, -1 for none; None if rows stand in the pairs' order."""
    shared_inner: Tensor | None = None
    """bf16 ``[rows, width]``: the shared expert's rounded activation, where its gate and up were given."""
    is_inner_older: bool = False
    """Whether ``shared_inner`` was complete when the last kernel began, so a product may read it beside that."""


class RoutedExperts(abc.ABC):
    """The routed experts of one layer."""

    wants_codes: bool = False
    """Whether the input is best given as codes and scales."""

    def __init__(self, num_experts: int, hidden: int, width: int, num_selected: int, limit: float) -> None:
        self.num_experts, self.hidden, self.width = num_experts, hidden, width
        self.num_selected, self.limit = num_selected, limit

    @abc.abstractmethod
    def block_of(self, rows: int) -> int:
        """Pairs per block in which the router should order a step of ``rows`` rows; 0 for no order."""

    def row_limits(self) -> tuple[int, ...]:
        """Numbers of rows up to which one set of kernels serves, where they depend on the number of experts."""
        return ()

    def takes_row_codes(self, rows: int) -> bool:
        """Whether an input of ``rows`` rows may be given as codes with one scale per row alone."""
        del rows
        return False

    @abc.abstractmethod
    def forward(self, inputs: ExpertInput, routing: Routing, shared_gate_up: Tensor | None = None) -> ExpertOutput:
        """Every pair's expert output. ``routing`` comes from the router with ``block_of(rows)``, or without blocks.

        Args:
            shared_gate_up: float32 ``[rows, 2 * width]`` of the shared expert: its activation is made along the way.
        """

    def _shared(self, gate_up: Tensor | None) -> Tensor | None:
        return None if gate_up is None else swiglu_rounded(gate_up, self.limit)

    def _blocks(self, routing: Routing, block: int) -> ExpertBlocks:
        if routing.blocks is not None and routing.blocks.block == block:
            return routing.blocks
        return order_pairs(routing.experts, self.num_experts, block)


class TritonExperts(RoutedExperts):
    """Products by :mod:`.experts_triton`: exact, any width, the weights as they are stored.

    Args:
        batch_invariant: one block size for every number of rows, because it decides how the tensor cores sum.
    """

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        num_selected: int,
        limit: float,
        batch_invariant: bool = False,
    ) -> None:
        num_experts, hidden = down.codes.shape[:2]
        super().__init__(num_experts, hidden, down.codes.shape[2] * 2, num_selected, limit)
        self.gate_up, self.down, self.batch_invariant = gate_up, down, batch_invariant

    def block_of(self, rows: int) -> int:
        return 16 if self.batch_invariant or rows * self.num_selected <= 16 * self.num_experts else 64

    def forward(self, inputs: ExpertInput, routing: Routing, shared_gate_up: Tensor | None = None) -> ExpertOutput:
        rows = inputs.x.shape[0]
        blocks = self._blocks(routing, self.block_of(rows))
        x = round_activation(inputs.x) if inputs.rounded is None else inputs.rounded
        gate_up = grouped_product(x, self.gate_up.codes, self.gate_up.scales, blocks, self.num_selected, torch.float32)
        values = torch.empty(rows * self.num_selected, self.hidden, dtype=torch.bfloat16, device=x.device)
        inner = swiglu_rounded(gate_up, self.limit, routing.weights, experts=routing.experts, clear=values)
        grouped_product(inner, self.down.codes, self.down.scales, blocks, 1, torch.bfloat16, out=values)
        return ExpertOutput(values, None, self._shared(shared_gate_up))


def pack_experts(
    num_experts: int,
    hidden: int,
    width: int,
    stored: Callable[[int, str], StoredTensor],
    device: torch.device,
) -> tuple[PackedExperts, PackedExperts]:
    """Gate-up (gate rows first) and down matrices of all experts; beside them only one stored tensor is alive.

    ``stored(expert, name)`` returns ``w1``, ``w3`` or ``w2`` of an expert.
    """
    gate_up = PackedExperts.empty(num_experts, 2 * width, hidden, device)
    down = PackedExperts.empty(num_experts, hidden, width, device)
    for expert in range(num_experts):
        gate_up.put(expert, 0, stored(expert, "w1"))
        gate_up.put(expert, width, stored(expert, "w3"))
        down.put(expert, 0, stored(expert, "w2"))
    return gate_up, down


def build_experts(
    gate_up: PackedExperts,
    down: PackedExperts,
    num_selected: int,
    limit: float,
    *,
    precision: Precision = "faithful",
    way: Way | None = None,
    batch_invariant: bool = False,
) -> RoutedExperts:
    """Choose who multiplies; the packed tensors belong to the result, which may repack them in place.

    Args:
        precision: matters to the library and our own kernels, in prefill.
        way: default the first that takes these sizes, weights and device.
        batch_invariant: a row's result does not depend on the rest of the batch.
    """
    from deepinfer.kernels.moe import experts_hopper, experts_humming  # they need this module

    if way is None and experts_hopper.is_usable(gate_up, down):
        way = "hopper"
    elif way is None:
        way = "library" if experts_humming.is_usable(gate_up, down) else "triton"
    if way == "hopper":
        return experts_hopper.HopperExperts(gate_up, down, num_selected, limit, batch_invariant, precision)
    if way == "library":
        return experts_humming.HummingExperts(
            gate_up.apart(), down.apart(), num_selected, limit, precision, batch_invariant
        )
    return TritonExperts(gate_up.apart(), down.apart(), num_selected, limit, batch_invariant)
