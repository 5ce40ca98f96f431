"""``DEEPINFER_*`` variables: typed, complete, and never silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.config.env import VARIABLES, WITHOUT_COUNTERPART, read_environment
from deepinfer.config.options import AUTO, OPTIONS
from deepinfer.config.values import parse_text
from deepinfer.errors import ConfigError

# Class U of the engine specification, 1.10.
USER_VARIABLES = """
    ACCELERATOR HF_MODEL_DIR USE_NEXTN_DECODE ENABLE_MTP_VARLEN DFLASH_CONFIDENCE_HEAD_TEMPERATURE
    YOCO_PREFILL_TRUNCATION_MODE YOCO_PREFILL_KEEP_TOKENS BATCH_INVARIANT ZERO_OVERHEAD_SCHEDULING ENFORCE_EAGER
    OVERRIDE_NUM_EXTRA_EXPERTS EXPERT_REARRANGEMENT_STEP_INTERVAL ENGRAM_FORCE_GPU_STORAGE JIT_CACHE_DIR
    DECODE_PERF_CACHE_DIR DECODE_TOKEN_BLACKLIST XGRAMMAR_TIMEOUT LOGGING_INTERVAL_STEP
""".split()  # noqa: SIM905 - as a list literal it would take 18 lines


def test_every_user_variable_is_recognised():
    known = {variable.name for variable in VARIABLES}
    assert set(USER_VARIABLES) <= known


def test_the_table_is_consistent():
    names = [variable.name for variable in VARIABLES]
    options = {option.name: option for option in OPTIONS}
    assert len(names) == len(set(names))
    assert not set(names) & WITHOUT_COUNTERPART
    for variable in VARIABLES:
        if variable.option is None:
            continue
        option = options[variable.option]
        if variable.means is not None:
            assert set(variable.means.values()) <= set(option.choices), variable.name
            continue
        assert variable.kind is option.kind, variable.name
        assert (variable.default == AUTO) == (option.default == AUTO) or variable.default == "unset", variable.name
        if option.default not in (None, AUTO, ()):
            assert parse_text(option.kind, variable.default) == option.default, variable.name


def test_values_are_typed_and_remember_their_variable():
    found = read_environment(
        {
            "DEEPINFER_HF_MODEL_DIR": "/models/v41",
            "DEEPINFER_MAX_NUM_SEQS": "8",
            "DEEPINFER_MEMORY_FRACTION": "0.25",
            "DEEPINFER_DECODE_TOKEN_BLACKLIST": "7,9-11",
            "DEEPINFER_NUM_BLOCKS": "auto",
            "PATH": "/bin",
        }
    )
    assert found.warnings == ()
    assert found.options == {
        "model": ("DEEPINFER_HF_MODEL_DIR", Path("/models/v41")),
        "max_num_seqs": ("DEEPINFER_MAX_NUM_SEQS", 8),
        "memory_fraction": ("DEEPINFER_MEMORY_FRACTION", 0.25),
        "token_blacklist": ("DEEPINFER_DECODE_TOKEN_BLACKLIST", ((7, 7), (9, 11))),
        "num_blocks": ("DEEPINFER_NUM_BLOCKS", "auto"),
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DEEPINFER_MAX_NUM_SEQS", "many"),
        ("DEEPINFER_MAX_NUM_SEQS", "auto"),
        ("DEEPINFER_MEMORY_FRACTION", "half"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "no"),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compress"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,x"),
        ("DEEPINFER_DECODE_TOKEN_BLACKLIST", "3-"),
    ],
)
def test_bad_value_names_variable_and_value(name, text):
    with pytest.raises(ConfigError) as caught:
        read_environment({name: text})
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)


def test_unknown_name_warns_with_the_nearest_one():
    (warning,) = read_environment({"DEEPINFER_MAX_NUM_SEQ": "8"}).warnings
    assert "DEEPINFER_MAX_NUM_SEQ " in warning
    assert "DEEPINFER_MAX_NUM_SEQS?" in warning
    (warning,) = read_environment({"DEEPINFER_QQQQ": "8"}).warnings
    assert "docs/configuration.md" in warning


def test_tuning_variable_of_the_vendor_engine_is_explained():
    (warning,) = read_environment({"DEEPINFER_GLOO_TIMEOUT": "60"}).warnings
    assert "DEEPINFER_GLOO_TIMEOUT" in warning
    assert "no effect" in warning


def test_unused_variable_warns_unless_it_asks_for_what_happens_anyway():
    (warning,) = read_environment({"DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS": "2"}).warnings
    assert "not yet used" in warning
    for name, text in (
        ("OVERRIDE_NUM_EXTRA_EXPERTS", "0"),
        ("YOCO_PREFILL_TRUNCATION_MODE", "off"),
    ):
        assert read_environment({f"DEEPINFER_{name}": text}).warnings == ()


def test_enforce_eager_switches_graphs_off():
    found = read_environment({"DEEPINFER_ENFORCE_EAGER": "1"})
    assert found.options == {"cuda_graphs": ("DEEPINFER_ENFORCE_EAGER", "off")}
    assert found.warnings == ()
    for text in ("0", ""):
        assert read_environment({"DEEPINFER_ENFORCE_EAGER": text}).options == {}
    both = {"DEEPINFER_CUDA_GRAPHS": "lazy", "DEEPINFER_ENFORCE_EAGER": "0"}
    assert read_environment(both).options == {"cuda_graphs": ("DEEPINFER_CUDA_GRAPHS", "lazy")}


def test_two_variables_of_one_option_have_to_agree():
    agreeing = {"DEEPINFER_CUDA_GRAPHS": "off", "DEEPINFER_ENFORCE_EAGER": "1"}
    assert read_environment(agreeing).options["cuda_graphs"][1] == "off"
    with pytest.raises(ConfigError) as caught:
        read_environment({**agreeing, "DEEPINFER_CUDA_GRAPHS": "startup"})
    for part in ("DEEPINFER_CUDA_GRAPHS", "'startup'", "DEEPINFER_ENFORCE_EAGER", "'off'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text_is_unset_but_false_for_a_bool(text):
    found = read_environment(dict.fromkeys(("DEEPINFER_ACCELERATOR", "DEEPINFER_MAX_NUM_SEQS"), text))
    assert found.options == {}
    assert found.warnings == ()
    assert read_environment({"DEEPINFER_ENABLE_MTP_VARLEN": text}).warnings == ()


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("DEEPINFER_MAX_NUM_SEQS", "3")
    assert read_environment().options["max_num_seqs"] == ("DEEPINFER_MAX_NUM_SEQS", 3)
