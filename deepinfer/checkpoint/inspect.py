"""What a checkpoint holds, from its headers alone: sizes by part, parameter counts, and the role of every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepinfer.checkpoint.headers import read_index, read_shard_header
from deepinfer.checkpoint.tensor_specs import Part, SizeGroup, TensorSpec, canonical_name, expected_tensors
from deepinfer.checkpoint.validate import locate_tensors
from deepinfer.config.layer_plan import LayerPlan
from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import load_model_config

_NOT_BACKBONE = (SizeGroup.ENGRAM_TABLE, SizeGroup.DRAFT, SizeGroup.VISION)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Size of one row of the table. Scales count as bytes, not as parameters."""

    num_tensors: int
    num_parameters: int
    num_bytes: int

    def __add__(self, other: GroupSize) -> GroupSize:
        return GroupSize(
            self.num_tensors + other.num_tensors,
            self.num_parameters + other.num_parameters,
            self.num_bytes + other.num_bytes,
        )


_EMPTY = GroupSize(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """Sizes and layer map of a checkpoint, or of a configuration without files."""

    config: ModelConfig
    sizes: dict[SizeGroup, GroupSize]
    path: Path | None = None
    num_shards: int = 0
    file_bytes: int = 0
    """Bytes of the shard files, headers included."""
    warnings: tuple[str, ...] = ()

    @property
    def backbone(self) -> GroupSize:
        """The text model without its n-gram tables."""
        return self._sum(group for group in self.sizes if group not in _NOT_BACKBONE)

    @property
    def total(self) -> GroupSize:
        return self._sum(self.sizes)

    def _sum(self, groups: Iterable[SizeGroup]) -> GroupSize:
        return sum((self.sizes[group] for group in groups), _EMPTY)

    def render(self) -> str:
        """The summary as text for a terminal."""
        where = (
            "configuration"
            if self.path is None
            else f"{self.path}, {self.num_shards} shards, {self.file_bytes:,} bytes"
        )
        lines = [f"{self.config.architecture}: {where}", "", _size_row("part", "tensors", "parameters", "bytes")]
        for group, size in self.sizes.items():
            lines.append(_numbers(group.value, size))
        lines.append(_numbers("text backbone without tables", self.backbone))
        lines.append(_numbers("all tensors", self.total))
        lines += ["", *_layer_table(self.config)]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def summarize(path: str | Path) -> CheckpointSummary:
    """Check a checkpoint and sum it up; reads ``config.json``, the index and the headers.

    Parts whose tensors the files do not hold (draft, vision) are left out of the sums.

    Raises:
        As :func:`deepinfer.checkpoint.reader.open_checkpoint`.
    """
    directory = Path(path)
    config = load_model_config(directory)
    names, shards = _names_in(directory)
    held = {spec.part for name, spec in expected_tensors(config).items() if name in names}
    layout = locate_tensors(config, directory, parts={Part.TEXT, *held})
    sizes: dict[SizeGroup, GroupSize] = {}
    for located in layout.tensors.values():
        num_bytes = located.weight.num_bytes + (0 if located.scale is None else located.scale.num_bytes)
        num_tensors = 1 if located.scale is None else 2
        group, size = located.spec.group, GroupSize(num_tensors, located.spec.num_parameters, num_bytes)
        sizes[group] = sizes.get(group, _EMPTY) + size
    return CheckpointSummary(
        config=config,
        sizes=_in_table_order(sizes),
        path=directory,
        num_shards=len(shards),
        file_bytes=sum(shard.stat().st_size for shard in shards),
        warnings=tuple(layout.warnings),
    )


def summarize_config(config: ModelConfig) -> CheckpointSummary:
    """Sizes that a checkpoint of this configuration would have."""
    sizes: dict[SizeGroup, GroupSize] = {}
    for spec in expected_tensors(config).values():
        sizes[spec.group] = sizes.get(spec.group, _EMPTY) + _size_of(spec)
    return CheckpointSummary(config=config, sizes=_in_table_order(sizes))


def _size_of(spec: TensorSpec) -> GroupSize:
    return GroupSize(2 if spec.kind.is_quantized else 1, spec.num_parameters, spec.num_bytes)


def _in_table_order(sizes: dict[SizeGroup, GroupSize]) -> dict[SizeGroup, GroupSize]:
    return {group: sizes[group] for group in SizeGroup if group in sizes}


def _names_in(directory: Path) -> tuple[set[str], list[Path]]:
    """Canonical names and present shard files."""
    index = read_index(directory)
    shards = [directory / shard for shard in index.shards if (directory / shard).is_file()]
    names: Iterable[str]
    if index.weight_map is not None:
        names = index.weight_map
    else:
        names = [name for shard in shards for name in read_shard_header(shard).entries]
    return {canonical_name(name) for name in names}, shards


def _size_row(name: str, tensors: str, parameters: str, num_bytes: str) -> str:
    return f"{name:<36}{tensors:>9}{parameters:>20}{num_bytes:>20}"


def _numbers(name: str, size: GroupSize) -> str:
    return _size_row(name, f"{size.num_tensors:,}", f"{size.num_parameters:,}", f"{size.num_bytes:,}")


def _layer_table(config: ModelConfig) -> list[str]:
    lines = [f"{'layer':>5} {'ratio':>5} {'mode':<8} {'kv from':>7} {'list from':>9}  owns"]
    for layer in config.text.layers:
        kv = "-" if layer.kv_source is None else str(layer.kv_source)
        selection = "-" if layer.index_source is None else str(layer.index_source)
        row = f"{layer.layer_id:>5} {layer.ratio:>5} {layer.mode.value:<8} {kv:>7} {selection:>9}  {_owned(layer)}"
        lines.append(row.rstrip())
    for stage in range(config.text.num_nextn_predict_layers):
        lines.append(f"draft stage {stage}: sliding window only")
    return lines


def _owned(layer: LayerPlan) -> str:
    flags = (
        (layer.has_engram, "engram"),
        (layer.owns_kv, "kv stream"),
        (layer.owns_index_keys, "index keys"),
        (layer.owns_indexer, "indexer"),
        (layer.is_candidate_source, "candidate blocks"),
        (layer.is_feature_target, "draft features"),
    )
    return ", ".join(name for is_owned, name in flags if is_owned)
