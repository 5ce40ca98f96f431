"""Match the tensors of a checkpoint's headers with the expected ones, and report everything that does not fit at once.

Only headers and the index are read here. Rules: spec 3.1 (names, presence), 3.2 (dtypes and scale grids), 2.4 item 6
(tensors of other models). Unknown draft tensors are errors, because verification hides a draft whose weights were
dropped: the output stays right while the acceptance falls to chance.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.checkpoint.headers import INDEX_NAME, ShardHeader, ShardIndex, TensorEntry, read_index, read_shard_header
from deepinfer.checkpoint.tensor_specs import (
    SCALE_DTYPE,
    Kind,
    Part,
    TensorSpec,
    canonical_name,
    expected_tensors,
    is_ignored_duplicate,
)
from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, CheckpointFileError

MAX_REPORTED = 20

_DRAFT_NAME = re.compile(r"(^|\.|_)(mtp|nextn|dspark|draft|eagle)(\.|_|$)|markov_head|confidence_head")
_LAYER_NAME = re.compile(r"layers\.(\d+)\.")
_V4_NAME = re.compile(r"(^|\.)hc_(attn|ffn|head)_norm(\.|$)|\.compressor\.ape$")
_HEAD_MIX_NAME = re.compile(r"(^|\.)hc_head_(fn|base|scale)$")


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """An expected tensor and where its bytes are."""

    spec: TensorSpec
    weight: TensorEntry
    scale: TensorEntry | None


@dataclass(slots=True)
class CheckpointLayout:
    """The validated tensors of the wanted parts, by canonical name, and what was ignored."""

    tensors: dict[str, LocatedTensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def locate_tensors(
    config: ModelConfig, directory: Path, *, parts: Collection[Part], strict_draft: bool = True
) -> CheckpointLayout:
    """Find and check every tensor of ``parts``.

    Args:
        config: decides names, shapes and dtypes.
        directory: holds the shards.
        parts: parts whose tensors must all be there. Tensors of other parts are neither required nor checked.
        strict_draft: unknown tensors with draft names are errors rather than warnings.
    Raises:
        CheckpointFileError: a needed file is missing.
        CheckpointError: anything else does not fit; the message lists up to 20 problems, each with its tensor.
    """
    return _Validation(config, directory, parts, strict_draft).run()


def _shown(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


class _Validation:
    """One pass over a checkpoint; ``problems`` grows until the end."""

    def __init__(self, config: ModelConfig, directory: Path, parts: Collection[Part], strict_draft: bool) -> None:
        self.config = config
        self.specs = expected_tensors(config)
        self.scale_owner = {spec.scale_name: spec for spec in self.specs.values() if spec.scale_name is not None}
        self.wanted = [spec for spec in self.specs.values() if spec.part in parts]
        self.parts = parts
        self.strict_draft = strict_draft
        self.directory = directory
        self.problems: list[str] = []
        self.missing_file = False
        self.lost_names: set[str] = set()  # names in files that could not be read: reported once, with the file
        self.lost_all = False

    def run(self) -> CheckpointLayout:
        index = read_index(self.directory)
        self.problems += index.problems
        listed = self._canonical_index(index)
        headers = self._read_headers(index, listed)
        entries = self._collect(headers)
        if listed is not None:
            self._compare_with_index(entries, listed)
        layout = CheckpointLayout()
        for spec in self.wanted:
            located = self._locate(spec, entries)
            if located is not None:
                layout.tensors[spec.name] = located
        layout.warnings += self._judge_unknown(entries)
        if self.problems:
            self._raise()
        return layout

    def _canonical_index(self, index: ShardIndex) -> dict[str, str] | None:
        """Canonical name to shard; both spellings of one tensor are a problem."""
        if index.weight_map is None:
            return None
        listed: dict[str, str] = {}
        for name, shard in index.weight_map.items():
            canonical = canonical_name(name)
            if canonical in listed:
                self.problems.append(
                    f"{INDEX_NAME} lists tensor {canonical} in both spellings, with and without 'model.'"
                )
            listed[canonical] = shard
        return listed

    def _is_needed(self, canonical: str) -> bool:
        spec = self.specs.get(canonical) or self.scale_owner.get(canonical)
        return spec is None or spec.part in self.parts

    def _read_headers(self, index: ShardIndex, listed: Mapping[str, str] | None) -> list[ShardHeader]:
        names_of: dict[str, list[str]] = {shard: [] for shard in index.shards}
        for name, shard in (listed or {}).items():
            names_of[shard].append(name)
        headers = []
        for shard, names in names_of.items():
            path = self.directory / shard
            if not path.is_file():
                needed = [name for name in names if self._is_needed(name)]
                if needed:
                    self.missing_file = True
                    self.problems.append(
                        f"shard {shard} is missing; it holds {len(needed)} tensors such as {needed[0]}"
                    )
                self.lost_names.update(names)
                continue
            header = read_shard_header(path)
            headers.append(header)
            if header.problems:
                self.problems += header.problems
                self.lost_names.update(names)
                self.lost_all = self.lost_all or listed is None
        return headers

    def _collect(self, headers: Iterable[ShardHeader]) -> dict[str, TensorEntry]:
        """All tensors by canonical name; a tensor found twice is a problem."""
        entries: dict[str, TensorEntry] = {}
        for header in headers:
            for entry in header.entries.values():
                name = canonical_name(entry.stored_name)
                other = entries.setdefault(name, entry)
                if other is entry:
                    continue
                if other.stored_name != entry.stored_name:
                    what = f"in both spellings, {other.stored_name} and {entry.stored_name}"
                else:
                    what = f"in two shards, {other.shard.name} and {entry.shard.name}"
                self.problems.append(f"tensor {name} is stored {what}")
        return entries

    def _compare_with_index(self, entries: Mapping[str, TensorEntry], listed: Mapping[str, str]) -> None:
        for name, shard in listed.items():
            entry = entries.get(name)
            if entry is None:
                if name not in self.lost_names and self._is_needed(name):
                    self.problems.append(
                        f"tensor {name} is missing: the index puts it into {shard}, but no shard holds it"
                    )
                    self.lost_names.add(name)
            elif entry.shard.name != shard:
                self.problems.append(f"the index puts tensor {name} into {shard}, but it is in {entry.shard.name}")
        for name, entry in entries.items():
            if name not in listed and self._is_needed(name):
                self.problems.append(f"tensor {name} is in {entry.shard.name} but not in the index")

    def _locate(self, spec: TensorSpec, entries: Mapping[str, TensorEntry]) -> LocatedTensor | None:
        weight = entries.get(spec.name)
        scale = None if spec.scale_name is None else entries.get(spec.scale_name)
        lost = self.lost_all or spec.name in self.lost_names or spec.scale_name in self.lost_names
        if weight is None:
            if not lost:
                wanted = f"tensor {spec.name} ({spec.dtypes[0]} {_shown(spec.stored_shape)}) is missing"
                self.problems.append(
                    f"{wanted}, only its scale {spec.scale_name} is there" if scale is not None else wanted
                )
            return None
        self.problems += _weight_problems(spec, weight)
        if spec.scale_name is not None and scale is None:
            if not lost:
                self.problems.append(
                    f"tensor {spec.name} is {spec.kind.value} but its scale {spec.scale_name} is missing"
                )
            return None
        if scale is not None:
            self.problems += _scale_problems(spec, scale)
        return LocatedTensor(spec, weight, scale)

    def _judge_unknown(self, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
        """Yield a warning for each tensor that nothing uses, or note a problem for those that must not be there."""
        for name in entries:
            if name in self.specs or name in self.scale_owner or is_ignored_duplicate(name):
                continue
            if _V4_NAME.search(name):
                self.problems.append(f"tensor {name} belongs to DeepSeek-V4, and V4.1 has no such part")
            elif _HEAD_MIX_NAME.search(name):
                self.problems.append(
                    f"tensor {name} exists only with text_config.hc_shifted = false, and it is true here"
                )
            elif self.strict_draft and self._is_draft_name(name):
                self.problems.append(f"unknown draft tensor {name}: the draft would run without it")
            else:
                yield f"tensor {name} is not part of this model and is ignored"

    def _is_draft_name(self, name: str) -> bool:
        layer = _LAYER_NAME.match(name)
        beyond = layer is not None and int(layer.group(1)) >= self.config.text.num_hidden_layers
        return beyond or _DRAFT_NAME.search(name) is not None

    def _raise(self) -> None:
        shown = self.problems[:MAX_REPORTED]
        if len(self.problems) > len(shown):
            shown.append(f"and {len(self.problems) - len(shown)} more")
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        error = CheckpointFileError if self.missing_file else CheckpointError
        raise error(
            f"checkpoint {self.directory} does not fit its config.json ({count})",
            why="; ".join(shown),
            fix="download the files named here again, or correct config.json",
        )


def _weight_problems(spec: TensorSpec, entry: TensorEntry) -> Iterator[str]:
    if entry.dtype not in spec.dtypes:
        wanted = " or ".join(spec.dtypes)
        yield f"tensor {spec.name} has dtype {entry.dtype}, expected {wanted} ({spec.kind.value})"
    if entry.shape != spec.stored_shape and entry.shape not in spec.other_shapes:
        packed = f", two columns of {_shown(spec.shape)} per byte" if spec.kind is Kind.FP4 else ""
        yield f"tensor {spec.name} has shape {_shown(entry.shape)}, expected {_shown(spec.stored_shape)}{packed}"


def _scale_problems(spec: TensorSpec, entry: TensorEntry) -> Iterator[str]:
    if entry.dtype != SCALE_DTYPE:
        yield f"scale {spec.scale_name} has dtype {entry.dtype}, expected {SCALE_DTYPE}"
    assert spec.scale_shape is not None
    if entry.shape != spec.scale_shape:
        block = "32x32 tile" if spec.kind is Kind.FP8 else "row and 32 columns"
        other = _other_block(spec.shape, entry.shape)
        guess = f"; that is the grid of {other} blocks" if other else ""
        yield (
            f"scale {spec.scale_name} has shape {_shown(entry.shape)}, expected {_shown(spec.scale_shape)}, "
            f"one per {block}{guess}"
        )


def _other_block(shape: tuple[int, ...], grid: tuple[int, ...]) -> str | None:
    """Name of the block size that gives ``grid``, if it is a usual one."""
    if grid in ((), (1,)):
        return "whole-tensor"
    rows, columns = shape
    for height, width in ((128, 128), (64, 64), (32, 32), (16, 16), (256, 256), (1, 128), (1, 32), (1, 16), (128, 1)):
        if grid == (-(-rows // height), -(-columns // width)):
            return f"{height}x{width}"
    return "one-per-row" if grid in ((rows,), (rows, 1)) else None
