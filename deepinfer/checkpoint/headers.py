"""Read safetensors headers and the shard index, checking every byte range before any tensor data is touched.

A safetensors file is an 8-byte little-endian header length, a JSON header ``name -> {dtype, shape, data_offsets}`` with
offsets relative to the end of the header, and the data. Problems are collected as sentences rather than raised, so that
one load reports all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.errors import CheckpointError, CheckpointFileError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. ``start`` and ``end`` are byte offsets in the file; ``stored_name`` is its spelling."""

    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class ShardHeader:
    """The tensors of one shard, and what is wrong with the file."""

    path: Path
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ShardIndex:
    """Which shard holds which tensor, in the spelling of the index.

    ``weight_map`` is None for a single file without an index.
    """

    directory: Path
    shards: tuple[str, ...]
    weight_map: dict[str, str] | None
    problems: list[str] = field(default_factory=list)


class _DuplicateKeyError(ValueError):
    """A JSON object that names a key twice, which ``json`` would silently resolve to the last."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def read_shard_header(path: Path) -> ShardHeader:
    """Parse and check the header of one existing shard; reads nothing beyond the header."""
    header = ShardHeader(path)
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length_field = file.read(_LENGTH_BYTES)
        if len(length_field) < _LENGTH_BYTES:
            header.problems.append(f"{path.name} has {file_bytes} bytes, too few for a safetensors file: truncated")
            return header
        length = int.from_bytes(length_field, "little")
        if length > file_bytes - _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            header.problems.append(
                f"{path.name} announces a header of {length} bytes but has {file_bytes}: truncated, or not safetensors"
            )
            return header
        text = file.read(length)
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except _DuplicateKeyError as error:
        header.problems.append(f"{path.name} lists tensor {error} twice in its header")
        return header
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        header.problems.append(f"{path.name} has a header that is not JSON ({error})")
        return header
    if not isinstance(parsed, dict):
        header.problems.append(f"{path.name} has a header that is a {type(parsed).__name__}, not an object")
        return header
    parsed.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    for name, description in parsed.items():
        entry = _parse_entry(header, name, description, data_start)
        if entry is not None:
            header.entries[name] = entry
    _check_ranges(header, data_start, file_bytes)
    return header


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(header: ShardHeader, name: str, description: Any, data_start: int) -> TensorEntry | None:
    """One header entry, or None after noting why it is unusable."""
    where = f"tensor {name} in {header.path.name}"
    if not isinstance(description, dict):
        header.problems.append(f"{where} is described by {description!r}, not by dtype, shape and data_offsets")
        return None
    dtype, shape, offsets = (description.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        header.problems.append(f"{where} has dtype {dtype!r}, which this engine does not know")
        return None
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        header.problems.append(f"{where} has shape {shape!r}, not a list of sizes")
        return None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        header.problems.append(f"{where} has data_offsets {offsets!r}, not [begin, end]")
        return None
    begin, end = offsets
    expected = math.prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != expected:
        header.problems.append(
            f"{where} takes {end - begin} bytes, but {dtype} {shape} has {expected}: the header contradicts itself"
        )
        return None
    return TensorEntry(name, dtype, tuple(shape), header.path, data_start + begin, data_start + end)


def _check_ranges(header: ShardHeader, data_start: int, file_bytes: int) -> None:
    """Every range inside the file, no two overlapping, nothing behind the last."""
    end_of_data, previous = data_start, None
    for entry in sorted(header.entries.values(), key=lambda item: (item.start, item.end)):
        if entry.end > file_bytes:
            header.problems.append(
                f"tensor {entry.stored_name} ends at byte {entry.end} of {header.path.name}, which has {file_bytes}: "
                "the file is truncated"
            )
        if previous is not None and entry.start < end_of_data and entry.num_bytes > 0:
            header.problems.append(
                f"tensors {previous.stored_name} and {entry.stored_name} overlap in {header.path.name}"
            )
        if entry.end >= end_of_data:
            end_of_data, previous = entry.end, entry
    if file_bytes > end_of_data and not header.problems:
        header.problems.append(
            f"{header.path.name} has {file_bytes - end_of_data} bytes behind its last tensor: the download went wrong"
        )


def read_index(directory: Path) -> ShardIndex:
    """Find the shards of a checkpoint: by the index file, or the single ``model.safetensors``.

    Raises:
        CheckpointFileError: there is neither.
        CheckpointError: the index is not a usable JSON object.
    """
    index_file = directory / INDEX_NAME
    if not index_file.is_file():
        if (directory / SINGLE_NAME).is_file():
            return ShardIndex(directory, (SINGLE_NAME,), None)
        others = sorted(path.name for path in directory.glob("*.safetensors"))
        found = f"found {len(others)} other safetensors files such as {others[0]}" if others else "no safetensors file"
        raise CheckpointFileError(
            f"neither {INDEX_NAME} nor {SINGLE_NAME} in {directory}",
            why=f"one of them has to say where the tensors are ({found})",
            fix="download the missing file, or run with dummy weights",
        )
    try:
        parsed = json.loads(index_file.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except _DuplicateKeyError as error:
        raise _bad_index(index_file, f"it lists {error} twice") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _bad_index(index_file, f"it is not JSON ({error})") from error
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(index_file, "it has no weight_map object from tensor names to shard files")
    problems = list(_unusable_shard_names(weight_map))
    usable = {name: shard for name, shard in weight_map.items() if isinstance(shard, str) and _is_plain(shard)}
    return ShardIndex(directory, tuple(sorted(set(usable.values()))), usable, problems)


def _bad_index(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"index file {path} is unusable", why=why, fix="download it again")


def _is_plain(shard: str) -> bool:
    """Whether the name stays inside the directory."""
    return shard not in ("", ".", "..") and "/" not in shard and "\\" not in shard and "\0" not in shard


def _unusable_shard_names(weight_map: dict[str, Any]) -> Iterable[str]:
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            yield f"the index maps tensor {name} to {shard!r}, not to a file name"
        elif not _is_plain(shard):
            yield f"the index maps tensor {name} to {shard!r}, which is no file name inside the checkpoint directory"
