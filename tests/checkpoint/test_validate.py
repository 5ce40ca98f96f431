"""Every way in which a checkpoint may be broken stops the load with a message that names the tensor or file."""

from __future__ import annotations

import json

import pytest

from deepinfer.checkpoint import open_checkpoint
from deepinfer.errors import CheckpointError, CheckpointFileError
from tests.checkpoint.raw_files import INDEX, RawCheckpoint, RawTensor, write_header

WEIGHT = "layers.0.attn.wq_a.weight"
SCALE = "layers.0.attn.wq_a.scale"


def assert_refused(broken: RawCheckpoint, *fragments: str, **options) -> str:
    """Write, open, and return the message, which has to hold every fragment."""
    broken.write()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(broken.directory, **options)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message
    return message


def test_the_unbroken_copy_opens(broken: RawCheckpoint) -> None:
    broken.write()
    checkpoint = open_checkpoint(broken.directory, parts=("text", "draft", "vision"))
    assert checkpoint.warnings == ()
    assert WEIGHT in checkpoint.specs


def test_missing_tensor(broken: RawCheckpoint) -> None:
    broken.remove("layers.3.attn.kv_norm.weight")
    assert_refused(broken, "layers.3.attn.kv_norm.weight", "BF16 [64]", "missing", "(1 problem)")


def test_tensor_that_only_the_index_knows(broken: RawCheckpoint) -> None:
    name = "layers.3.attn.kv_norm.weight"
    del broken.shard_of(name)[name]
    message = assert_refused(broken, name, "no shard holds it")
    assert message.count(name) == 1


def test_tensor_that_the_index_does_not_know(broken: RawCheckpoint) -> None:
    del broken.index[WEIGHT]
    assert_refused(broken, WEIGHT, "not in the index")


def test_tensor_in_another_shard_than_the_index_says(broken: RawCheckpoint) -> None:
    other = next(shard for shard in broken.shards if shard != broken.index[WEIGHT])
    broken.index[WEIGHT] = other
    assert_refused(broken, WEIGHT, other, "but it is in")


def test_tensor_in_two_shards(broken: RawCheckpoint) -> None:
    other = next(tensors for tensors in broken.shards.values() if WEIGHT not in tensors)
    other[WEIGHT] = broken[WEIGHT]
    assert_refused(broken, WEIGHT, "in two shards")


def test_both_spellings_of_one_tensor(broken: RawCheckpoint) -> None:
    tensor = broken[WEIGHT]
    broken.shard_of(WEIGHT)["model." + WEIGHT] = tensor
    assert_refused(broken, WEIGHT, "in both spellings")


def test_both_spellings_in_the_index(broken: RawCheckpoint) -> None:
    broken.index["model." + WEIGHT] = broken.index[WEIGHT]
    assert_refused(broken, INDEX, WEIGHT, "both spellings")


@pytest.mark.parametrize("rename_index", [True, False])
@pytest.mark.parametrize("rename_shards", [True, False])
def test_either_spelling_may_be_used_in_index_and_shards(broken: RawCheckpoint, rename_index, rename_shards) -> None:
    if rename_index:
        broken.index = {"model." + name: shard for name, shard in broken.index.items()}
    if rename_shards:
        for file, tensors in broken.shards.items():
            broken.shards[file] = {"model." + name: tensor for name, tensor in tensors.items()}
    broken.write()
    checkpoint = open_checkpoint(broken.directory)
    assert checkpoint.tensor(WEIGHT).name == checkpoint.tensor("model." + WEIGHT).name == WEIGHT


def test_wrong_dtype(broken: RawCheckpoint) -> None:
    broken["layers.2.ffn.gate.bias"].dtype = "I32"
    assert_refused(broken, "layers.2.ffn.gate.bias", "dtype I32", "expected F32")


def test_alternative_dtype_only_where_it_is_allowed(broken: RawCheckpoint) -> None:
    for name in ("layers.1.engram.q_weight", "layers.1.attn_norm.weight"):
        tensor = broken[name]
        tensor.dtype, tensor.data = "F32", tensor.data * 2
    message = assert_refused(broken, "layers.1.attn_norm.weight", "expected BF16")
    assert "q_weight" not in message


def test_wrong_shape(broken: RawCheckpoint) -> None:
    tensor = broken["layers.2.ffn.experts.1.w2.weight"]
    tensor.shape = [tensor.shape[1], tensor.shape[0]]
    assert_refused(
        broken, "layers.2.ffn.experts.1.w2.weight", "shape [32, 256]", "expected [256, 32]", "[256, 64] per byte"
    )


def test_table_with_another_number_of_rows(broken: RawCheckpoint) -> None:
    tensor = broken["layers.1.engram.embed.weight"]
    tensor.shape, tensor.data = [6125, 32], tensor.data[: 6125 * 32]
    assert_refused(broken, "layers.1.engram.embed.weight", "[6125, 32]", "[6126, 32]")


