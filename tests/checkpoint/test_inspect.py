"""Sizes against the published table, for a configuration and for files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.checkpoint import released_config, summarize, summarize_config
from deepinfer.checkpoint.tensor_specs import SizeGroup
from deepinfer.errors import CheckpointFileError
from tests.checkpoint.raw_files import RawCheckpoint

# Part, parameters, bytes: the size table of the model specification.
PUBLISHED = [
    (SizeGroup.ATTENTION, 5_064_696_320, 5_069_721_600),
    (SizeGroup.COMPRESSOR_INDEXER, 61_868_544, 81_835_008),
    (SizeGroup.HYPER_CONNECTION, 39_323_760, 157_295_040),
    (SizeGroup.ROUTER, 78_673_920, 157_409_280),
    (SizeGroup.SHARED_EXPERT, 1_415_577_600, 1_416_960_000),
    (SizeGroup.ROUTED_EXPERT, 543_581_798_400, 288_777_830_400),
    (SizeGroup.ENGRAM, 314_654_720, 315_043_840),
    (SizeGroup.EMBEDDING, 1_324_241_920, 2_648_483_840),
    (SizeGroup.ENGRAM_TABLE, 196_613_849_600, 202_758_032_400),
    (SizeGroup.DRAFT, 14_225_362_530, 7_932_874_632),
    (SizeGroup.VISION, 485_268_480, 970_536_960),
]


def test_released_sizes_equal_the_published_table() -> None:
    summary = summarize_config(released_config())
    found = [(group, size.num_parameters, size.num_bytes) for group, size in summary.sizes.items()]
    assert sorted(found, key=str) == sorted(PUBLISHED, key=str)
    assert summary.backbone.num_parameters == 551_880_835_184
    assert summary.total.num_parameters == 763_205_315_794
    assert summary.total.num_bytes == 510_286_023_000


def test_summary_of_files_agrees_with_that_of_their_configuration(pristine: Path, config) -> None:
    summary = summarize(pristine)
    assert summary.sizes == summarize_config(config).sizes
    assert summary.num_shards == len(list(pristine.glob("*.safetensors"))) > 1
    assert summary.file_bytes == sum(path.stat().st_size for path in pristine.glob("*.safetensors"))
    assert summary.file_bytes > summary.total.num_bytes


def test_summary_reads_headers_only(broken: RawCheckpoint) -> None:
    name = "layers.0.attn.wq_a.scale"
    broken[name].data = b"\xff" * len(broken[name].data)  # NaN scales: seen only by who reads the data
    broken.write()
    assert summarize(broken.directory).sizes[SizeGroup.ATTENTION].num_tensors > 0


def test_summary_leaves_out_parts_that_are_not_there(broken: RawCheckpoint) -> None:
    vision = [name for name in broken.index if name.startswith(("vision.", "aligner.", "image_"))]
    broken.remove(*vision)
    broken.write()
    summary = summarize(broken.directory)
    assert SizeGroup.VISION not in summary.sizes
    assert SizeGroup.DRAFT in summary.sizes


def test_text_shows_sizes_and_the_role_of_every_layer(pristine: Path) -> None:
    lines = summarize(pristine).render().splitlines()
    assert any(line.startswith("routed experts") and "786,432" in line for line in lines)
    layer_six = next(line for line in lines if line.split()[:2] == ["6", "1"])
    assert layer_six.split()[2:] == ["reindex", "4", "6", "indexer,", "draft", "features"]
    layer_four = next(line for line in lines if line.split()[:2] == ["4", "1"])
    assert "candidate blocks" in layer_four
    assert lines[-1] == "draft stage 1: sliding window only"


def test_missing_directory_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileError, match="nowhere"):
        summarize(tmp_path / "nowhere")
    assert issubclass(CheckpointFileError, FileNotFoundError)
