"""The sampling kernels choose the token that the sampler chooses: same noise, same ties, same truncation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from deepinfer.kernels.sampling import gumbel, sampler
from deepinfer.kernels.sampling.gumbel import gumbel_of_bits, noise_bound, pack_gumbel_table
from deepinfer.kernels.sampling.sampler import SamplingRows, SamplingWorkspace, sample
from deepinfer.sampling import gumbel_table as table_module
from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.gumbel_table import gumbel_table
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.random import gumbel_of_bits as gumbel_of_bits_reference
from deepinfer.sampling.row_parameters import RowParameters
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.state import SamplingState


@pytest.fixture(scope="module")
def table(device) -> torch.Tensor:
    return pack_gumbel_table(*gumbel_table(device))


def states_of(params: list[SamplingParams], vocab: int) -> list[SamplingState]:
    seeds = (3, -5, 2**63 - 1, 1 << 40)
    return [SamplingState(each, [1, 2], vocab_size=vocab, eos_id=0, seed=seeds[row % 4] + row // 4) for row, each in
            enumerate(params)]  # fmt: skip


def device_rows(states: list[SamplingState], positions: list[int], vocab: int, device) -> SamplingRows:
    found = RowParameters.of(states, vocab, device)
    tensors = {name: getattr(found, name) for name in RowParameters.__slots__ if name != "truncates"}
    return SamplingRows(**tensors, positions=torch.tensor(positions, device=device))


def both(logits: torch.Tensor, params: list[SamplingParams], table, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the reference and of the kernels, after comparing which rows are bad."""
    rows, vocab = logits.shape
    states = states_of(params, vocab)
    positions = [7 * row + 2 for row in range(rows)]
    expected = Sampler(vocab).sample(logits.cpu(), SamplingBatch.build(states, positions))
    device = logits.device
    workspace = SamplingWorkspace(rows, vocab, table, **options)
    arguments = device_rows(states, positions, vocab, device)
    for _again in range(2):  # the counters of the first call have to be back at zero
        tokens, is_bad = sample(
            logits, arguments, workspace, truncates=RowParameters.of(states, vocab, device).truncates
        )
        assert torch.equal(is_bad.cpu(), expected.is_bad)
    assert not workspace.arrivals.any()
    return tokens.cpu(), expected.token_ids


def random_logits(rows: int, vocab: int, device, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (spread * torch.randn((rows, vocab), generator=generator)).to(device)


def every_kind() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.3, min_p=0.05),
        SamplingParams(temperature=1.7, top_p=0.5, top_k=40, min_p=0.001),
        SamplingParams(temperature=1.0, top_p=0.02),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=600),
    ]


def test_constants_are_those_of_the_definition():
    assert gumbel.HALF_SIZE == table_module.HALF_SIZE
    assert gumbel.MANTISSA_BITS == table_module.MANTISSA_BITS
    assert gumbel.MIN_EXPONENT == table_module.MIN_EXPONENT
    assert gumbel.FRACTION_BITS == table_module.FRACTION_BITS


@pytest.mark.parametrize("vocab", [5, 512, 1500, 2048])
def test_every_kind_of_row_beside_the_others(device, table, vocab):
    params = every_kind()
    tokens, expected = both(random_logits(len(params), vocab, device), params, table)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("spread", [0.0, 0.05, 8.0])
def test_flat_and_peaked_rows(device, table, spread):
    params = every_kind()
    tokens, expected = both(random_logits(len(params), 2100, device, spread), params, table)
    assert torch.equal(tokens, expected)


def test_rows_without_truncation_take_two_launches(device, table):
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(temperature=0.5, min_p=0.1)] * 2
    tokens, expected = both(random_logits(6, 1600, device), params, table)
    assert torch.equal(tokens, expected)


def test_many_draws(device, table):
    params = [SamplingParams(temperature=1.0, top_p=0.6, top_k=30)] * 12
    logits = random_logits(1, 1100, device).expand(12, -1).contiguous()
    tokens, expected = both(logits, params, table)
    assert torch.equal(tokens, expected)
    assert len(set(tokens.tolist())) > 5


def test_ties_go_to_the_lowest_id(device, table):
    logits = torch.zeros((3, 2048), device=device)
    logits[0, [100, 1500, 1700]] = 4.0
    logits[1, 1024:] = -0.0
    logits[1, :1024] = -1.0
    logits[2] = torch.arange(2048, device=device) // 512 * 1.0
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0), SamplingParams(top_k=7)]
    tokens, expected = both(logits, params, table)
    assert torch.equal(tokens, expected)
    assert tokens.tolist()[:2] == [100, 1024]
    assert 1536 <= tokens[2] < 1543


