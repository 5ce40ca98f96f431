"""Rejection sampling beyond its distribution: bounds, fall-backs, forced tokens, reports, storage."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative import rejection_verifier
from deepinfer.speculative.draft_distribution import DraftDistributions
from deepinfer.speculative.drafts import Drafts
from deepinfer.speculative.rejection_verifier import SLACK, RejectionVerifier
from tests.sampling.reference import chi_square, chi_square_bound
from tests.speculative.simulation import Crowd, fixed, random_world, shuffled


def _verify(target, draft, token_ids, num_rows, **values):
    """One request per row of ``token_ids``; logits: target ``[rows, vocab]``, draft ``[requests * slots, vocab]``."""
    vocab = target.shape[1]
    owners = [
        SamplingState(SamplingParams(**values), [0], vocab_size=vocab, seed=request) for request in range(len(num_rows))
    ]
    rows = [(state, 1 + slot) for state, count in zip(owners, num_rows, strict=True) for slot in range(count)]
    batch = SamplingBatch.build([state for state, _ in rows], [position for _, position in rows])
    stored = DraftDistributions.of(draft - draft.amax(-1, keepdim=True), vocab)
    drafts = Drafts(torch.tensor(token_ids), stored)
    return RejectionVerifier(Sampler(vocab)).verify(target, batch, drafts, torch.tensor(num_rows))


def test_equal_distributions_accept_everything_and_never_fail():
    """p and q equal bit for bit: the residual is the slack alone, and even a forced look at it finds a token."""
    logits = torch.randn(1, 64).mul(3)
    logits = (logits - logits.amax()).bfloat16().float()
    tokens = torch.randint(64, (500, 1)).tolist()
    out = _verify(logits.expand(1000, -1), logits.expand(500, -1), tokens, [2] * 500)
    assert out.num_accepted.tolist() == [1] * 500
    assert torch.all(out.acceptance > 1 - 2 * SLACK)


def test_residual_of_zero_mass_falls_back_to_the_first_arg_max(monkeypatch):
    """The slack makes this all but impossible, so the test takes it away and more."""
    monkeypatch.setattr(rejection_verifier, "_KEPT_SHARE", 4.0)
    target = torch.tensor([[0.3, 0.35, 0.35, 0.0]]).log()
    draft = torch.tensor([[0.25, 0.25, 0.25, 0.25]]).log()
    out = _verify(target.expand(40, -1), draft.expand(20, -1), [[3]] * 20, [2] * 20)
    assert out.num_accepted.tolist() == [0] * 20
    assert out.token_ids.tolist() == [[1, -1]] * 20
    assert torch.all(out.acceptance == 1.0)


def test_a_draft_that_neither_distribution_knows_is_rejected():
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log()
    out = _verify(target.expand(2, -1), target, [[3]], [2])
    assert out.num_accepted.tolist() == [0]
    assert out.token_ids[0, 0] in (0, 1)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 6.0])
def test_bias_of_the_slack_stays_within_its_bound(sharpness):
    """Exact output probabilities in float64: min(p, q) + P(reject) * residual against the documented interval."""
    generator = torch.Generator().manual_seed(0)
    q, p = (sharpness * torch.randn(2, 500, 30, generator=generator, dtype=torch.float64)).softmax(-1)
    p[:50] = q[:50]
    weights = (q - p * math.exp(-SLACK)).clamp(min=0)
    share = weights / weights.sum(-1, keepdim=True)
    output = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum(-1, keepdim=True)) * share
    slack = 1 - math.exp(-SLACK)
    tiny = 1e-12
    assert torch.all(output <= (1 + slack) * q + tiny)
    assert torch.all(output >= q - slack / (1 + slack) - tiny)


def test_first_token_follows_the_formula():
    """The empirical output of one draft against min(p, q) + (1 - sum min) * residual, and the acceptance estimate."""
    q, p = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.25, 0.25, 0.125, 0.375])
    count = 6000
    tokens = torch.multinomial(p, count, replacement=True)[:, None].tolist()
    out = _verify(q.log().expand(2 * count, -1), p.log().expand(count, -1), tokens, [2] * count)
    counts = torch.bincount(out.token_ids[:, 0], minlength=4).tolist()
    statistic, freedom = chi_square(counts, q.tolist())
    assert statistic < chi_square_bound(freedom)
    overlap = float(torch.minimum(p, q).sum())
    accepted = float(out.num_accepted.float().mean())
    assert abs(accepted - overlap) < 4 * math.sqrt(0.25 / count)
    # bf16 storage moves p by up to 2**-8 per unit of score.
    torch.testing.assert_close(out.acceptance, torch.full((count, 1), overlap), atol=5e-3, rtol=0)


def test_what_is_drawn_after_a_rejection_knows_nothing_of_the_accept_test():
    """Half of the drafts are rejected, exactly those with a large uniform; the two tokens left are equally likely."""
    count = 4000
    q, p = torch.tensor([0.25, 0.25, 0.5]), torch.tensor([0.0, 0.0, 1.0])
    out = _verify(q.log().expand(2 * count, -1), p.log().expand(count, -1), [[2]] * count, [2] * count)
    counts = torch.bincount(out.token_ids[:, 0], minlength=3).tolist()
    statistic, freedom = chi_square(counts, q.tolist())
    assert statistic < chi_square_bound(freedom)
    bonus = torch.bincount(out.token_ids[out.num_accepted == 1, 1], minlength=3).tolist()
    statistic, freedom = chi_square(bonus, q.tolist())
    assert statistic < chi_square_bound(freedom)


@pytest.mark.parametrize("num_slots", [1, 4])
def test_golden_tokens_are_reproduced_and_gaps_are_free(num_slots):
    world = random_world(6, seed=4)
    golden = [5, 1, -1, 0, 0, -1, 3]
    crowd = Crowd(world, SamplingParams(golden_token_ids=golden, logprobs=1), 60, "rejection", num_slots)
    for step in range(7):
        drafts = crowd.draw_drafts()
        verified = crowd.verify(drafts, torch.full((60,), num_slots + 1)).cpu()
        for request, state in enumerate(crowd.states):
            for j, token in enumerate(verified.emitted(request)):
                row = int(verified.first_row[request]) + j
                before = (state.output_ids or [0])[-1]
                expected = world.target[before].log_softmax(0)[token]
                assert abs(float(verified.rows.logprobs[row]) - float(expected)) < 1e-5
                index = len(state.output_ids)
                if index < len(golden) and golden[index] >= 0:
                    assert token == golden[index]
                    is_accepted = j < int(verified.num_accepted[request])
                    is_last = j == num_slots
                    assert is_accepted == (not is_last and int(drafts.token_ids[request, j]) == token)
                state.append([token])
        assert step or verified.num_accepted.max() <= num_slots
    free = {state.output_ids[2] for state in crowd.states}
    assert len(free) > 1


def test_logprobs_and_alternatives_belong_to_the_emitted_token():
    world = random_world(9, seed=6)
    crowd = Crowd(world, SamplingParams(top_k=5, logprobs=3), 50, "rejection", 3)
    out = crowd.step(0, shuffled(3)).cpu()
    for request in range(50):
        before = 0
        for j, token in enumerate(out.emitted(request)):
            row = int(out.first_row[request]) + j
            kept = world.target[before].topk(5)
            logprobs = dict(zip(kept.indices.tolist(), kept.values.log_softmax(0).tolist(), strict=True))
            assert out.rows.logprobs[row].item() == pytest.approx(logprobs[token], abs=1e-5)
            alternatives = out.rows.alternatives(row)
            assert [each for each, _ in alternatives] == kept.indices[:3].tolist()
            before = token


def test_bad_target_and_bad_draft_rows():
    target = torch.zeros(4, 3)
    target[1] = math.nan  # second row of request 0
    draft = torch.zeros(2, 3)
    out = _verify(target, draft, [[1], [2]], [2, 2])
    assert out.num_accepted.tolist() == [1, 1]  # q = p accepts; the bonus row of request 0 is broken
    assert out.is_bad.tolist() == [True, False]
    crowd = Crowd(random_world(4, seed=0), SamplingParams(), 20, "rejection", 2)
    crowd.world.draft[:] = math.nan
    drafts = crowd.draw_drafts()
    assert torch.all(drafts.token_ids == 0)
    out = crowd.verify(drafts, torch.full((20,), 3))
    assert not out.is_bad.any()
    assert torch.all(out.token_ids[:, 0] >= 0)


def test_a_row_does_not_depend_on_its_neighbours():
    world = random_world(6, seed=9)
    crowd = Crowd(world, SamplingParams(temperature=0.9), 30, "rejection", 3)
    together = crowd.step(0, fixed(3))
    for request in (0, 13, 29):
        alone = Crowd(world, SamplingParams(temperature=0.9), 30, "rejection", 3)
        alone.states = [alone.states[request]]
        alone.draft_batch = SamplingBatch.build(alone.states, [1])
        assert alone.step(0, fixed(3)).token_ids[0].tolist() == together.token_ids[request].tolist()


@pytest.mark.parametrize("values", [{"top_k": 4}, {"temperature": 0}, {"top_k": 3, "top_p": 0.9}])
def test_sparse_and_dense_storage_stand_for_the_same_distribution(values):
    world = random_world(40, seed=12)
    crowd = Crowd(world, SamplingParams(**values), 25, "rejection", 2)
    drafts = crowd.draw_drafts()
    stored = drafts.distributions
    assert stored.token_ids is not None
    rows = torch.arange(50)
    scores, totals = stored.scores_of(rows)
    dense = DraftDistributions(40, scores.bfloat16(), None)
    again, dense_totals = dense.scores_of(rows)
    assert torch.equal(scores, again)
    assert torch.equal(totals, dense_totals)
    assert stored.num_bytes < dense.num_bytes
    sparse_out = crowd.verify(drafts, torch.full((25,), 3))
    dense_out = crowd.verify(dataclasses.replace(drafts, distributions=dense), torch.full((25,), 3))
    assert torch.equal(sparse_out.token_ids, dense_out.token_ids)


def test_drafts_follow_their_requests_to_the_next_step():
    crowd = Crowd(random_world(40, seed=12), SamplingParams(top_k=4), 5, "rejection", 3)
    drafts = crowd.draw_drafts()
    moved = drafts.select(torch.tensor([4, -1, 0]))
    assert moved.token_ids[0].tolist() == drafts.token_ids[4].tolist()
    assert moved.token_ids[1].tolist() == [-1, -1, -1]
    assert torch.equal(moved.distributions.scores[:3], drafts.distributions.scores[12:15])
    assert torch.equal(moved.distributions.scores[6:], drafts.distributions.scores[:3])
    assert torch.equal(moved.distributions.token_ids[6:], drafts.distributions.token_ids[:3])
