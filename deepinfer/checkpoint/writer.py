"""Write a checkpoint in the released layout: quantise to the stored kinds, cut into shards, write index and config."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint import codecs
from deepinfer.checkpoint.headers import INDEX_NAME
from deepinfer.checkpoint.stored import StoredTensor
from deepinfer.checkpoint.tensor_specs import (
    ITEM_BYTES,
    SCALE_DTYPE,
    Kind,
    Part,
    Shape,
    TensorSpec,
    canonical_name,
    expected_tensors,
)
from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import model_config_to_dict
from deepinfer.errors import CheckpointError

DEFAULT_SHARD_BYTES = 5_000_000_000


def store_tensor(spec: TensorSpec, values: Tensor) -> StoredTensor:
    """Round float values ``[*spec.shape]`` to the kind of ``spec``, with scales chosen from the maxima.

    Raises:
        CheckpointError: the shape is wrong, or values are not finite.
    """
    if tuple(values.shape) != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} has shape {list(values.shape)}",
            why=f"the configuration makes it {list(spec.shape)}",
            fix="write the model with the configuration that it was made with",
        )
    values = values.detach().cpu().float()
    if not torch.isfinite(values).all():
        raise CheckpointError(
            f"tensor {spec.name} holds NaN or infinity", why="no weight may", fix="look at its training"
        )
    if spec.kind is Kind.BF16:
        return StoredTensor(spec.name, spec.kind, spec.shape, values.to(torch.bfloat16), None)
    if spec.kind is Kind.F32:
        return StoredTensor(spec.name, spec.kind, spec.shape, values, None)
    quantize = {
        Kind.FP8: codecs.quantize_fp8_tiles,
        Kind.FP4: codecs.quantize_fp4_rows,
        Kind.TABLE: codecs.quantize_table_rows,
    }[spec.kind]
    codes, scales = quantize(values)
    data = codes if spec.kind is Kind.FP4 else codes.view(torch.float8_e4m3fn)
    return StoredTensor(spec.name, spec.kind, spec.shape, data, scales)


def write_checkpoint(
    directory: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor | StoredTensor],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    prefix: str = "",
) -> None:
    """Write ``config.json``, the shards and their index.

    Args:
        directory: created when absent; files of the same names are replaced.
        config: decides names, shapes and stored kinds.
        tensors: by canonical name (or with ``model.``): float tensors, which are quantised, or stored ones, which are
            written as they are. Text and draft have to be complete; the vision part complete or absent. Values are
            taken one at a time, so a lazy mapping keeps memory low.
        max_shard_bytes: a new shard starts before a tensor that would exceed this; a weight stays with its scale.
        prefix: put before every name in the files, ``""`` or ``"model."``.
    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape or not finite.
    """
    if prefix not in ("", "model."):
        raise CheckpointError(f"prefix is {prefix!r}", why="names have no other prefix", fix="use '' or 'model.'")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    by_name = {canonical_name(name): name for name in tensors}
    specs = _specs_to_write(config, set(by_name))
    shards = _plan_shards(specs, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        slots = _lay_out(shard, prefix)
        stored = (_as_stored(spec, tensors[by_name[spec.name]]) for spec in shard)
        _write_shard(directory / file_name, slots, stored, prefix)
        weight_map.update(dict.fromkeys(slots, file_name))
    total_bytes = sum(spec.num_bytes for spec in specs)
    _write_json(directory / "config.json", model_config_to_dict(config))
    _write_json(
        directory / INDEX_NAME,
        {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _specs_to_write(config: ModelConfig, given: set[str]) -> list[TensorSpec]:
    expected = expected_tensors(config)
    unknown = sorted(given - set(expected))
    has_vision = any(name in given for name, spec in expected.items() if spec.part is Part.VISION)
    specs = [spec for spec in expected.values() if spec.part is not Part.VISION or has_vision]
    missing = [spec.name for spec in specs if spec.name not in given]
    for names, what in ((unknown, "unknown to this configuration"), (missing, "missing")):
        if names:
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise CheckpointError(
                f"cannot write a checkpoint with {len(names)} tensors {what}", why=shown, fix="give exactly its tensors"
            )
    return specs


def _plan_shards(specs: list[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled_bytes = 0
    for spec in specs:
        if shards[-1] and filled_bytes + spec.num_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(spec)
        filled_bytes += spec.num_bytes
    return shards


@dataclass(frozen=True, slots=True)
class _Slot:
    """Place of one tensor in a shard's data."""

    dtype: str
    shape: Shape
    start: int
    num_bytes: int


def _lay_out(specs: list[TensorSpec], prefix: str) -> dict[str, _Slot]:
    """Offsets by stored name: wide elements first, so that every tensor is aligned to its element size."""
    pieces: list[tuple[str, str, Shape, int]] = []
    for spec in specs:
        pieces.append((prefix + spec.name, spec.dtypes[0], spec.stored_shape, spec.data_bytes))
        if spec.scale_name is not None and spec.scale_shape is not None:
            pieces.append((prefix + spec.scale_name, SCALE_DTYPE, spec.scale_shape, spec.scale_bytes))
    pieces.sort(key=lambda piece: -ITEM_BYTES[piece[1]])
    slots: dict[str, _Slot] = {}
    start = 0
    for name, dtype, shape, num_bytes in pieces:
        slots[name] = _Slot(dtype, shape, start, num_bytes)
        start += num_bytes
    return slots


def _as_stored(spec: TensorSpec, value: Tensor | StoredTensor) -> StoredTensor:
    if isinstance(value, Tensor):
        return store_tensor(spec, value)
    if value.kind is not spec.kind or value.shape != spec.shape:
        raise CheckpointError(
            f"tensor {spec.name} is stored as {value.kind.value} {list(value.shape)}",
            why=f"the configuration makes it {spec.kind.value} {list(spec.shape)}",
            fix="give float values instead, they are quantised here",
        )
    return value


def _write_shard(path: Path, slots: dict[str, _Slot], stored: Iterator[StoredTensor], prefix: str) -> None:
    """Write under a temporary name first: a shard with its final name is complete."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, slot in slots.items():
        offsets = [slot.start, slot.start + slot.num_bytes]
        header[name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    data_start = 8 + len(text)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in stored:
            scale_name = tensor.name.removesuffix("weight") + "scale"
            for name, data in ((tensor.name, tensor.data), (scale_name, tensor.scale)):
                if data is None:
                    continue
                slot = slots[prefix + name]
                raw = data.contiguous().reshape(-1).view(torch.uint8)
                assert raw.numel() == slot.num_bytes, f"{name}: {raw.numel()} bytes for a slot of {slot.num_bytes}"
                file.seek(data_start + slot.start)
                file.write(raw.numpy().data)
    os.replace(partial, path)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
