"""The expected tensors against the tables of the model specification."""

from __future__ import annotations

import math

import pytest

from deepinfer.checkpoint import Kind, Part, expected_tensors, released_config, tiny_config
from deepinfer.checkpoint.tensor_specs import TensorSpec, canonical_name, is_ignored_duplicate


@pytest.fixture(scope="module")
def released() -> dict[str, TensorSpec]:
    return expected_tensors(released_config())


# Straight from the tables: name, kind, stored shape, scale shape.
RELEASED = [
    ("embed.weight", Kind.BF16, (129280, 5120), None),
    ("head.weight", Kind.BF16, (129280, 5120), None),
    ("norm.weight", Kind.BF16, (5120,), None),
    ("layers.39.ffn_norm.weight", Kind.BF16, (5120,), None),
    ("layers.0.hc_attn_fn", Kind.F32, (24, 20480), None),
    ("layers.0.hc_ffn_base", Kind.F32, (24,), None),
    ("layers.0.hc_ffn_scale", Kind.F32, (3,), None),
    ("layers.7.attn.wq_a.weight", Kind.FP8, (1280, 5120), (40, 160)),
    ("layers.7.attn.q_norm.weight", Kind.BF16, (1280,), None),
    ("layers.7.attn.wq_b.weight", Kind.FP8, (32768, 1280), (1024, 40)),
    ("layers.7.attn.wkv.weight", Kind.FP8, (512, 5120), (16, 160)),
    ("layers.7.attn.wo_a.weight", Kind.FP8, (8192, 4096), (256, 128)),
    ("layers.7.attn.wo_b.weight", Kind.FP8, (5120, 8192), (160, 256)),
    ("layers.7.attn.attn_sink", Kind.F32, (64,), None),
    ("layers.8.attn.compressor.wkv.weight", Kind.BF16, (512, 5120), None),
    ("layers.8.attn.compressor.wgate.weight", Kind.BF16, (512, 5120), None),
    ("layers.20.attn.compressor.norm.weight", Kind.BF16, (512,), None),
    ("layers.20.attn.indexer.wk.weight", Kind.BF16, (128, 512), None),
    ("layers.20.attn.indexer.k_norm.weight", Kind.BF16, (128,), None),
    ("layers.24.attn.indexer.wq_b.weight", Kind.FP8, (4096, 1280), (128, 40)),
    ("layers.24.attn.indexer.weights_proj.weight", Kind.BF16, (32, 5120), None),
    ("layers.3.ffn.gate.weight", Kind.BF16, (384, 5120), None),
    ("layers.3.ffn.gate.bias_vl", Kind.F32, (384,), None),
    ("layers.3.ffn.experts.383.w1.weight", Kind.FP4, (2304, 2560), (2304, 160)),
    ("layers.3.ffn.experts.383.w2.weight", Kind.FP4, (5120, 1152), (5120, 72)),
    ("layers.3.ffn.shared_experts.w3.weight", Kind.FP8, (2304, 5120), (72, 160)),
    ("layers.1.engram.embed.weight", Kind.TABLE, (384006168, 256), (384006168, 8)),
    ("layers.14.engram.embed.weight", Kind.TABLE, (384016682, 256), (384016682, 8)),
    ("layers.14.engram.wkv.weight", Kind.FP8, (25600, 6144), (800, 192)),
    ("layers.14.engram.q_weight", Kind.BF16, (4, 5120), None),
    ("mtp.2.ffn.experts.127.w3.weight", Kind.FP4, (2304, 2560), (2304, 160)),
    ("mtp.1.ffn.gate.weight", Kind.BF16, (128, 5120), None),
    ("mtp.0.main_proj.weight", Kind.FP8, (5120, 15360), (160, 480)),
    ("mtp.0.main_norm.weight", Kind.BF16, (5120,), None),
    ("mtp.2.norm.weight", Kind.BF16, (5120,), None),
    ("mtp.2.markov_head.embed.weight", Kind.BF16, (129280, 256), None),
    ("mtp.2.markov_head.head.weight", Kind.BF16, (129280, 256), None),
    ("mtp.2.confidence_head.proj.weight", Kind.BF16, (1, 5376), None),
    ("vision.patch_embed.proj.weight", Kind.BF16, (1024, 588), None),
    ("vision.blocks.31.attn.wqkv.bias", Kind.BF16, (3072,), None),
    ("vision.blocks.31.mlp.w1.weight", Kind.BF16, (5632, 1024), None),
    ("vision.blocks.31.mlp.w2.weight", Kind.BF16, (1024, 2816), None),
    ("aligner.w1.weight", Kind.BF16, (5120, 9216), None),
    ("aligner.w2.bias", Kind.BF16, (5120,), None),
    ("image_newline", Kind.BF16, (5120,), None),
]


