"""Draft metrics from recorded verifications."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from deepinfer.evaluation.draft_metrics import DraftRecorder, DraftStep, summarize
from deepinfer.worker.step_results import SequenceTokens
from tests.evaluation.scripted import EOS, ScriptedWorker


def recorder_with(*steps: tuple[list[int], list[float]]) -> DraftRecorder:
    recorder = DraftRecorder(EOS)
    recorder.observe("a", [7], [])
    for tokens, confidence in steps:
        recorder.observe("a", tokens, confidence)
    return recorder


def test_the_step_of_the_prompt_does_not_count():
    assert recorder_with().all_steps() == []
    assert len(recorder_with(([1, 2], [0.5, 0.5])).all_steps()) == 1


def test_survival_is_the_product_of_confidences():
    (step,) = recorder_with(([1, 2, 3], [0.5, 0.5, 0.8])).all_steps()
    assert step.survival == pytest.approx((0.5, 0.25, 0.2))
    assert (step.num_accepted, step.num_emitted) == (2, 3)


@pytest.mark.parametrize(
    ("tokens", "slots", "accepted", "emitted"),
    [
        ([1, EOS, 5, 6], 2, 2, 2),  # the second draft was EOS and right; what was accepted behind it is nobody's
        ([1, EOS], 2, 1, 2),  # the second draft was wrong: it should have been EOS
        ([EOS], 1, 0, 1),
        ([1, 2, 3, EOS], 3, 3, 4),  # all drafts right, and the model's own token ends it
    ],
)
def test_slots_behind_the_end_do_not_exist(tokens, slots, accepted, emitted):
    (step,) = recorder_with((tokens, [0.9, 0.9, 0.9])).all_steps()
    assert (len(step.survival), step.num_accepted, step.num_emitted) == (slots, accepted, emitted)


def test_metrics_of_a_known_sequence():
    steps = [DraftStep((0.9, 0.6), 2, 3), DraftStep((0.9, 0.6), 1, 2), DraftStep((0.9,), 1, 1), DraftStep((), 0, 1)]
    found = summarize(steps)
    assert found.num_steps == 4
    assert found.mean_accepted_per_step == pytest.approx(7 / 4)
    assert found.acceptance_by_position == pytest.approx((1.0, 0.5))
    assert found.ece_by_position == pytest.approx((0.1, 0.1))
    assert found.ece == pytest.approx(0.1)


def test_honest_confidence_has_a_small_error_and_boasting_a_large_one():
    rng = np.random.default_rng(0)
    honest, boasting = [], []
    for _ in range(4000):
        chance = rng.uniform(0.2, 1.0, 2)
        survived = np.cumprod(rng.random(2) < chance)
        accepted = int(survived.sum())
        honest.append(DraftStep(tuple(np.cumprod(chance)), accepted, accepted + 1))
        boasting.append(DraftStep((0.99, 0.98), accepted, accepted + 1))
    assert summarize(honest).ece < 0.02
    assert summarize(boasting).ece > 0.3


def test_nothing_recorded_gives_no_numbers():
    found = summarize([])
    assert found.acceptance_by_position == ()
    assert math.isnan(found.mean_accepted_per_step)
    assert math.isnan(found.ece)


def test_watching_files_steps_under_the_label_and_leaves_the_worker_as_it_was():
    worker = ScriptedWorker()
    recorder = DraftRecorder(EOS)

    def tokens(ids: list[int], is_bad: bool = False) -> SequenceTokens:
        return SequenceTokens(ids, 0, 2, [0.5, 0.5], is_bad)

    with recorder.watch(SimpleNamespace(worker=worker)):
        recorder.label = "copy"
        assert worker.sample({"0": tokens([1])}).by_sequence
        worker.sample({"0": tokens([1, 2]), "1": tokens([3])})
        recorder.label = "json"
        worker.sample({"1": tokens([4, 5, 6]), "0": tokens([1], is_bad=True)})
    worker.sample({"1": tokens([4])})
    assert {label: [step.num_emitted for step in steps] for label, steps in recorder.steps.items()} == {
        "copy": [2],
        "json": [3],
    }
    assert worker.sample.__func__ is ScriptedWorker.sample
