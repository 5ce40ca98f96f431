"""A tensor in the format of the checkpoint, and the interface of everything that supplies such tensors."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from deepinfer.checkpoint import codecs
from deepinfer.checkpoint.engram_table import EngramTable
from deepinfer.checkpoint.tensor_specs import Kind, Part, TensorSpec, canonical_name, engram_table_name
from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored; nothing is rounded on the way from the file.

    ``data`` is float8_e4m3fn ``[O, I]`` (FP8, TABLE), uint8 ``[O, I/2]`` (FP4), bfloat16 or float32. ``scale`` is uint8
    ue8m0 bytes (shapes of spec 3.2) or None. ``shape`` is the logical shape.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    data: Tensor
    scale: Tensor | None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values ``[*shape]``, a new tensor. Exact in float32 and float64, and for quantised kinds in bfloat16.

        Raises:
            ValueError: ``dtype`` cannot hold the values of a quantised kind (float16).
        """
        if self.scale is None:
            return self.data.to(dtype, copy=True)
        if self.kind is Kind.FP8:
            return codecs.dequantize_fp8_tiles(self.data, self.scale, dtype)
        if self.kind is Kind.FP4:
            return codecs.dequantize_fp4_rows(self.data, self.scale, dtype)
        return codecs.dequantize_table_rows(self.data, self.scale, dtype)

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Rows ``[start, stop)`` in stored form (views).

        Raises:
            ValueError: an FP8 slice starts inside a tile or the range is not inside the tensor.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start} to {stop} are not inside {self.name} with {self.shape[0]} rows")
        scale = self.scale
        if scale is not None and self.kind is Kind.FP8:
            if start % codecs.GROUP != 0:
                raise ValueError(f"row {start} of {self.name} is inside a 32x32 tile: start at a multiple of 32")
            scale = scale[start // codecs.GROUP : -(-stop // codecs.GROUP)]
        elif scale is not None:
            scale = scale[start:stop]
        return StoredTensor(self.name, self.kind, (stop - start, *self.shape[1:]), self.data[start:stop], scale)

    def row(self, index: int) -> Tensor:
        """Values of one row in float32, ``[*shape[1:]]``."""
        start = index // codecs.GROUP * codecs.GROUP if self.kind is Kind.FP8 else index
        return self.rows(start, index + 1).dequantize()[index - start]

    @property
    def num_bytes(self) -> int:
        scale_bytes = 0 if self.scale is None else self.scale.numel()
        return self.data.numel() * self.data.element_size() + scale_bytes


def check_scales(name: str, scales: Tensor) -> None:
    """Refuse ue8m0 byte 255: it is NaN and would poison a whole tile (spec 0.1)."""
    if scales.numel() and int(scales.max()) == codecs.UE8M0_NAN:
        count = int((scales == codecs.UE8M0_NAN).sum())
        raise CheckpointError(
            f"scale of {name} holds byte 255 in {count} of {scales.numel()} places",
            why="in ue8m0 that is NaN, which no weight may have",
            fix="download the shard again; a converter that writes 255 is broken",
        )


MAX_TABLE_BYTES = 256 * 2**20
"""Largest n-gram table that is handed out as one tensor; the released ones have 101 GB each."""


def is_large_table(spec: TensorSpec) -> bool:
    return spec.kind is Kind.TABLE and spec.num_bytes > MAX_TABLE_BYTES


def refuse_large_table(spec: TensorSpec) -> None:
    """Raise CheckpointError for a table that does not belong in memory."""
    if is_large_table(spec):
        raise CheckpointError(
            f"table {spec.name} with {spec.num_bytes / 1e9:.0f} GB was asked for as one tensor",
            why=f"tables above {MAX_TABLE_BYTES / 1e9:.2f} GB are never copied to memory",
            fix="fetch rows with engram_table(layer_id).gather(ids)",
        )


class TensorSource(abc.ABC):
    """Supplies a model's tensors by canonical name: a checkpoint on disk, or synthetic weights."""

    def __init__(self, config: ModelConfig, specs: dict[str, TensorSpec], parts: frozenset[Part]) -> None:
        self.config = config
        self.specs = specs
        """Specs of the tensors of ``parts``, in model order."""
        self.parts = parts

    @abc.abstractmethod
    def tensor(self, name: str, *, mapped: bool = False) -> StoredTensor:
        """One tensor. Both spellings of the name work.

        Args:
            name: canonical name, or with ``model.`` before it.
            mapped: where there are files, leave the data in the page cache (copy on write) instead of reading it into
                memory of its own: for models larger than memory.
        Raises:
            CheckpointError: there is no such tensor in these parts, its scales hold NaN, or it is a table too large
                for memory (use :meth:`engram_table`).
        """

    @abc.abstractmethod
    def engram_table(self, layer_id: int) -> EngramTable:
        """The n-gram table of a layer; rows are fetched on demand. Raises CheckpointError if the layer has none."""

    def spec(self, name: str) -> TensorSpec:
        """Spec by either spelling. Raises CheckpointError for an unknown name."""
        spec = self.specs.get(canonical_name(name))
        if spec is None:
            parts = ", ".join(sorted(part.value for part in self.parts))
            raise CheckpointError(
                f"tensor {name} was asked for",
                why=f"the loaded parts ({parts}) have no such tensor",
                fix="check the name, or load the part that holds it",
            )
        return spec

    def table_spec(self, layer_id: int) -> TensorSpec:
        return self.spec(engram_table_name(layer_id))

    def load_order(self, names: Iterable[str]) -> list[str]:
        """``names`` in the order that is cheapest to read."""
        return list(names)

    def load_all(
        self, names: Iterable[str] | None = None, *, progress: bool = True, mapped: bool = False
    ) -> Iterator[StoredTensor]:
        """Yield tensors in reading order, with a progress bar in bytes and a closing log line.

        Args:
            names: canonical names; default all but the n-gram tables, which stay on disk.
            progress: show the bar on stderr.
            mapped: as for :meth:`tensor`.
        """
        if names is None:
            names = (name for name, spec in self.specs.items() if spec.kind is not Kind.TABLE)
        ordered = self.load_order(names)
        total_bytes = sum(self.specs[name].num_bytes for name in ordered)
        start_s = time.perf_counter()
        with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:
            for name in ordered:
                tensor = self.tensor(name, mapped=mapped)
                bar.update(self.specs[name].num_bytes)
                yield tensor
        elapsed_s = max(time.perf_counter() - start_s, 1e-9)
        logger.info(
            "loaded %d tensors, %.2f GB in %.1f s (%.2f GB/s)",
            len(ordered),
            total_bytes / 1e9,
            elapsed_s,
            total_bytes / 1e9 / elapsed_s,
        )
