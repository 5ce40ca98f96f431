"""Stop conditions inside accepted blocks: the same output for every cut into tokens, every block size, both doors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import StreamDelta
from tests.engine.requests import summary
from tests.engine.scripted import ScriptedModel, spell
from tests.engine.support import make_engine


class Case(NamedTuple):
    script: str
    stops: list[str]
    text: str
    """What the caller gets."""
    stop: str | None


CASES = [
    Case("this, a", ["a", "is", ","], "th", "is"),
    Case("abcDEFGHIJ", ["DEFGHIJ"], "abc", "DEFGHIJ"),
    Case("abcDEFGHI", ["DEFGHIJ"], "abcDEFGHI", None),  # held back, and let go at the end
    Case("xabcd", ["abcd", "ab"], "x", "ab"),
    Case("xabcd", ["bc", "abc"], "x", "abc"),
    Case("ok</think>more", ["think>"], "ok</", "think>"),
    Case("aé日b", ["日"], "aé", "日"),  # several tokens per character
]


def drive(engine: Engine, names: Collection[str], streamed: Collection[str] = ()) -> dict[str, tuple[Any, ...]]:
    """Run requests to their end. Returns summaries, those of ``streamed`` requests put together from their deltas."""
    found: dict[str, tuple[Any, ...]] = {}
    deltas: dict[str, list[StreamDelta]] = {name: [] for name in streamed}
    others = [name for name in names if name not in deltas]
    while engine.has_work():
        engine.run_step()
        for delta in engine.take_deltas(list(streamed)):
            deltas[delta.request_id].append(delta)
        for output in engine.take_changes(others):
            if output.finished:
                found[output.request_id] = summary(output.outputs[0])
    engine.check()
    for name, pieces in deltas.items():
        ids = [token for piece in pieces for token in piece.token_ids]
        logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
        text = "".join(piece.text for piece in pieces)
        found[name] = ids, text, pieces[-1].finish_reason, pieces[-1].stop_reason, logprobs
    return found


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5])
def test_every_cut_and_every_block_gives_the_same_output(tiny_path: Path, num_drafts: int) -> None:
    """T1: text, stop reason, and as many ids and logprobs as were delivered; nothing of a stop string is ever sent."""
    engine = make_engine(tiny_path, num_speculative_tokens=num_drafts, max_num_seqs=32)
    assert engine.tokenizer is not None
    model = ScriptedModel(engine)
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "logprobs": 2, "skip_special_tokens": False}
    pairs = []
    for case in CASES:
        for script in (spell(engine, case.script), engine.tokenizer.encode(case.script, add_bos=False)):
            names = [model.submit([3, 4], script, stop=case.stops, **values) for _ in range(2)]
            pairs.append((case, script, names))
    found = drive(engine, [name for *_, names in pairs for name in names], [names[1] for *_, names in pairs])
    for case, script, (at_once, streamed) in pairs:
        assert found[at_once] == found[streamed]
        ids, text, reason, stop, logprobs = found[at_once]
        assert (text, reason, stop) == (case.text, "stop", case.stop)
        assert len(logprobs) == len(ids)
        assert all(token in entry for token, entry in zip(ids, logprobs, strict=True))
        assert ids == [*script, model.eos][: len(ids)]
        if case.stop is not None:
            assert case.stop in engine.tokenizer.decode(ids)
            assert case.stop not in engine.tokenizer.decode(ids[:-1]), "no token behind the one that completes it"
    if num_drafts:
        assert max(model.blocks) == 1 + num_drafts


@pytest.mark.parametrize("wrong_every", [0, 3])
def test_limits_cut_a_block_to_the_token(tiny_path: Path, wrong_every: int) -> None:
    """T1: EOS, stop ids and max_tokens inside a block; counts are of delivered tokens (the earliest event wins)."""
    engine = make_engine(tiny_path, num_speculative_tokens=5, max_num_seqs=32)
    model = ScriptedModel(engine, wrong_every=wrong_every)
    script = spell(engine, "abcdefghij")
    expected = {}
    for limit in range(1, 9):
        text = "abcdefghij"[:limit]
        name = model.submit([3], script, temperature=0.0, max_tokens=limit)
        expected[name] = (script[:limit], text, "length", None, None)
        name = model.submit([3], script, temperature=0.0, max_tokens=30, stop_token_ids=[script[limit]])
        expected[name] = (script[: limit + 1], text, "stop", script[limit], None)
        name = model.submit([3], script[:limit], temperature=0.0, max_tokens=30)
        expected[name] = ([*script[:limit], model.eos], text, "stop", None, None)
    assert drive(engine, list(expected)) == expected
    report = engine.statistics.speculation.report()
    assert 0 < sum(report.accepted) <= sum(report.verified)


@pytest.mark.parametrize("ends_by", ["length", "eos", "stop_token"])
@pytest.mark.parametrize("include", [False, True])
def test_half_a_character_at_the_end_can_complete_a_stop_string(tiny_path: Path, ends_by: str, include: bool) -> None:
    """It is U+FFFD in the text, and what a stop string takes from the text is named as the reason."""
    engine = make_engine(tiny_path, num_speculative_tokens=2, max_num_seqs=32)
    model = ScriptedModel(engine)
    half = spell(engine, "a") + spell(engine, "\U0001f600")[:2]
    other = spell(engine, "z")[0]
    script = {"length": half, "eos": half, "stop_token": [*half, other]}[ends_by]
    limit = len(half) if ends_by == "length" else 30
    values: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [other], "include_stop_str_in_output": include}

    def run(stop: list[str] | None, **more: Any) -> tuple[str, str, int | str | None]:
        name = model.submit([3], script, **{**values, "max_tokens": limit, "stop": stop, **more})
        _, text, reason, why, *_ = drive(engine, [name])[name]
        return text, reason, why

    reason, why = {"length": ("length", None), "eos": ("stop", None), "stop_token": ("stop", other)}[ends_by]
    tail = "z" if include and ends_by == "stop_token" else ""
    assert run(None) == ("a\ufffd" + tail, reason, why)
    assert run(["a\ufffdb"]) == ("a\ufffd" + tail, reason, why), "held back, and let go"
    if not tail:
        assert run(["\ufffd"]) == ("a\ufffd" if include else "a", "stop", "\ufffd")
        assert run(["x", "a\ufffd"]) == ("a\ufffd" if include else "", "stop", "a\ufffd")
    if ends_by == "length":
        assert run(["\ufffd"], min_tokens=limit) == ("a\ufffd", reason, why), "stop strings wait for min_tokens"


def test_an_aborted_output_keeps_its_half_character(tiny_path: Path) -> None:
    """Nobody knows what it would have become, so it is no stop string."""
    engine = make_engine(tiny_path, num_speculative_tokens=0)
    model = ScriptedModel(engine)
    script = spell(engine, "a") + spell(engine, "\U0001f600")[:2]
    name = model.submit([3], [*script, *script], temperature=0.0, max_tokens=30, stop=["\ufffd"])
    while sum(len(delta.token_ids) for delta in engine.take_deltas([name])) == 0:
        engine.run_step()
    for _ in range(2):
        engine.run_step()
    engine.abort(name)
    (output,) = engine.take_changes([name])
    ids, text, reason, why, *_ = summary(output.outputs[0])
    assert ids == script
    assert (text, reason, why) == ("a\ufffd", "abort", None)
