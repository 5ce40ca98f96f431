"""Nothing on the way from logits to emitted tokens asks for a value: it all runs on tensors that have none.

The ``meta`` device knows shapes only, so ``item()``, boolean indexing and copies to the host raise there.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState
from deepinfer.speculative.allocation import allocate, silence_finished, survivals_of
from deepinfer.speculative.drafts import Drafts
from tests.speculative.simulation import pair_of

META = torch.device("meta")
VOCAB = 50
MIXES = [{}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9, "logprobs": 3}, {"top_k": 4, "logprobs": 1}]


def _batch(num_rows: list[int]) -> SamplingBatch:
    rows = [
        SamplingState(SamplingParams(**MIXES[request % len(MIXES)]), [0], vocab_size=VOCAB, seed=request)
        for request, count in enumerate(num_rows)
        for _ in range(count)
    ]
    return SamplingBatch.build(rows, [1] * len(rows), device=META)


def test_the_device_is_a_real_guard():
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META).sum().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3, device=META)[torch.zeros(3, dtype=torch.bool, device=META)]


@pytest.mark.parametrize("kind", ["gumbel", "rejection"])
def test_a_step_is_launched_without_waiting(kind):
    sampler = Sampler(VOCAB, banned_ids=[3], device=META)
    verifier, drafter = pair_of(kind, sampler)
    one_each, positions = _batch([1] * 4), torch.ones(4, dtype=torch.int64, device=META)
    slots = [drafter.sample(torch.zeros(4, VOCAB, device=META), one_each, positions + s, s) for s in range(3)]
    drafts = Drafts.of_slots([each.token_ids for each in slots], [each.distributions for each in slots])
    remapped = drafts.select(torch.zeros(4, dtype=torch.int64, device=META))
    survivals = survivals_of(torch.zeros(4, 3, device=META))
    num_rows = allocate(survivals, 11, torch.zeros(4, dtype=torch.int64, device=META))
    out = verifier.verify(torch.zeros(11, VOCAB, device=META), _batch([4, 4, 2, 1]), remapped, num_rows)
    assert out.token_ids.shape == (4, 4)
    assert out.acceptance.shape == (4, 3)
    assert out.num_accepted.shape == out.is_bad.shape == (4,)
    stop = torch.zeros(4, dtype=torch.int64, device=META)
    assert silence_finished(survivals, out.token_ids, stop, remapped.token_ids).shape == (4, 3)
