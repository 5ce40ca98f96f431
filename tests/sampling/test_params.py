"""Every field of SamplingParams: defaults, canonical form, and what is refused with which words."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams

SO = {"schema_type": "json", "schema": "{}"}
OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", 3.5e38),  # infinite in float32, as the logits are
    ("temperature", 1e300),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", 9e-31),
    ("repetition_penalty", 1.1e30),
    ("repetition_penalty", 1e39),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {2**31: 1.0}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("first_n_token_no_eos", -1),
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", "\ud83d"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("eos_id", -1),
    ("logprobs", -1),
    ("logprobs", 1001),
    ("top_logprobs", -1),
    ("top_logprobs", 1001),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 1001),
    ("logprobs_mode", "logits"),
    ("n", 0),
    ("n", 1025),
    ("golden_token_ids", [3, -2]),
]
WRONG_TYPE = [
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", "0.5"),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", None),
    ("presence_penalty", "x"),
    ("frequency_penalty", []),
    ("repetition_penalty", None),
    ("logit_bias", [1, 2]),
    ("logit_bias", {"abc": 1.0}),
    ("logit_bias", {5: "x"}),
    ("allowed_token_ids", "abc"),
    ("allowed_token_ids", ["abc"]),
    ("max_tokens", None),
    ("max_tokens", 1.0),
    ("min_tokens", "1"),
    ("ignore_eos", 1),
    ("first_n_token_no_eos", True),
    ("stop", 5),
    ("stop", [5]),
    ("stop_token_ids", ["abc"]),
    ("stop_token_ids", 151645),
    ("include_stop_str_in_output", "yes"),
    ("eos_id", None),
    ("logprobs", "yes"),
    ("top_logprobs", None),
    ("prompt_logprobs", 0.5),
    ("logprobs_mode", None),
    ("n", "2"),
    ("seq_seed", "7"),
    ("seq_seed", 1.0),
    ("seq_seed", True),
    ("so_args", "json"),
    ("golden_token_ids", 5),
    ("skip_special_tokens", 1),
    ("detokenize", None),
]


def test_defaults_are_those_of_the_specification():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, -1, 16)
    assert (params.ignore_eos, params.prompt_logprobs, params.top_logprobs) == (False, False, 0)
    assert (params.first_n_token_no_eos, params.eos_id) == (0, 0)
    assert (params.so_args, params.golden_token_ids, params.seq_seed, params.logprobs) == (None, None, None, None)
    assert not params.wants_logprobs
    assert params.num_prompt_logprobs is None
    assert not params.uses_penalties
    assert not params.is_greedy


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_value_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.field.startswith(field)
    assert field in str(caught.value)
    assert repr(caught.value.value)[:20] in str(caught.value)


@pytest.mark.parametrize(("field", "value"), WRONG_TYPE)
def test_wrong_type_is_refused_as_value_and_type_error(field, value):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, RequestError)
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize(
    ("given", "meant"), [("temperatur", "temperature"), ("max_token", "max_tokens"), ("seed", "seq_seed")]
)
def test_unknown_name_suggests_the_nearest(given, meant):
    for make in (lambda: SamplingParams(**{given: 1}), lambda: SamplingParams.from_dict({given: 1})):
        with pytest.raises(RequestError) as caught:
            make()
        assert repr(given) in str(caught.value)
        assert repr(meant) in str(caught.value)


def test_unknown_name_like_nothing_lists_all_names():
    with pytest.raises(RequestError, match="golden_token_ids"):
        SamplingParams.from_dict({"zzzzzz": 1})
    with pytest.raises(RequestError):
        SamplingParams.from_dict({3: 1})
    with pytest.raises(RequestError):
        SamplingParams.from_dict([("n", 1)])


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_lists_become_tuples_and_numpy_numbers_python_ones():
    params = SamplingParams(
        stop="x", stop_token_ids=np.array([1, 2]), top_k=np.int64(4), temperature=np.float32(0.5), logit_bias={"7": 1}
    )
    assert params.stop == ("x",)
    assert params.stop_token_ids == (1, 2)
    assert type(params.top_k) is int
    assert params.temperature == 0.5
    assert params.logit_bias == {7: 1.0}


def test_dict_form_round_trips():
    params = SamplingParams(stop=["a", "b"], seq_seed=-1, logit_bias={3: -100}, golden_token_ids=[1, -1], so_args=SO)
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("logprobs", "top_logprobs", "wants", "count"),
    [
        (None, 0, False, 0),
        (False, 0, False, 0),
        (True, 0, True, 0),
        (0, 0, True, 0),
        (1, 0, True, 1),
        (5, 0, True, 5),
        (5, 2, True, 2),
        (None, 3, True, 3),
        (True, 3, True, 3),
    ],
)
def test_logprobs_rule(logprobs, top_logprobs, wants, count):
    params = SamplingParams(logprobs=logprobs, top_logprobs=top_logprobs)
    assert params.wants_logprobs is wants
    assert params.top_logprobs == count


def _replaced(params, **changes):
    return dataclasses.replace(params, **changes)


def _through_dict(params, **changes):
    return SamplingParams.from_dict({**params.to_dict(), **changes})


def _replaced_after_copies(params, **changes):
    twice = dataclasses.replace(copy.deepcopy(pickle.loads(pickle.dumps(params))), temperature=0.5)
    return dataclasses.replace(twice, temperature=params.temperature, **changes)


@pytest.mark.parametrize("changed", [_replaced, _through_dict, _replaced_after_copies])
@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"logprobs": 5}, {"logprobs": 2}),
        ({"logprobs": 5}, {"logprobs": 9}),
        ({"logprobs": 5}, {"logprobs": None}),
        ({"logprobs": 5}, {"logprobs": False}),
        ({"logprobs": 5}, {"logprobs": True}),
        ({"logprobs": 5}, {"logprobs": 0}),
        ({"logprobs": 5}, {"top_logprobs": 3}),
        ({"logprobs": 5}, {"max_tokens": 3}),
        ({"logprobs": 5, "top_logprobs": 3}, {"logprobs": 2}),
        ({"logprobs": 5, "top_logprobs": 3}, {"top_logprobs": 0}),
        ({"top_logprobs": 3}, {"logprobs": 2}),
        ({"top_logprobs": 3}, {"top_logprobs": 0}),
    ],
)
def test_a_copy_with_changes_is_what_the_constructor_makes_of_them(changed, given, changes):
    copied, made = changed(SamplingParams(**given), **changes), SamplingParams(**{**given, **changes})
    assert copied == made
    assert (copied.top_logprobs, copied.wants_logprobs) == (made.top_logprobs, made.wants_logprobs)


@pytest.mark.parametrize(("value", "count"), [(None, None), (False, None), (True, 0), (0, 0), (7, 7)])
def test_prompt_logprobs_rule(value, count):
    assert SamplingParams(prompt_logprobs=value).num_prompt_logprobs == count


@pytest.mark.parametrize(("seed", "stored"), [(0, 0), (-1, 2**64 - 1), (2**64 + 3, 3), (-(2**70), 0)])
def test_seed_counts_modulo_two_to_the_64(seed, stored):
    assert SamplingParams(seq_seed=seed).seq_seed == stored


def test_greedy_threshold():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("so_args", "words"),
    [
        ({}, "schema_type"),
        ({"schema_type": "json"}, "schema"),
        ({"schema_type": "yaml", "schema": ""}, "yaml"),
        ({**SO, "serialized": b""}, "serialized"),
        ({**SO, "bound_token_ids": [1]}, "bound_token_ids"),
        ({**SO, "trigger_tokens": [1]}, "trigger_token_ids"),
        ({**SO, "trigger_token_ids": [-1]}, "trigger_token_ids"),
        ({**SO, "trigger_token_ids": "ab"}, "trigger_token_ids"),
        ({**SO, "bound_token_id": 3}, "trigger"),
        ({**SO, "bound_token_id": 3, "trigger_token_ids": []}, "trigger"),
        ({**SO, "bound_token_id": -3, "trigger_token_ids": [1]}, "bound_token_id"),
        ({"schema_type": "json", "schema": {"type": "object"}}, "json.dumps"),
    ],
)
def test_malformed_so_args_name_the_key(so_args, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(so_args=so_args)


def test_so_args_are_copied_and_refused_by_an_engine_without_grammars():
    given = {**SO, "trigger_token_ids": [4, 5], "bound_token_id": 0}
    params = SamplingParams(so_args=given)
    given["trigger_token_ids"].append(6)
    assert params.so_args["trigger_token_ids"] == [4, 5]
    with pytest.raises(RequestError, match="structured output"):
        params.validate_for(10)
    params.validate_for(6, supports_structured_output=True)
    with pytest.raises(RequestError, match="trigger_token_ids"):
        params.validate_for(5, supports_structured_output=True)


@pytest.mark.parametrize(
    "values",
    [
        {"stop_token_ids": [9, 10]},
        {"stop_token_ids": [151645]},
        {"logit_bias": {10: 1.0}},
        {"allowed_token_ids": [0, 2**31 - 1]},
        {"golden_token_ids": [-1, 10]},
        {"eos_id": 10},
        {"top_logprobs": 11},
        {"prompt_logprobs": 11},
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_at_submission(values):
    params = SamplingParams(**values)
    with pytest.raises(RequestError) as caught:
        params.validate_for(10)
    assert caught.value.field.split()[0] in values


def test_last_id_of_the_vocabulary_is_accepted():
    params = SamplingParams(
        stop_token_ids=[9], logit_bias={9: 1.0}, allowed_token_ids=[9], golden_token_ids=[-1, 9], top_logprobs=10
    )
    params.validate_for(10)
    with pytest.raises(RequestError):  # the same, one token fewer
        params.validate_for(9)


def test_parameters_are_torch_free():
    code = "import sys, deepinfer.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
