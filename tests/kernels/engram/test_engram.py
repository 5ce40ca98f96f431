"""Engram kernels against their references: hashes and values exactly, the gate up to a float32 sum."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.checkpoint import DummyCheckpoint, tiny_config
from deepinfer.checkpoint.codecs import dequantize_table_rows as reference_values
from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.kernels import nvrtc
from deepinfer.kernels.engram.gate import engram_gate
from deepinfer.kernels.engram.gather import NgramHash, dequantize_table_rows, engram_gather, engram_row_numbers
from deepinfer.kernels.engram.placement import DeviceTable, MappedTable, PinnedTable, pinned_bytes
from deepinfer.ops.engram import engram_gate as reference_gate
from deepinfer.ops.engram import engram_rows, ngram_context

VOCAB, PAD = 512, 2


def make_hash(device, heads: int = 3, at_least: int = 1000, compressed: int = 99092) -> NgramHash:
    primes = engram_primes(2, 4, heads, at_least)[1]
    offsets = list(itertools.accumulate(primes, initial=0))[:-1]
    generator = torch.Generator().manual_seed(5)
    return NgramHash(
        token_map=torch.randint(0, compressed, (VOCAB,), generator=generator, dtype=torch.int32).to(device),
        pad=PAD,
        multipliers=torch.tensor(engram_multipliers(14, 4, compressed), device=device),
        primes=torch.tensor(primes, device=device).view(3, heads),
        offsets=torch.tensor(offsets, device=device).view(3, heads),
    )


def make_ids(device, rows: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (rows, 4), generator=torch.Generator().manual_seed(rows))
    ids[1::3, 2] = -1  # a barrier inside the context
    ids[2::5, 0] = -1  # an image position, or a padding row
    ids[3::5, 1] = VOCAB + 7  # an unknown id
    return ids.to(device)


def expected_numbers(ids: torch.Tensor, constants: NgramHash) -> torch.Tensor:
    context = ngram_context(constants.token_map.long(), ids.long(), constants.pad)
    return engram_rows(context, constants.multipliers, constants.primes, constants.offsets)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_numbers_are_exact(device, heads, dtype):
    constants = make_hash(device, heads, at_least=16_000_000)
    ids = make_ids(device, 37).to(dtype)
    assert torch.equal(engram_row_numbers(ids, constants), expected_numbers(ids, constants))


@pytest.mark.parametrize("width", [32, 96])
def test_gathered_values_are_exact(device, width):
    constants = make_hash(device)
    total = int(constants.primes.sum())
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (total, width), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = torch.randint(90, 140, (total, width // 32), generator=generator, dtype=torch.uint8)
    ids = make_ids(device, 23)
    numbers = expected_numbers(ids, constants).flatten().cpu()
    expected = reference_values(codes[numbers], scales[numbers], torch.bfloat16).view(23, -1)
    found = engram_gather(ids, constants, codes.to(device), scales.to(device))
    assert torch.equal(found.cpu(), expected)
    alone = engram_gather(ids[4:5], constants, codes.to(device), scales.to(device))
    assert torch.equal(alone.cpu(), expected[4:5])
    separate = dequantize_table_rows(codes[numbers].to(device), scales[numbers].to(device))
    assert torch.equal(separate.cpu().view(23, -1), expected)


def test_every_code_and_scale_byte(device):
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes = torch.where((codes & 0x7F) == 0x7F, 1, codes).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(8)[:, None].contiguous()
    usable = slice(8, None)  # scale byte 0 is a subnormal float32, which a GPU may flush
    found = dequantize_table_rows(codes.to(device), scales.to(device)).cpu()
    expected = reference_values(codes, scales, torch.bfloat16)
    normal = expected.float().abs() >= 2.0**-126
    assert torch.equal(found[usable][normal[usable]], expected[usable][normal[usable]])


@pytest.mark.parametrize("placement", ["device", "pinned", "mapped"])
def test_placements_give_the_same_rows(device, placement):
    dummy = DummyCheckpoint(tiny_config(), 1)
    table = dummy.engram_table(1)
    primes = engram_primes(2, 4, 2, 1000)[0]
    constants = make_hash(device, 2)
    constants = NgramHash(
        constants.token_map,
        PAD,
        constants.multipliers,
        torch.tensor(primes, device=device).view(3, 2),
        torch.tensor(list(itertools.accumulate(primes, initial=0))[:-1], device=device).view(3, 2),
    )
    codes, scales = table.gather(torch.arange(table.rows))
    if placement == "device":
        placed = DeviceTable(codes.to(device), scales.to(device), constants, 9)
    elif placement == "pinned":
        pinned = [pinned_bytes(*part.shape).copy_(part) for part in (codes, scales)]
        placed = PinnedTable(*pinned, constants, 9)
    else:
        placed = MappedTable(table, constants, 9)
    for rows in (1, 9, 3):  # steps in turn through the same buffers
        ids = make_ids(device, rows)
        placed.begin(ids)
        expected = table.gather_dequantized(expected_numbers(ids, constants).flatten().cpu(), torch.bfloat16)
        assert torch.equal(placed.rows().cpu(), expected.view(rows, -1))


def test_a_mapped_table_is_not_asked_for_rows_that_nobody_computed(device):
    """While launches are only noted, row numbers are whatever memory holds."""

    class Table:
        width, asked = 32, 0

        def gather(self, ids):
            self.asked += 1
            return torch.ones(len(ids), 32, dtype=torch.uint8), torch.full((len(ids), 1), 127, dtype=torch.uint8)

    table, constants = Table(), make_hash(device, 2)
    placed = MappedTable(table, constants, 9)
    with nvrtc.noting(lambda compilation: None):
        placed.begin(make_ids(device, 5))
        assert placed.rows().shape == (5, constants.num_columns * 32)
    assert table.asked == 0
    placed.begin(make_ids(device, 3))
    assert placed.rows().shape[0] == 3
    assert table.asked == 1


@pytest.mark.parametrize(("rows", "streams", "hidden"), [(1, 4, 256), (5, 2, 96), (3, 4, 5120)])
def test_gate_follows_the_reference(device, rows, streams, hidden):
    generator = torch.Generator().manual_seed(hidden)
    trunk = torch.randn((rows, streams, hidden), generator=generator).to(device, torch.bfloat16)
    keys_value = torch.randn((rows, (streams + 1) * hidden), generator=generator).to(device, torch.bfloat16)
    weight = (1 + 0.3 * torch.randn((streams, hidden), generator=generator)).to(device)
    if rows > 2:
        trunk[1] = keys_value[1].view(streams + 1, hidden)[:streams]  # agreement far above zero
        trunk[2, 0] = 0  # no agreement at all
    expected = reference_gate(trunk, keys_value.view(rows, streams + 1, hidden), weight.double(), 1e-20)
    found = engram_gate(trunk, keys_value, weight, 1e-20)
    difference = (found.float() - expected.float()).abs()
    assert float(difference.max()) <= float(expected.float().abs().max()) * 2**-7  # one rounding of bfloat16
    assert float((found != expected).float().mean()) < 2e-3  # rounding ties only
    for row in range(rows):
        alone = engram_gate(trunk[row : row + 1].contiguous(), keys_value[row : row + 1].contiguous(), weight, 1e-20)
        assert torch.equal(alone[0], found[row])


def test_gate_leaves_image_rows_and_works_in_place(device):
    trunk = torch.randn((4, 2, 64)).to(device, torch.bfloat16)
    keys_value = torch.randn((4, 3 * 64)).to(device, torch.bfloat16)
    weight = torch.ones((2, 64), device=device)
    is_image = torch.tensor([False, True, False, True], device=device)
    updated = engram_gate(trunk, keys_value, weight, 1e-6)
    masked = trunk.clone()
    assert engram_gate(masked, keys_value, weight, 1e-6, is_image, out=masked) is masked
    assert torch.equal(masked[1::2], trunk[1::2])
    assert torch.equal(masked[0::2], updated[0::2])