def test_weight_without_scale(broken: RawCheckpoint) -> None:
    broken.remove(SCALE)
    assert_refused(broken, WEIGHT, f"its scale {SCALE} is missing", "FP8")


def test_scale_without_weight(broken: RawCheckpoint) -> None:
    broken.remove(WEIGHT)
    assert_refused(broken, WEIGHT, "missing", f"only its scale {SCALE} is there")


@pytest.mark.parametrize(
    ("grid", "block"), [([1, 2], "128x128"), ([64, 2], "1x128"), ([1], "whole-tensor"), ([64, 8], "1x32")]
)
def test_scale_grid_of_another_block_size_is_named(broken: RawCheckpoint, grid, block) -> None:
    count = 1
    for size in grid:
        count *= size
    broken[SCALE].shape, broken[SCALE].data = grid, b"\x7f" * count
    assert_refused(broken, SCALE, "expected [2, 8]", "32x32 tile", f"grid of {block} blocks")


def test_scale_of_wrong_dtype(broken: RawCheckpoint) -> None:
    broken[SCALE].dtype, broken[SCALE].data = "F32", broken[SCALE].data * 4
    assert_refused(broken, SCALE, "dtype F32", "expected F8_E8M0")


def test_missing_shard_is_a_file_error(broken: RawCheckpoint) -> None:
    broken.write()
    shard = broken.index[WEIGHT]
    (broken.directory / shard).unlink()
    with pytest.raises(CheckpointFileError) as caught:
        open_checkpoint(broken.directory)
    assert f"shard {shard} is missing" in str(caught.value)
    assert "(1 problem)" in str(caught.value)


def test_missing_shard_of_an_unwanted_part_is_fine(broken: RawCheckpoint) -> None:
    vision = [name for name in broken.index if name.startswith(("vision.", "aligner.", "image_"))]
    broken.shards["vision.safetensors"] = {name: broken[name] for name in vision}
    for name in vision:
        next(
            tensors for file, tensors in broken.shards.items() if name in tensors and file != "vision.safetensors"
        ).pop(name)
        broken.index[name] = "vision.safetensors"
    broken.write()
    (broken.directory / "vision.safetensors").unlink()
    assert open_checkpoint(broken.directory).warnings == ()
    with pytest.raises(CheckpointFileError, match=r"vision\.safetensors"):
        open_checkpoint(broken.directory, parts=("text", "vision"))


def test_missing_index(broken: RawCheckpoint) -> None:
    broken.index = None
    broken.write()
    with pytest.raises(CheckpointFileError, match=r"neither .*index\.json nor model\.safetensors"):
        open_checkpoint(broken.directory)


def test_single_file_needs_no_index(broken: RawCheckpoint) -> None:
    broken.index = None
    merged = {name: tensor for tensors in broken.shards.values() for name, tensor in tensors.items()}
    for file in broken.shards:
        (broken.directory / file).unlink()
    broken.shards = {"model.safetensors": merged}
    broken.write()
    assert open_checkpoint(broken.directory).tensor(WEIGHT).shape == (64, 256)
    del merged["norm.weight"]
    assert_refused(broken, "norm.weight", "missing")


@pytest.mark.parametrize("content", ["not json", "[]", '{"weight_map": {}}', '{"weight_map": []}'])
def test_unusable_index(broken: RawCheckpoint, content: str) -> None:
    (broken.directory / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX):
        open_checkpoint(broken.directory)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", "", 7])
def test_index_cannot_point_outside_the_directory(broken: RawCheckpoint, shard) -> None:
    broken.index[WEIGHT] = shard
    assert_refused(broken, WEIGHT, repr(shard), "the index maps")


def test_index_that_lists_a_tensor_twice(broken: RawCheckpoint) -> None:
    shard = broken.index[WEIGHT]
    text = json.dumps({"weight_map": broken.index})
    (broken.directory / INDEX).write_text(text.replace("{", "{", 1)[:-2] + f', "{WEIGHT}": "{shard}"}}}}')
    with pytest.raises(CheckpointError, match="twice"):
        open_checkpoint(broken.directory)


def test_truncated_shard(broken: RawCheckpoint) -> None:
    broken.write()
    path = broken.directory / broken.index[WEIGHT]
    path.write_bytes(path.read_bytes()[:-10])
    last = list(broken.shards[path.name])[-1]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(broken.directory)
    assert f"tensor {last} ends at byte" in str(caught.value)
    assert "truncated" in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_shard_cut_inside_its_header(broken: RawCheckpoint, size: int) -> None:
    broken.write()
    path = broken.directory / broken.index[WEIGHT]
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=rf"{path.name}.*truncated") as caught:
        open_checkpoint(broken.directory)
    assert "(1 problem)" in str(caught.value)  # not one for each tensor in it


