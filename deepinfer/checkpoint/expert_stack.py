"""All routed experts of one block as one tensor: the form that grouped products read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.checkpoint.stored import StoredTensor, TensorSource
from deepinfer.checkpoint.tensor_specs import TensorSpec
from deepinfer.errors import CheckpointError

_DRAFT_BLOCK = re.compile(r"mtp\.\d+")


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One projection (``w1``, ``w2`` or ``w3``) of every routed expert of a block, in stored FP4 form."""

    codes: Tensor
    """uint8 ``[experts, out, in / 2]``: packed e2m1, even column in the low nibble."""
    scales: Tensor
    """uint8 ``[experts, out, in / 32]``: ue8m0 bytes."""

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel()


def expert_name(block: str, expert: int, projection: str) -> str:
    """Canonical name of an expert's weight; ``block`` is ``layers.L`` or ``mtp.I``."""
    return f"{block}.ffn.experts.{expert}.{projection}.weight"


def expert_specs(source: TensorSource, block: str, projection: str) -> list[TensorSpec]:
    """Specs of one projection of all experts of a block, in expert order.

    Raises:
        CheckpointError: the block or the projection does not exist in the loaded parts.
    """
    text = source.config.text
    count = text.dspark_n_routed_experts if _DRAFT_BLOCK.fullmatch(block) else text.n_routed_experts
    return [source.spec(expert_name(block, expert, projection)) for expert in range(count)]


def empty_stack(specs: list[TensorSpec], device: torch.device) -> ExpertStack:
    """Uninitialised memory for the experts of ``specs``, which all have one shape."""
    first = specs[0]
    assert first.scale_shape is not None, f"{first.name} is not FP4"
    assert all(spec.shape == first.shape for spec in specs), f"experts beside {first.name} differ in shape"

    def empty(shape: tuple[int, ...]) -> Tensor:
        return torch.empty((len(specs), *shape), dtype=torch.uint8, device=device)

    return ExpertStack(empty(first.stored_shape), empty(first.scale_shape))


def read_expert_stack(
    source: TensorSource,
    block: str,
    projection: str,
    device: torch.device,
    on_read: Callable[[StoredTensor], None] = lambda stored: None,
) -> ExpertStack:
    """Read expert by expert into one allocation on ``device``: at most one expert's weight is held beside it.

    Args:
        source: a checkpoint.
        block: ``layers.L`` or ``mtp.I``.
        projection: ``w1``, ``w2`` or ``w3``.
        on_read: called with every tensor that was read, for progress.
    Raises:
        CheckpointError: as :meth:`TensorSource.tensor`, or a tensor is not FP4.
    """
    specs = expert_specs(source, block, projection)
    stack = empty_stack(specs, device)
    order = source.load_order([spec.name for spec in specs])
    number_of = {spec.name: number for number, spec in enumerate(specs)}
    for name in order:
        stored = source.tensor(name)
        if stored.scale is None:
            raise CheckpointError(
                f"{name} is stored as {stored.kind.value}",
                why="routed experts are multiplied in FP4",
                fix="use a checkpoint whose experts are FP4",
            )
        number = number_of[name]
        stack.codes[number].copy_(stored.data)
        stack.scales[number].copy_(stored.scale)
        on_read(stored)
    return stack
