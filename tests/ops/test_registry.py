"""Selection of implementations: by platform, by size, by pin, and with a reason."""

import pytest

from deepinfer.errors import ConfigError
from deepinfer.ops.registry import Op, Ops
from deepinfer.ops.selection import choose as choose_implementation
from deepinfer.ops.selection import parse_pins, select_ops


def make_op():
    operator = Op("double", lambda x: 2 * x)

    @operator.register("fast", platforms=("nvidia",), accepts=lambda dims: None if dims < 10 else "wider than 10")
    def fast(x):
        return x + x

    return operator


def choose(operator, platform, dims, pin=None):
    return choose_implementation(operator, platform, dims, pin)[1]


def test_the_best_that_covers_is_taken_and_others_are_explained():
    operator = make_op()
    assert choose(operator, "nvidia", 5).implementation == "fast"
    assert choose(operator, "cpu", 5).implementation == "reference"
    assert "needs nvidia" in choose(operator, "cpu", 5).reason
    assert "wider than 10" in choose(operator, "nvidia", 20).reason
    assert choose(operator, "nvidia", 5, "reference").implementation == "reference"


def test_a_pin_that_cannot_run_is_an_error():
    with pytest.raises(ConfigError, match="needs nvidia"):
        choose(make_op(), "cpu", 5, "fast")


def test_pins_are_parsed_and_checked():
    assert parse_pins("all=reference, moe=reference") == {"all": "reference", "moe": "reference"}
    with pytest.raises(ConfigError, match="Did you mean 'rms_norm'"):
        parse_pins("rms_nrm=reference")
    with pytest.raises(ConfigError, match="OP=IMPLEMENTATION"):
        parse_pins("moe")


def test_every_operator_is_selected_with_a_reason():
    ops = select_ops("cpu", None)
    assert isinstance(ops, Ops)
    names = {choice.op for choice in ops.explain()}
    assert {"rms_norm", "linear", "sparse_attention", "index_full", "moe", "engram_rows"} <= names
    assert all(choice.reason for choice in ops.explain())