@pytest.mark.parametrize(("name", "kind", "stored_shape", "scale_shape"), RELEASED, ids=[row[0] for row in RELEASED])
def test_released_tensor_has_the_specified_layout(released, name, kind, stored_shape, scale_shape) -> None:
    spec = released[name]
    assert (spec.kind, spec.stored_shape, spec.scale_shape) == (kind, stored_shape, scale_shape)
    if kind.is_quantized:
        assert spec.scale_name == name.removesuffix(".weight") + ".scale"
    else:
        assert spec.scale_name is None


def test_optional_parts_of_layers_appear_only_where_they_are_owned(released) -> None:
    def layers_with(suffix: str) -> list[int]:
        return [int(name.split(".")[1]) for name in released if name.startswith("layers.") and name.endswith(suffix)]

    assert layers_with("compressor.wkv.weight") == [2, 8, 14, 20]
    assert layers_with("compressor.wgate.weight") == [2, 8, 14]
    assert layers_with("indexer.wk.weight") == [2, 8, 14, 20]
    assert layers_with("indexer.wq_b.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers_with("engram.wkv.weight") == [1, 14]
    draft = [name for name in released if name.startswith("mtp.")]
    assert not any("compressor" in name or "indexer" in name or "engram" in name for name in draft)
    assert [name for name in draft if "main_" in name] == ["mtp.0.main_proj.weight", "mtp.0.main_norm.weight"]


def test_numbers_of_draft_and_vision_tensors_equal_the_public_audit(released) -> None:
    draft = [spec for spec in released.values() if spec.part is Part.DRAFT]
    assert len(draft) + sum(spec.scale_name is not None for spec in draft) == 2401
    assert sum(spec.part is Part.VISION for spec in released.values()) == 266


def test_one_routed_expert_has_the_specified_size(released) -> None:
    expert = [spec for name, spec in released.items() if name.startswith("layers.5.ffn.experts.9.")]
    assert sum(spec.data_bytes for spec in expert) == 17_694_720
    assert sum(spec.scale_bytes for spec in expert) == 1_105_920


def test_alternatives_that_other_writers_use_are_accepted(released) -> None:
    assert released["layers.1.engram.q_weight"].dtypes == ("BF16", "F32")
    assert released["layers.1.engram.k_weight"].dtypes == ("BF16", "F32")
    assert released["mtp.2.confidence_head.proj.weight"].dtypes == ("BF16", "F32")
    assert released["vision.patch_embed.proj.weight"].other_shapes == ((1024, 3, 14, 14),)
    assert released["layers.1.ffn.gate.weight"].dtypes == ("BF16",)


def test_head_mix_exists_only_without_the_shifted_read() -> None:
    assert not any(name.startswith("hc_head") for name in expected_tensors(tiny_config()))
    specs = expected_tensors(tiny_config(hc_shifted=False))
    assert specs["hc_head_fn"].shape == (4, 1024)
    assert specs["hc_head_base"].shape == (4,)
    assert specs["hc_head_scale"].shape == (1,)


def test_tiny_shapes_equal_those_quoted_in_the_specification() -> None:
    specs = expected_tensors(tiny_config())
    for name, shape in (
        ("layers.0.attn.wq_b.weight", (512, 64)),
        ("layers.0.attn.wo_a.weight", (128, 128)),
        ("layers.0.attn.wo_b.weight", (256, 128)),
        ("layers.0.hc_attn_fn", (24, 1024)),
        ("layers.1.engram.wkv.weight", (1280, 192)),
        ("layers.6.attn.indexer.wq_b.weight", (256, 64)),
        ("mtp.0.main_proj.weight", (256, 768)),
        ("aligner.w1.weight", (256, 576)),
    ):
        assert specs[name].shape == shape
    assert specs["layers.1.engram.embed.weight"].scale_shape == (6126, 1)


def test_scale_grids_round_up_for_axes_that_are_no_multiple_of_32() -> None:
    specs = expected_tensors(tiny_config(qk_rope_head_dim=16, index_n_heads=3, index_head_dim=32, o_lora_rank=40))
    assert specs["layers.0.attn.wo_a.weight"].shape == (160, 128)
    assert specs["layers.0.attn.wo_a.weight"].scale_shape == (5, 4)
    odd = TensorSpec("x.weight", Kind.FP8, (33, 65), Part.TEXT, specs["norm.weight"].group, ("F8_E4M3",))
    assert odd.scale_shape == (2, 3)
    assert odd.num_bytes == 33 * 65 + 6
    assert odd.num_parameters == math.prod(odd.shape)


def test_names_have_one_canonical_spelling() -> None:
    assert canonical_name("model.layers.0.attn_norm.weight") == "layers.0.attn_norm.weight"
    assert canonical_name("layers.0.attn_norm.weight") == "layers.0.attn_norm.weight"
    assert is_ignored_duplicate("mtp.1.embed.weight")
    assert is_ignored_duplicate("mtp.0.head.weight")
    assert not is_ignored_duplicate("mtp.2.markov_head.embed.weight")
    assert not is_ignored_duplicate("embed.weight")
