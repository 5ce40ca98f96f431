"""The kernels behind ``DeviceTokens`` give what its references give."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import device_tokens as kernels
from deepinfer.layers.fused.device_rows import Column
from deepinfer.sampling.sampler import SamplerOutput
from deepinfer.speculative.verification import NO_TOKEN, Verified
from deepinfer.worker.device_tokens import DeviceTokens

pytestmark = pytest.mark.gpu
NUM_SLOTS = 23
INT32 = torch.int32


def _tokens(ngram_size: int, num_drafts: int, device: torch.device) -> DeviceTokens:
    """Slots that have been used before."""
    generator = torch.Generator().manual_seed(num_drafts)
    tokens = DeviceTokens(NUM_SLOTS, ngram_size, num_drafts, device)
    for tensor in (tokens.newest, tokens.next_position, tokens.ngrams, tokens.drafts):
        tensor.copy_(torch.randint(1, 1000, tensor.shape, generator=generator))
    tokens.ngrams[:, 0] = tokens.newest
    tokens.ngrams[::3, 1:] = -1  # near the start of a sequence
    return tokens


def _step(rng: random.Random, num_chunks: int, num_drafts: int, padding: int) -> tuple[Tensor, list[int], list[int]]:
    """The table of a step with open and known chunks and padding; rows that are sampled; how many of each request."""
    columns: list[list[int]] = []
    rows, counts = [], []
    for sequence, slot in enumerate(rng.sample(range(1, NUM_SLOTS), num_chunks)):
        is_open, start = rng.random() < 0.6, rng.randrange(900)
        is_prefill = not is_open and rng.random() < 0.4
        count = rng.randint(1, 9) if is_prefill else rng.randint(1, 1 + num_drafts)
        begin = len(columns)
        columns += [
            [-1 if is_open else rng.randrange(1000), start + j, slot, 3, start, start + count, 5, sequence]
            for j in range(count)
        ]
        if not is_prefill or rng.random() < 0.7:
            counts.append(1 if is_prefill else count)
            rows += range(begin + count - counts[-1], begin + count)
    # What an earlier step left behind in the inputs of a graph, but for the position.
    columns += [[rng.choice((-1, 0, 7)), -1, rng.randrange(NUM_SLOTS), 3, 17, 21, 0, 1] for _ in range(padding)]
    return torch.tensor(columns, dtype=INT32).T.contiguous(), rows, counts


@pytest.mark.parametrize("ngram_size", [0, 4])
@pytest.mark.parametrize(("num_chunks", "num_drafts", "padding"), [(1, 0, 0), (1, 1, 1), (7, 5, 3), (20, 4, 40)])
def test_equal_to_the_references(
    num_chunks: int, num_drafts: int, padding: int, ngram_size: int, device: torch.device
) -> None:
    rng = random.Random(num_chunks)
    tokens = _tokens(ngram_size, num_drafts, device)
    whole, rows, counts = _step(rng, num_chunks, num_drafts, padding)
    # A graph reads the first rows of a longer table.
    longer = torch.cat((whole, torch.full((len(Column), 5), 99, dtype=INT32)), dim=1).to(device)
    table = longer[:, : whole.shape[1]]
    ngrams = None
    if ngram_size:
        ngrams = torch.randint(-2, 1000, (table.shape[1], ngram_size), dtype=INT32, device=device)
    expected, expected_ngrams = tokens.complete_reference(table, ngrams)
    found, found_ngrams = kernels.complete(
        table, ngrams, tokens.newest, tokens.next_position, tokens.drafts, tokens.ngrams
    )
    assert torch.equal(found, expected)
    assert (expected[Column.TOKEN] >= 0).all()
    if ngram_size:
        assert expected_ngrams is not None
        assert found_ngrams is not None
        assert torch.equal(found_ngrams, expected_ngrams)
        live = expected[Column.POSITION] >= 0
        is_open = live & (table[Column.TOKEN] < 0)
        assert (expected_ngrams[is_open, 0] == expected[Column.TOKEN, is_open]).all()
        assert (expected_ngrams[~live] == -1).all()
    if not counts:
        return
    sampled, count = torch.tensor(rows, device=device), torch.tensor(counts, device=device)
    looked_up = tokens.sampled_reference(expected, sampled, count)
    for one, other in zip(kernels.sampled_rows(found, sampled, count, num_drafts, NUM_SLOTS), looked_up, strict=True):
        assert torch.equal(one, other)
    verified = _verified(rng, counts, num_drafts, device)
    slots = found[Column.SLOT][sampled[verified.first_row]].long()
    before = [each.clone() for each in (tokens.newest, tokens.next_position, tokens.ngrams)]
    kernels.advance(
        slots,
        verified.token_ids,
        verified.num_accepted,
        looked_up.firsts,
        verified.first_row,
        sampled,
        expected_ngrams,
        *before,
    )
    tokens.advance_reference(slots, verified, looked_up.firsts, sampled, expected_ngrams)
    for one, other in zip(before, (tokens.newest, tokens.next_position, tokens.ngrams), strict=True):
        assert torch.equal(one, other)


def _verified(rng: random.Random, counts: list[int], num_drafts: int, device: torch.device) -> Verified:
    """Any number of drafts accepted."""
    accepted = [rng.randrange(count) for count in counts]
    tokens = [
        [rng.randrange(1000) for _ in range(number + 1)] + [NO_TOKEN] * (num_drafts - number) for number in accepted
    ]
    nothing = torch.empty(0, device=device)
    first_rows = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    return Verified(
        torch.tensor(tokens, device=device),
        torch.tensor(accepted, device=device),
        torch.zeros(len(counts), dtype=torch.bool, device=device),
        nothing,
        SamplerOutput(nothing, nothing, None, None, None, None, ()),
        first_rows.to(device),
    )


def test_a_sequence_goes_on_where_the_device_has_it() -> None:
    """Two steps of one sequence by hand: two of three drafts stand, and the host is told neither."""
    cpu = torch.device("cpu")
    tokens = DeviceTokens(4, 3, 3, cpu)
    tokens.drafts[2] = torch.tensor([71, 72, 73])
    tokens.newest[2], tokens.next_position[2] = 70, 10
    tokens.ngrams[2] = torch.tensor([70, 69, 68])
    # The host believes that the sequence stands at 8, and has four rows for it.
    rows = [[-1, 8 + j, 2, 0, 8, 12, 0, 0] for j in range(4)]
    table, ngrams = tokens.complete(torch.tensor(rows, dtype=INT32).T, torch.zeros(4, 3, dtype=INT32))
    assert table[Column.TOKEN].tolist() == [70, 71, 72, 73]
    assert table[Column.POSITION].tolist() == [10, 11, 12, 13]
    assert (table[Column.START].tolist(), table[Column.END].tolist()) == ([10] * 4, [14] * 4)
    assert ngrams is not None
    assert ngrams.tolist() == [[70, 69, 68], [71, 70, 69], [72, 71, 70], [73, 72, 71]]
    sampled = tokens.sampled(table, torch.arange(4), torch.tensor([4]))
    assert sampled.positions.tolist() == [11, 12, 13, 14]
    assert (sampled.firsts.tolist(), sampled.drafts.tolist()) == ([10], [[71, 72, 73]])
    nothing = torch.empty(0)
    report = SamplerOutput(nothing, nothing, None, None, None, None, ())
    verified = Verified(
        torch.tensor([[71, 72, 99, -1]]),
        torch.tensor([2]),
        torch.tensor([False]),
        nothing,
        report,
        torch.tensor([0]),
    )
    tokens.advance(torch.tensor([2]), verified, sampled.firsts, torch.arange(4), ngrams)
    assert (int(tokens.newest[2]), int(tokens.next_position[2])) == (99, 13)
    assert tokens.ngrams[2].tolist() == [99, 72, 71]
