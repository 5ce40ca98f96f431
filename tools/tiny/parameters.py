"""The trainable tensors, stacked over layers, and their way to checkpoint names and back.

A stack holds the tensors of one kind of all layers that own one: ``attn.wq_a.weight`` of ten layers is one parameter
``[10, 128, 256]``, the experts of all layers one ``[10, 8, 96, 256]``. So rounding and the optimiser work on some
forty tensors instead of six hundred.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer.checkpoint import Kind, TensorSpec, expected_tensors
from deepinfer.config.model import ModelConfig
from tools.tiny.fake_quant import bf16_weight, fp4_weight, fp8_weight, table_rows

_LAYER = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(.+)")
_ROUND = {Kind.FP8: fp8_weight, Kind.FP4: fp4_weight, Kind.BF16: bf16_weight, Kind.TABLE: table_rows}


@dataclass(slots=True)
class Stack:
    """What one parameter holds."""

    kind: Kind
    shape: tuple[int, ...]
    owners: list[int]
    """Layers or stages in order; empty for a tensor that exists once."""
    num_experts: int
    """0: not a tensor of routed experts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor lies: a stack, and the layer and expert in it."""

    key: str
    owner: int | None
    expert: int | None


def place_of(name: str) -> Place:
    """``layers.3.ffn.experts.5.w1.weight`` -> stack ``layers.ffn.experts.w1.weight``, owner 3, expert 5."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return Place(name, None, None)
    part, owner, rest = layer.group(1), int(layer.group(2)), layer.group(3)
    if rest == "engram.embed.weight":  # tables differ in their number of rows
        return Place(name, None, None)
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return Place(f"{part}.{rest}", owner, None)
    return Place(f"{part}.ffn.experts.{expert.group(2)}", owner, int(expert.group(1)))


def plan_stacks(specs: Iterable[TensorSpec]) -> dict[str, Stack]:
    """All stacks of a model, by key."""
    stacks: dict[str, Stack] = {}
    for spec in specs:
        place = place_of(spec.name)
        stack = stacks.setdefault(place.key, Stack(spec.kind, spec.shape, [], 0))
        if place.owner is not None and place.owner not in stack.owners:
            stack.owners.append(place.owner)
        if place.expert is not None:
            stack.num_experts = max(stack.num_experts, place.expert + 1)
    return stacks


class StackedParameters(nn.Module):
    """Trainable tensors of one model, float32.

    Args:
        config: the model.
        seed: of the initial values.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self._specs = expected_tensors(config)
        self.stacks = plan_stacks(self._specs.values())
        generator = torch.Generator().manual_seed(seed)
        self._by_key = nn.ParameterDict()
        for key, stack in self.stacks.items():
            values = initial_values(key, stack, generator)
            is_trained = not key.endswith(("gate.bias", "gate.bias_vl"))  # moved by the balancing rule
            self._by_key[key.replace(".", "/")] = nn.Parameter(values, requires_grad=is_trained)

    def __getitem__(self, key: str) -> nn.Parameter:
        return self._by_key[key.replace(".", "/")]

    def items(self, prefix: str = "") -> list[tuple[str, nn.Parameter]]:
        """``(key, parameter)`` of every stack whose key starts with ``prefix``."""
        return [(key, self[key]) for key in self.stacks if key.startswith(prefix)]

    def rounded(
        self, dtype: torch.dtype, *, draft: bool, layers: bool = True, quantise: bool = True
    ) -> dict[str, list[Tensor] | Tensor]:
        """The values that the forward pass uses, per layer: a list by position among the owners, or one tensor.

        Args:
            dtype: of quantised and bf16 weights; both are exact in bf16. F32 tensors keep theirs.
            draft: take the draft's tensors too.
            layers: take the backbone's layers; without them embedding, head and norm are left of it.
            quantise: round to the stored formats; n-gram tables are rounded when rows are read.
        """
        values: dict[str, list[Tensor] | Tensor] = {}
        for key, stack in self.stacks.items():
            if (key.startswith("mtp.") and not draft) or (key.startswith("layers.") and not layers):
                continue
            value: Tensor = self[key]
            if quantise and stack.kind in _ROUND and stack.kind is not Kind.TABLE:
                value = _ROUND[stack.kind](value)
            if stack.kind in (Kind.FP8, Kind.FP4, Kind.BF16):
                value = value.to(dtype)
            values[key] = list(value.unbind(0)) if stack.owners else value
        return values

    def named_tensors(self) -> dict[str, Tensor]:
        """Float values by checkpoint name, for the writer and for the executable specification."""
        tensors = {}
        for name in self._specs:
            place = place_of(name)
            value: Tensor = self[place.key].detach()
            if place.owner is not None:
                value = value[self.stacks[place.key].owners.index(place.owner)]
            if place.expert is not None:
                value = value[place.expert]
            tensors[name] = value
        return tensors


def initial_values(key: str, stack: Stack, generator: torch.Generator) -> Tensor:
    """Fresh values ``[owners, experts, *shape]`` (absent axes left out).

    Projections get the variance of their input width; what writes to the trunk starts small, the n-gram value at
    zero, and hyper-connections as spec 4.2 gives them.
    """
    shape = (*((len(stack.owners),) if stack.owners else ()), *((stack.num_experts,) if stack.num_experts else ()))
    shape += stack.shape
    normal = torch.randn(shape, generator=generator)
    fan_in = stack.shape[-1]
    if key.endswith(("norm.weight", "q_weight", "k_weight")):
        return torch.ones(shape)
    if key.endswith(("gate.bias", "gate.bias_vl", "attn_sink")):
        return torch.zeros(shape)
    if key.endswith("_scale"):
        return torch.full(shape, 0.01)
    if key.endswith("_base"):
        return _hyper_connection_bases(stack)
    if key.endswith("engram.embed.weight"):
        return normal * 0.5
    if key.endswith("engram.wkv.weight"):
        values = normal * fan_in**-0.5
        values[:, -(stack.shape[0] // 5) :] = 0  # the value starts silent, the keys do not
        return values
    if key in ("embed.weight", "head.weight"):
        return normal * (1.0 if key == "embed.weight" else fan_in**-0.5)
    if key.endswith(("markov_head.head.weight", "confidence_head.proj.weight")):
        return torch.zeros(shape)
    if key.endswith(("wo_b.weight", "w2.weight")):
        return normal * fan_in**-0.5 * 0.3
    return normal * fan_in**-0.5


def _hyper_connection_bases(stack: Stack) -> Tensor:
    streams = 4
    bases = []
    for owner in stack.owners:
        read = torch.full((streams,), -3.0)
        read[owner % streams] = 3.0
        carry = torch.full((streams, streams), -3.0).fill_diagonal_(3.0)
        bases.append(torch.cat((read, torch.zeros(streams), carry.flatten())))
    return torch.stack(bases)
