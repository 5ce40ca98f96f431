"""Open a checkpoint directory: check everything from the headers, then read tensors on demand."""

from __future__ import annotations

import bisect
import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint.engram_table import MappedEngramTable, map_readonly
from deepinfer.checkpoint.headers import TensorEntry
from deepinfer.checkpoint.stored import StoredTensor, TensorSource, check_scales, is_large_table, refuse_large_table
from deepinfer.checkpoint.tensor_specs import Kind, Part, TensorSpec, expected_tensors
from deepinfer.checkpoint.validate import CheckpointLayout, LocatedTensor, locate_tensors
from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import load_model_config
from deepinfer.errors import CheckpointError

logger = logging.getLogger(__name__)

# FP4 codes are typed I8 in the file but are bit fields, so they are read as unsigned bytes.
_TORCH_DTYPE = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.uint8,
    "F8_E8M0": torch.uint8,
}
_MAX_READ_BYTES = 2**30  # one read call returns at most 2 GiB on Linux
_MAX_WINDOW_BYTES = 2**30  # of one memory map


def select_parts(config: ModelConfig, parts: Iterable[str] | None) -> frozenset[Part]:
    """The parts to load; None means the text model, and the draft when the configuration has one.

    Raises:
        CheckpointError: an unknown part, or one that the configuration does not have.
    """
    has_draft = config.text.num_nextn_predict_layers > 0
    if parts is None:
        return frozenset({Part.TEXT, Part.DRAFT} if has_draft else {Part.TEXT})
    selected = set()
    for name in [parts] if isinstance(parts, str) else parts:
        known = [part for part in Part if part.value == name]
        if not known:
            choices = ", ".join(part.value for part in Part)
            raise CheckpointError(
                f"part {name!r} was asked for", why="there is no such part", fix=f"choose from {choices}"
            )
        selected.add(known[0])
    for part, present in ((Part.DRAFT, has_draft), (Part.VISION, config.vision is not None)):
        if part in selected and not present:
            raise CheckpointError(
                f"part {part.value!r} was asked for", why="this model's config.json has none", fix="leave it out"
            )
    return frozenset(selected)


def specs_of(config: ModelConfig, parts: frozenset[Part]) -> dict[str, TensorSpec]:
    """Expected tensors of some parts, by canonical name, in model order."""
    return {name: spec for name, spec in expected_tensors(config).items() if spec.part in parts}


def open_checkpoint(
    path: str | Path,
    *,
    parts: Iterable[str] | None = None,
    config: ModelConfig | None = None,
    allow_unknown_draft: bool = False,
) -> Checkpoint:
    """Check a checkpoint against its configuration. Reads headers only.

    Args:
        path: the checkpoint directory.
        parts: any of ``text``, ``draft``, ``vision``; only these have to be there. Default as :func:`select_parts`.
        config: default ``config.json`` in ``path``.
        allow_unknown_draft: unknown tensors with draft names are warnings instead of errors.
    Raises:
        CheckpointFileError: the directory, its configuration, index or a shard is missing.
        CheckpointError: tensors do not fit the configuration; lists every problem found.
        ConfigError: ``config.json`` cannot be used.
    """
    directory = Path(path)
    if config is None:
        config = load_model_config(directory)
    selected = select_parts(config, parts)
    # Whoever leaves the draft out by name does not mind draft tensors that nobody reads.
    strict_draft = not allow_unknown_draft and (parts is None or Part.DRAFT in selected)
    layout = locate_tensors(config, directory, parts=selected, strict_draft=strict_draft)
    if layout.warnings:
        logger.warning("%s: %d tensors ignored; first: %s", directory, len(layout.warnings), layout.warnings[0])
    return Checkpoint(config, specs_of(config, selected), selected, layout)


class _ShardFile:
    """Positional reads from one shard; safe to use from several threads."""

    def __init__(self, path: Path, windows: list[tuple[int, int]]) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._windows = windows
        self._maps: dict[int, mmap.mmap] = {}

    def close(self) -> None:
        self._file.close()

    def read(self, entry: TensorEntry) -> Tensor:
        """The bytes of a tensor, uint8, in new memory."""
        result = torch.empty(entry.num_bytes, dtype=torch.uint8)
        buffer = result.numpy().data
        done = 0
        while done < entry.num_bytes:
            count = os.preadv(self._file.fileno(), [buffer[done : done + _MAX_READ_BYTES]], entry.start + done)
            if count == 0:
                raise CheckpointError(
                    f"{self._path} ended while tensor {entry.stored_name} was read",
                    why="the file became shorter after it was checked",
                    fix="do not write to a checkpoint that is in use",
                )
            done += count
        return result

    def mapped(self, entry: TensorEntry) -> Tensor:
        """The bytes of a tensor, uint8, as a copy-on-write view of the file."""
        if entry.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        number = bisect.bisect_right(self._windows, entry.start, key=lambda window: window[0]) - 1
        start, end = self._windows[number]
        origin = start - start % mmap.ALLOCATIONGRANULARITY
        mapping = self._maps.get(number)
        if mapping is None:
            mapping = mmap.mmap(self._file.fileno(), end - origin, access=mmap.ACCESS_COPY, offset=origin)
            self._maps[number] = mapping
        return torch.frombuffer(mapping, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start - origin)