def test_bad_rows_are_told_and_hurt_nobody(device, table):
    params = every_kind()[:6] * 2
    logits = random_logits(12, 1300, device)
    logits[0, 700] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[5, 1299] = -math.nan
    logits[6:, ::2] = -math.inf  # as a mask leaves it
    tokens, expected = both(logits, params, table)
    assert torch.equal(tokens, expected)
    assert tokens[[0, 1, 2, 5]].tolist() == [0] * 4


@pytest.mark.parametrize("target", [1, 18, 4096])
def test_splitting_changes_nothing(device, table, target):
    params = every_kind()
    tokens, expected = both(random_logits(len(params), 3100, device), params, table, target_programs=target)
    assert torch.equal(tokens, expected)


def test_row_alone_and_in_company(device, table):
    params = every_kind()
    vocab = 3000
    logits = random_logits(len(params), vocab, device)
    states = states_of(params, vocab)
    positions = list(range(len(params)))
    workspace = SamplingWorkspace(len(params), vocab, table)
    together, _bad = sample(logits, device_rows(states, positions, vocab, device), workspace, truncates=True)
    for row in range(len(params)):
        arguments = device_rows(states[row : row + 1], positions[row : row + 1], vocab, device)
        alone, _bad = sample(logits[row : row + 1], arguments, workspace, truncates=True)
        assert int(alone[0]) == int(together[row])


def test_long_chains_and_full_lists_are_followed(device, table, monkeypatch):
    monkeypatch.setattr(sampler, "_LIST", 4)
    params = [SamplingParams(temperature=5.0, top_p=0.002)] * 3 + [SamplingParams(temperature=3.0, top_k=300)] * 3
    logits = random_logits(6, 1100, device, 0.5)
    tokens, expected = both(logits, params, table)
    assert torch.equal(tokens, expected)


@triton.jit
def _noise_kernel(bits_ptr, table_ptr, noise_ptr, bound_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(bits_ptr + at).to(tl.uint64, bitcast=True)
    tl.store(noise_ptr + at, gumbel_of_bits(bits, table_ptr, at >= 0))
    tl.store(bound_ptr + at, noise_bound(bits))


def test_noise_is_exact_and_below_its_bound(device, table):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (8192,), generator=generator)
    bits[:4096] >>= torch.arange(4096) % 64  # both tails: many leading zeros, and many leading ones
    bits[2048:4096] ^= -(2**63)
    bits[0], bits[1] = 0, -(2**63)
    noise, bound = (torch.empty(8192, device=device) for _ in range(2))
    _noise_kernel[(8,)](bits.to(device), table, noise, bound, BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(noise.cpu(), gumbel_of_bits_reference(bits.clone()))
    assert bool((bound >= noise).all())
    ordinary = slice(4096, None)
    assert float((bound - noise)[ordinary].clamp_max(20)[bits[ordinary] < 0].max()) < 1.0  # the table's upper half


def test_masks_take_tokens_away(device, table):
    params = every_kind()
    rows, vocab = len(params), 1300
    logits = random_logits(rows, vocab, device)
    logits[3, 10] = math.nan  # masked, and the row is bad all the same
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator, dtype=torch.int64)
    masks = masks.to(torch.int32)
    masks[0] = -1
    masks[1, 1:] = 0  # few tokens
    mask_rows = torch.arange(rows, dtype=torch.int32) % 3
    allowed = ((masks[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1).flatten(1)[:, :vocab].bool()
    allowed[mask_rows[3].long(), 10] = False
    masks[mask_rows[3].long(), 0] &= ~(1 << 10)
    states, positions = states_of(params, vocab), list(range(rows))
    masked = logits.cpu().masked_fill(~allowed[mask_rows.long()], -math.inf)
    expected = Sampler(vocab).sample(masked, SamplingBatch.build(states, positions))
    arguments = replace(
        device_rows(states, positions, vocab, device), masks=masks.to(device), mask_rows=mask_rows.to(device)
    )
    tokens, is_bad = sample(logits, arguments, SamplingWorkspace(rows, vocab, table), truncates=True)
    good = torch.arange(rows) != 3
    assert torch.equal(tokens.cpu()[good], expected.token_ids[good])
    assert is_bad.tolist() == [row == 3 for row in range(rows)]


def test_strided_logits_and_given_outputs(device, table):
    params = every_kind()
    wide = random_logits(len(params), 2000, device)
    logits = wide[:, :1500]
    states = states_of(params, 1500)
    positions = list(range(len(params)))
    arguments = device_rows(states, positions, 1500, device)
    workspace = SamplingWorkspace(len(params), 1500, table)
    out = torch.full((len(params),), -1, device=device), torch.ones(len(params), dtype=torch.bool, device=device)
    tokens, is_bad = sample(logits, arguments, workspace, truncates=True, token_ids=out[0], is_bad=out[1])
    assert (tokens is out[0], is_bad is out[1]) == (True, True)
    expected = Sampler(1500).sample(logits.cpu().contiguous(), SamplingBatch.build(states, positions))
    assert torch.equal(tokens.cpu(), expected.token_ids)
