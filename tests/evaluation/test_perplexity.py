"""Perplexity of texts: windows, units, and what comes with the package."""

from __future__ import annotations

import math

import pytest

from deepinfer.evaluation.perplexity import (
    Window,
    bits_per_byte,
    load_texts,
    perplexity,
    score_texts,
    split_windows,
)
from tests.evaluation.scripted import BOS, TOKENIZER, ScriptedModel


def test_windows_cover_the_text_without_overlap():
    model = ScriptedModel(str)
    text = "".join(str(place % 10) for place in range(100))
    windows = split_windows(model, text, 11, None)
    assert all(len(window) == 11 and window[0] == BOS for window in windows)
    assert "".join(TOKENIZER.decode(window) for window in windows) == text
    assert len(split_windows(model, text[:99], 11, None)) == 9
    assert len(split_windows(model, text, 11, 3)) == 3
    assert split_windows(model, "short", 11, None) == []


def test_a_model_that_gives_every_token_one_half_has_perplexity_two():
    model = ScriptedModel(lambda prompt: "x")
    done: list[int] = []
    windows = score_texts(model, {"a": "1" * 64, "b": "2" * 40}, window_tokens=9, batch=3, on_done=done.append)
    assert [window.text for window in windows] == ["a"] * 8 + ["b"] * 5
    assert perplexity(windows) == pytest.approx(2)
    assert bits_per_byte(windows) == pytest.approx(1)
    assert sum(done) == 13
    assert all(params.logprobs_mode == "raw" and params.num_prompt_logprobs == 0 for params in model.params)


def test_long_windows_weigh_more():
    windows = [Window("a", 10 * math.log(4), 10, 20), Window("a", 30 * math.log(2), 30, 60)]
    assert perplexity(windows) == pytest.approx(2 ** (50 / 40))
    assert bits_per_byte(windows) == pytest.approx(50 / 80)
    assert math.isnan(perplexity([]))
    assert math.isnan(bits_per_byte([]))


def test_the_package_brings_held_out_texts():
    texts = load_texts()
    assert len(texts) >= 3
    assert all(len(text) > 10_000 for text in texts.values())