def test_shard_with_bytes_behind_its_end(broken: RawCheckpoint) -> None:
    broken.write()
    path = broken.directory / broken.index[WEIGHT]
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=rf"{path.name} has 4 bytes behind"):
        open_checkpoint(broken.directory)


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "fragment"),
    [
        (b"{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not an object"),
        (b'{"a": {}, "a": {}}', "tensor a twice"),
        ({"a": {**ENTRY, "data_offsets": [0, 5]}}, "contradicts itself"),
        ({"a": {**ENTRY, "data_offsets": [4, 0]}}, "tensor a"),
        ({"a": {**ENTRY, "data_offsets": [-4, 0]}}, "tensor a"),
        ({"a": {**ENTRY, "shape": [-4]}}, "shape [-4]"),
        ({"a": {**ENTRY, "shape": [2.0, 2]}}, "tensor a"),
        ({"a": {**ENTRY, "dtype": "F4"}}, "dtype 'F4'"),
        ({"a": 5}, "tensor a"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}}, "tensors a and b overlap"),
        ({"a": ENTRY, "b": ENTRY}, "overlap"),
        ({"a": {**ENTRY, "data_offsets": [2**60, 2**60 + 4]}}, "truncated"),
    ],
)
def test_malformed_shard_header(broken: RawCheckpoint, header, fragment: str) -> None:
    broken.write()
    path = broken.directory / broken.index[WEIGHT]
    write_header(path, header, b"12345678"[: 6 if isinstance(header, dict) and "b" in header else 4])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(broken.directory)
    assert fragment in str(caught.value)
    assert path.name in str(caught.value)


def test_unknown_tensor_is_a_warning(broken: RawCheckpoint, caplog) -> None:
    broken.add("layers.0.attn.rotary.inv_freq", RawTensor("F32", [2], b"12345678"))
    broken.write()
    checkpoint = open_checkpoint(broken.directory)
    assert len(checkpoint.warnings) == 1
    assert "layers.0.attn.rotary.inv_freq" in checkpoint.warnings[0]
    assert "layers.0.attn.rotary.inv_freq" in caplog.text


@pytest.mark.parametrize(
    "name", ["mtp.0.attn.wq_x.weight", "mtp.5.norm.weight", "layers.8.attn.wq_a.weight", "dspark.proj.weight"]
)
def test_unknown_draft_tensor_is_an_error_unless_allowed(broken: RawCheckpoint, name: str) -> None:
    broken.add(name, RawTensor("F32", [2], b"12345678"))
    assert_refused(broken, name, "draft")
    assert name in open_checkpoint(broken.directory, allow_unknown_draft=True).warnings[0]
    assert name in open_checkpoint(broken.directory, parts=("text",)).warnings[0]


def test_renamed_draft_tensor_is_reported_from_both_sides(broken: RawCheckpoint) -> None:
    broken.rename("mtp.1.markov_head.head.weight", "mtp.1.markov.head.weight")
    assert_refused(
        broken, "mtp.1.markov_head.head.weight (BF16 [512, 32]) is missing", "unknown draft tensor mtp.1.markov.head"
    )


def test_missing_draft_is_an_error_by_default_and_fine_for_text_only(broken: RawCheckpoint) -> None:
    broken.remove("mtp.0.main_norm.weight")
    assert_refused(broken, "mtp.0.main_norm.weight")
    assert open_checkpoint(broken.directory, parts=("text",)).warnings == ()


def test_draft_copies_of_embedding_and_head_are_ignored(broken: RawCheckpoint) -> None:
    broken.add("mtp.0.embed.weight", broken["embed.weight"])
    broken.add("mtp.1.head.weight", RawTensor("F32", [2], b"12345678"))
    broken.write()
    assert open_checkpoint(broken.directory).warnings == ()


@pytest.mark.parametrize(
    "name", ["layers.0.hc_attn_norm.weight", "hc_head_norm.weight", "layers.2.attn.compressor.ape"]
)
def test_tensors_of_the_previous_model_are_refused(broken: RawCheckpoint, name: str) -> None:
    broken.add(name, RawTensor("F32", [2], b"12345678"))
    assert_refused(broken, name, "DeepSeek-V4")


def test_head_mix_contradicts_the_shifted_read(broken: RawCheckpoint) -> None:
    broken.add("hc_head_fn", RawTensor("F32", [2], b"12345678"))
    assert_refused(broken, "hc_head_fn", "hc_shifted")


def test_many_problems_are_reported_together_up_to_twenty(broken: RawCheckpoint) -> None:
    broken.remove("norm.weight", SCALE)
    broken["layers.2.ffn.gate.bias"].dtype = "I32"
    assert_refused(broken, "norm.weight", SCALE, "layers.2.ffn.gate.bias", "(3 problems)")
    broken.remove(*[name for name in broken.index if "hc_" in name])
    message = assert_refused(broken, "(63 problems)", "and 43 more")
    assert message.count("is missing") <= 20
