"""Ablations of a loaded model: the same as the executable specification's, complete, and undone afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.errors import ConfigError
from deepinfer.evaluation.ablation import Ablation, RandomSelection, ablated
from deepinfer.messages import StepPlan
from deepinfer.reference import ReferenceModel, Roundings
from deepinfer.reference.ablation import Ablation as ReferenceAblation
from tests.engine.support import chunk_of, logits_in_pieces, make_checkpoint, make_engine, random_ids

IDS = random_ids(100)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return make_engine(path, num_speculative_tokens=0)


@pytest.mark.parametrize(
    ("ablation", "reference"),
    [
        (Ablation.NO_ENGRAM, ReferenceAblation(no_engram=True)),
        (Ablation.WINDOW_ONLY, ReferenceAblation(window_only=True)),
    ],
)
def test_an_ablated_engine_equals_the_ablated_specification(ablation, reference, engine, path):
    whole = logits_in_pieces(engine, IDS, [100])
    with ablated(engine, ablation):
        found = logits_in_pieces(engine, IDS, [60, 1, 39])
    model = ReferenceModel.from_checkpoint(
        path, roundings=Roundings.faithful(), dtype=torch.float64, ablation=reference
    )
    assert torch.equal(found, model.forward(IDS).float())
    assert not torch.equal(found, whole)
    assert torch.equal(logits_in_pieces(engine, IDS, [100]), whole)


def test_random_selection_does_not_depend_on_the_batch(engine):
    whole = logits_in_pieces(engine, IDS, [100])
    with ablated(engine, Ablation.RANDOM_SELECTION):
        found = logits_in_pieces(engine, IDS, [100])
        assert torch.equal(logits_in_pieces(engine, IDS, [33, 1, 1, 65]), found)
    with ablated(engine, Ablation.RANDOM_SELECTION, seed=1):
        assert not torch.equal(logits_in_pieces(engine, IDS, [100]), found)
    assert not torch.equal(found, whole)
    assert torch.equal(logits_in_pieces(engine, IDS, [100]), whole)


def test_random_selection_keeps_to_what_a_row_may_see(engine):
    """As many entries as the indexer would choose, each visible, those of later layers inside the chosen blocks."""
    traces = []
    for ablation in (None, Ablation.RANDOM_SELECTION):
        trace: dict[str, torch.Tensor] = {}
        plan = StepPlan(0, (chunk_of(IDS, 0, len(IDS), (5, 2, 9), 3),))
        if ablation is None:
            engine.runner.run(plan, trace)
        else:
            with ablated(engine, ablation):
                engine.runner.run(plan, trace)
        traces.append(trace)
    for layer, ratio in ((2, 2), (4, 1), (6, 1)):
        before, after = (trace[f"layers.{layer}.attn.selected"] for trace in traces)
        assert torch.equal((before >= 0).sum(1), (after >= 0).sum(1))
        assert not torch.equal(before, after)
        num_visible = (torch.arange(len(IDS)) + 1) // ratio
        assert (after < num_visible.unsqueeze(-1)).all()
    blocks = traces[1]["layers.4.attn.blocks"]
    for row, selected in zip(blocks, traces[1]["layers.6.attn.selected"], strict=True):
        assert set((selected[selected >= 0] // 8).tolist()) <= set(row.tolist())


def test_random_scores_are_spread_evenly_and_differ_between_layers():
    visible, entries = torch.arange(1, 301).unsqueeze(-1), torch.arange(300).unsqueeze(0)
    scores = RandomSelection(3).scores(visible, entries)
    assert scores.shape == (300, 300)
    counts = torch.histc(scores, 10, 0, 1)
    assert (counts - 9000).abs().max() < 400  # 4.4 standard deviations
    pairs = torch.stack((scores[:, 1:].flatten(), scores[:, :-1].flatten()))
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.015
    other = RandomSelection(4).scores(visible, entries)
    assert torch.corrcoef(torch.stack((scores.flatten(), other.flatten())))[0, 1].abs() < 0.015


def test_ablations_are_refused_where_graphs_would_not_see_them(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.config.device), "platform", "nvidia", raising=False)
        with pytest.raises(ConfigError, match="nvidia"), ablated(engine, Ablation.NO_ENGRAM):
            pass