class Checkpoint(TensorSource):
    """A validated checkpoint on disk. Make one with :func:`open_checkpoint`."""

    def __init__(
        self,
        config: ModelConfig,
        specs: dict[str, TensorSpec],
        parts: frozenset[Part],
        layout: CheckpointLayout,
    ) -> None:
        super().__init__(config, specs, parts)
        self.warnings = tuple(layout.warnings)
        """What the file holds and nobody uses, one sentence per tensor."""
        self._located = layout.tensors
        self._files: dict[Path, _ShardFile] = {}
        self._tables: dict[int, MappedEngramTable] = {}
        self._windows = _map_windows(layout.tensors.values())

    def close(self) -> None:
        """Close the shard files. Tensors that were read stay usable, mapped ones and tables too."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def tensor(self, name: str, *, mapped: bool = False) -> StoredTensor:
        """Read one tensor; see :meth:`TensorSource.tensor`."""
        spec = self.spec(name)
        located = self._located[spec.name]
        refuse_large_table(spec)
        scale = None
        if located.scale is not None:
            assert spec.scale_shape is not None
            scale = self._read(located.scale, mapped).view(spec.scale_shape)
            check_scales(spec.name, scale)
        data = self._read(located.weight, mapped)
        kind = Kind.F32 if located.weight.dtype == "F32" else spec.kind
        return StoredTensor(spec.name, kind, spec.shape, data.view(spec.stored_shape), scale)

    def engram_table(self, layer_id: int) -> MappedEngramTable:
        """See :meth:`TensorSource.engram_table`. The same object is returned each time."""
        table = self._tables.get(layer_id)
        if table is None:
            spec = self.table_spec(layer_id)
            located = self._located[spec.name]
            assert located.scale is not None
            rows, width = spec.shape
            codes = map_readonly(located.weight.shard, located.weight.start, (rows, width))
            scales = map_readonly(located.scale.shard, located.scale.start, (rows, width // 32))
            table = self._tables[layer_id] = MappedEngramTable(spec.name, codes, scales)
        return table

    def load_order(self, names: Iterable[str]) -> list[str]:
        """By shard and position, so that disks read forward."""
        return sorted(names, key=lambda name: (str(self._located[name].weight.shard), self._located[name].weight.start))

    def _read(self, entry: TensorEntry, mapped: bool) -> Tensor:
        file = self._files.get(entry.shard)
        if file is None:
            file = self._files[entry.shard] = _ShardFile(entry.shard, self._windows[entry.shard])
        data = file.mapped(entry) if mapped else file.read(entry)
        dtype = _TORCH_DTYPE[entry.dtype]
        if data.storage_offset() % dtype.itemsize != 0:
            data = data.clone()  # a file may place a tensor at any byte
        return data.view(dtype)


def _map_windows(located: Iterable[LocatedTensor]) -> dict[Path, list[tuple[int, int]]]:
    """Byte ranges of each shard to map in one piece, ascending; tensors are never cut, large tables left out.

    A private map counts against the machine's memory even while nothing is written to it: a whole shard can be refused,
    and one map for each of 100,000 tensors exceeds the limit of the system.
    """
    ranges: dict[Path, list[tuple[int, int]]] = {}
    for tensor in located:
        for entry in (tensor.weight, tensor.scale):
            if entry is not None:
                pieces = ranges.setdefault(entry.shard, [])
                if not is_large_table(tensor.spec):
                    pieces.append((entry.start, entry.end))
    return {shard: _merged(sorted(pieces)) for shard, pieces in ranges.items()}


def _merged(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    windows: list[tuple[int, int]] = []
    for start, end in pieces:
        if windows and end - windows[-1][0] <= _MAX_WINDOW_BYTES:
            windows[-1] = (windows[-1][0], max(windows[-1][1], end))
        else:
            windows.append((start, end))
    return windows
