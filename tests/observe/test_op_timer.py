"""Operator times: every call is counted while the timer is on, and nothing is left of it afterwards."""

from __future__ import annotations

import pytest

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.observe.op_timer import OpTimer
from deepinfer.ops.selection import select_ops


@pytest.fixture
def ops():
    return select_ops("cpu", tiny_config().text)


def test_calls_are_counted_and_pass_through(ops):
    import torch

    x, weight = torch.ones(2, 8), torch.ones(8, dtype=torch.float64)
    plain = ops.rms_norm(x, weight, 1e-6)
    with OpTimer(ops) as timer:
        timed = [ops.rms_norm(x, weight, 1e-6) for _ in range(3)]
    assert all(torch.equal(each, plain) for each in timed)
    assert timer.calls == {"rms_norm": 3}
    assert timer.seconds["rms_norm"] > 0


def test_the_functions_are_put_back_even_after_an_error(ops):
    before = {choice.op: getattr(ops, choice.op) for choice in ops.explain()}
    timer = OpTimer(ops)
    with pytest.raises(TypeError), timer:
        ops.rms_norm()
    assert {choice.op: getattr(ops, choice.op) for choice in ops.explain()} == before
    assert timer.calls == {"rms_norm": 1}
