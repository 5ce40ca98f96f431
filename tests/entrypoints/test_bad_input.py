"""Every mistake ends in an error that says what, why and what to do, and the others are served all the same."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import CheckpointError, CheckpointFileError, ConfigError, EngineError, RequestError
from deepinfer.structured.spec import Regex
from tests.entrypoints.conftest import SMALL

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
LIMIT = SMALL["max_model_len"]


def _generate(llm: LLM, *args, **kwargs):
    return llm.generate(*args, use_tqdm=False, **kwargs)


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        (["fine", ""], SHORT, ["prompts[1]", "empty"]),
        ([{"prompt_token_ids": []}], SHORT, ["prompts[0]", "empty"]),
        (["fine", "\ud800"], SHORT, ["prompts[1]", "surrogate"]),
        ([{"text": "x"}], SHORT, ["prompts[0]", "prompt_token_ids"]),
        ([None], SHORT, ["prompts[0]"]),
        ([3.5], SHORT, ["prompts[0]", "3.5"]),
        (None, SHORT, ["prompts"]),
        (["x"], {"max_tokens": 0}, ["max_tokens", "0"]),
        (["x"], {"max_tokens": -1}, ["max_tokens", "-1"]),
        (["x"], {"max_tokens": 2.5}, ["max_tokens", "2.5"]),
        (["x"], {"max_new_tokens": 4}, ["max_new_tokens", "max_tokens"]),
        (["x"], {"temprature": 1.0}, ["temprature", "temperature"]),
        (["x"], {"temperature": float("nan")}, ["temperature", "nan"]),
        (["x"], {"top_p": 0.0}, ["top_p"]),
        (["x"], {"top_k": 0}, ["top_k"]),
        (["x"], {"n": 0}, ["n is 0"]),
        (["x"], {"min_tokens": 9, "max_tokens": 3}, ["min_tokens", "max_tokens"]),
        (["x"], {"stop_token_ids": [512]}, ["stop_token_ids", "512"]),
        (["x"], {"logit_bias": {600: 1.0}}, ["logit_bias", "600"]),
        (["x"], {"so_args": {"schema_type": "json", "schema": '{"not": {}}'}}, ["$.not"]),
        (["x"], {"so_args": {"schema_type": "json", "schema": "{bad"}}, ["{bad", "no JSON"]),
        (["x"], {"so_args": {"schema_type": "json", "schema": '{"enum": []}'}}, ["$.enum"]),
        (["x"], {"so_args": {"schema_type": "regex", "schema": "[]"}}, ["matches no character"]),
        (["x"], {"so_args": {"schema_type": "ebnf", "schema": 'start ::= "a"'}}, ["no rule of this name"]),
        (["x"], {"structured": Regex("a"), "ignore_eos": True}, ["ignore_eos"]),
        (["x"], {"structured": Regex("a", trigger_token_ids=[512])}, ["trigger_token_ids", "512"]),
        (["x"], {"structured": Regex("a", after_reasoning="<nope>")}, ["after_reasoning", "<nope>"]),
        (["x"], {"seed": 1}, ["seed", "Use 'seq_seed'"]),
        (["x"], {"golden_token_ids": [512]}, ["golden_token_ids", "512"]),
        (["x"], {"allowed_token_ids": [512]}, ["allowed_token_ids", "512"]),
        (["x"], [SHORT, SHORT], ["sampling_params", "2 entries"]),
        (["x", "y"], [SHORT, {"max_tokens": 0}], ["max_tokens"]),
        (["x"], "greedy", ["sampling_params"]),
    ],
)
def test_a_mistake_that_can_be_seen_beforehand_queues_nothing(llm, prompts, params, said):
    with pytest.raises(RequestError) as caught:
        _generate(llm, prompts, params)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert not [word for word in said if word not in message], message
    assert caught.value.why
    assert caught.value.fix
    assert not llm.engine.has_work()
    assert len(_generate(llm, ["fine"], SHORT)[0].outputs[0].token_ids) == 3


def _so(kind: str, schema: str) -> dict[str, object]:
    return {"so_args": {"schema_type": kind, "schema": schema}}


@pytest.mark.parametrize(
    ("params", "reason", "said"),
    [
        (_so("json", '{"$ref": "#"}'), "invalid_schema", "references lead back"),
        (_so("json", '{"type": "integer", "minimum": 5, "maximum": 3}'), "invalid_schema", "no integer fits"),
        (_so("json", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'), "invalid_schema", "$.type"),
        (_so("ebnf", "root ::="), "invalid_schema", "can't be compiled"),
        (_so("ebnf", "root ::= root"), "invalid_schema", "no text fits it"),
        (_so("ebnf", 'root ::= "a" root'), "invalid_schema", "no text fits it"),
        ({**_so("regex", "a"), "min_tokens": 3}, "error", "no token can be sampled"),
        ({**_so("regex", "b"), "golden_token_ids": [300]}, "error", "the grammar does not allow it"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "error", "no token can be sampled"),
    ],
    ids=str,
)
def test_a_mistake_that_shows_later_ends_its_request_only(llm, params, reason, said):
    """With those above: the table in docs/sampling.md."""
    outputs = _generate(llm, ["fine", "x", "fine"], [SHORT, {"max_tokens": 3, **params}, SHORT])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", reason, "length"]
    assert said in outputs[1].error
    assert outputs[0].error is outputs[2].error is None


def test_images_are_refused(llm):
    with pytest.raises(RequestError, match="images"):
        _generate(llm, ["x"], SHORT, multi_modal_data={"image": object()})
    with pytest.raises(RequestError, match="images are not supported yet"):
        _generate(llm, [{"prompt": "x", "multi_modal_data": {"image": object()}}], SHORT)


def test_as_many_id_lists_as_prompts(llm):
    with pytest.raises(RequestError, match="prompt_token_ids"):
        _generate(llm, ["a", "b"], SHORT, prompt_token_ids=[[3]])


@pytest.mark.parametrize("bad", [512, -1, 2**70, 3.0, "3", True, None], ids=str)
def test_a_bad_id_ends_its_request_only(llm, bad):
    expected = _generate(llm, None, SHORT, prompt_token_ids=[[3, 4]])[0].outputs[0].token_ids
    outputs = _generate(llm, None, SHORT, prompt_token_ids=[[3, 4], [3, bad], [3, 4]])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "prompts[1][1]" in outputs[1].error
    assert "0 to 511" in outputs[1].error
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == expected


def test_numpy_ids_are_ids(llm):
    plain = _generate(llm, None, SHORT, prompt_token_ids=[[3, 4]])[0].outputs[0].token_ids
    numpy = _generate(llm, None, SHORT, prompt_token_ids=[np.array([3, 4])])[0].outputs[0].token_ids
    assert numpy == plain


def test_a_prompt_beyond_the_limit_ends_its_request_only(llm):
    outputs = _generate(llm, None, SHORT, prompt_token_ids=[[3] * (LIMIT + 1), [3, 4]])
    assert outputs[0].outputs[0].finish_reason == "prompt_length_exceeded"
    assert str(LIMIT) in outputs[0].error
    assert str(LIMIT + 1) in outputs[0].error
    assert outputs[1].error is None
    assert len(outputs[1].outputs[0].token_ids) == 3


def test_a_stream_of_a_prompt_beyond_the_limit_says_so(llm):
    (delta,) = llm.stream({"prompt_token_ids": [3] * (LIMIT + 1)}, SHORT)
    assert delta.finish_reason == "prompt_length_exceeded"
    assert str(LIMIT) in delta.error


def test_output_ends_at_the_model_length(llm):
    params = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
    (output,) = _generate(llm, None, params, prompt_token_ids=[[3] * (LIMIT - 4)])
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    # All tokens but the last one are computed, and LIMIT are computed at most.
    assert len(completion.token_ids) == 5
    assert "max_model_len" in str(output.error), "it has fewer tokens than were asked for, so it says why"


def test_a_prompt_of_exactly_the_limit_gives_one_token(llm):
    (output,) = _generate(llm, None, SHORT, prompt_token_ids=[[3] * LIMIT])
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 1


def test_a_bad_stream_fails_at_the_call(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.stream("", SHORT)
    with pytest.raises(RequestError, match="512"):
        llm.stream({"prompt_token_ids": [512]}, SHORT)


@pytest.mark.parametrize(
    "messages", [[{"role": "user"}], [{"role": "robot", "content": "x"}], [{"role": "user", "content": "\udc00"}]]
)
def test_a_bad_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError):
        llm.chat(messages, SHORT, use_tqdm=False)


# ---- start-up --------------------------------------------------------------------------------------------------------


def _load(path: Path, **more) -> None:
    LLM(path, **{**SMALL, **more})


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("numerics", "fp16", "faithful, fast, float32"),
        ("device", "tpu", "cpu, nvidia, ascend"),
        ("load_format", "gguf", "auto, dummy"),
        ("max_num_seqs", 0, "max_num_seqs"),
        ("max_model_len", 1 << 20, "1024"),
        ("memory_fraction", 2.0, "memory_fraction"),
        ("max_num_sequences", 3, "max_num_seqs"),
        ("ops", "moe=fast", "reference"),
        ("num_blocks", 1 << 40, "num_blocks"),
    ],
)
def test_a_bad_option_stops_the_start(model_path, argument, value, said):
    with pytest.raises(EngineError) as caught:
        _load(model_path, **{argument: value})
    assert said in str(caught.value)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(CheckpointFileError, match="nowhere"):
        _load(tmp_path / "nowhere")
    with pytest.raises(CheckpointFileError, match=r"config\.json"):
        _load(tmp_path)
    with pytest.raises(ConfigError, match=r"no model is given.*default_model\(\)"):
        LLM()


def test_a_missing_shard_is_named(own_model):
    shard = sorted(own_model.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointFileError, match=shard.name):
        _load(own_model)


def test_a_truncated_file_is_named(own_model):
    shard = sorted(own_model.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=shard.name):
        _load(own_model)


def test_a_broken_configuration_is_named(own_model):
    file = own_model / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["text_config"]["hidden_act"] = "gelu"
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="gelu"):
        _load(own_model)


def test_scales_of_another_block_size_are_refused(own_model):
    name = _reshape_a_scale(own_model)
    with pytest.raises(CheckpointError) as caught:
        _load(own_model)
    assert name in str(caught.value)
    assert "shape" in str(caught.value)


def _reshape_a_scale(directory: Path) -> str:
    """Turn one FP8 weight's scale grid of 32x32 tiles into one of 64x16 tiles: as many bytes, another shape."""
    for shard in sorted(directory.glob("*.safetensors")):
        data = shard.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        for name, entry in header.items():
            if name.endswith("wq_b.scale") and entry["shape"][0] % 2 == 0:
                entry["shape"] = [entry["shape"][0] // 2, entry["shape"][1] * 2]
                text = json.dumps(header).encode()
                text += b" " * (-len(text) % 8)
                shard.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
                return name
    raise AssertionError("the checkpoint has no such scale")
