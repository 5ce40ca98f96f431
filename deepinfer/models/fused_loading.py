"""The fused model from any source of weights: experts stacked and repacked once, n-gram tables where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from deepinfer.checkpoint.device_loader import DeviceLoader, copy_table
from deepinfer.config.model import ModelConfig, TextConfig
from deepinfer.kernels.engram.placement import DeviceTable, EngramPlacement, MappedTable, PinnedTable, pinned_bytes
from deepinfer.kernels.moe.experts import PackedExperts, RoutedExperts, build_experts
from deepinfer.layers.fused.engram import ngram_hash
from deepinfer.layers.fused.weights import PackedSource
from deepinfer.models.fused_dspark import FusedDSpark
from deepinfer.models.fused_v41 import FusedV41, MakeExperts
from deepinfer.ops.numerics import Numerics

Precision = Literal["faithful", "fast"]
TablePlace = Literal["device", "pinned", "mapped"]


def expert_maker(
    loader: DeviceLoader, config: TextConfig, precision: Precision, invariant: bool = False
) -> MakeExperts:
    """Builds the routed experts of a block from its stacked weights, which are let go afterwards."""

    def make(source: PackedSource, num_experts: int) -> RoutedExperts:
        block, width = source.prefix.removesuffix(".ffn."), config.moe_intermediate_size
        is_draft = block.startswith("mtp.")
        gate_up = PackedExperts.empty(num_experts, 2 * width, config.hidden_size, loader.device)
        for row, name in ((0, "w1"), (width, "w3")):
            stack = loader.expert_stack(block, name)
            gate_up.codes[:, row : row + width] = stack.codes
            gate_up.scales[:, row : row + width] = stack.scales
            del stack
        stack = loader.expert_stack(block, "w2")
        num_selected = config.dspark_num_experts_per_tok if is_draft else config.num_experts_per_tok
        down = PackedExperts.of_stack(stack.codes, stack.scales)
        del stack
        return build_experts(
            gate_up, down, num_selected, config.swiglu_limit, precision=precision, batch_invariant=invariant
        )

    return make


def load_fused(
    config: ModelConfig,
    loader: DeviceLoader,
    device: torch.device,
    *,
    precision: Precision = "faithful",
    token_map: Tensor | None = None,
    num_compressed: int | None = None,
    table_place: TablePlace = "device",
    max_rows: int = 8192,
    invariant: bool = False,
    on_layer: Callable[[int], None] = lambda done: None,
) -> FusedV41:
    """Load the backbone.

    Args:
        token_map: ``[vocab]`` int64 compressed vocabulary, its size in ``num_compressed``; default every id is its own.
        table_place: memory of the n-gram tables.
        max_rows: rows of the largest step.
        invariant: a row's result does not depend on the rest of the batch.
    """
    text = config.text
    if token_map is None or num_compressed is None:
        token_map, num_compressed = torch.arange(text.vocab_size), text.vocab_size
    vocabulary = token_map.to(device)

    def place(layer_id: int) -> EngramPlacement:
        table = loader.engram_table(layer_id)
        constants = ngram_hash(text, layer_id, vocabulary, num_compressed)
        if table_place == "mapped":
            return MappedTable(table, constants, max_rows)
        shape = (table.rows, table.width)
        if table_place == "pinned":
            codes, scales = pinned_bytes(*shape), pinned_bytes(shape[0], shape[1] // 32)
            copy_table(table, codes, scales)
            return PinnedTable(codes, scales, constants, max_rows)
        codes = torch.empty(shape, dtype=torch.uint8, device=device)
        scales = torch.empty((shape[0], shape[1] // 32), dtype=torch.uint8, device=device)
        copy_table(table, codes, scales)
        return DeviceTable(codes, scales, constants, max_rows)

    numerics = Numerics.from_mode("faithful")
    experts = expert_maker(loader, text, precision, invariant)
    return FusedV41(text, loader, numerics, device, experts, place, on_layer, invariant, precision == "fast")


def load_fused_draft(backbone: FusedV41, loader: DeviceLoader, precision: Precision = "faithful") -> FusedDSpark:
    """Load the draft behind its backbone."""
    experts = expert_maker(loader, backbone.config, precision, backbone.invariant)
    return FusedDSpark(backbone, loader, experts)
