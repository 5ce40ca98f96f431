"""The compressor's kernels against the reference: pooling, norm, rotation, records, and what must stay untouched."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.compressor import publish_entries, publish_index_keys
from deepinfer.ops.compress import pool_pairs
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.records import Fp4Record, Fp8Record, IndexKeyRecord, RecordFormat
from deepinfer.ops.rope import rotate

EPS = 1e-20
# A float32 sum or product next to a rounding tie may fall on its other side; each is a unit in the last place.
MAX_DIFFERING = 0.002


def angles(rows: int, half: int, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    phase = torch.rand((rows, half), generator=generator, dtype=torch.float64) * 1000
    return phase.cos().float().to(device), phase.sin().float().to(device)


def share_differing(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return (actual != expected).double().mean().item()


@pytest.mark.parametrize("record", [Fp4Record(96), Fp8Record(96), Fp4Record(512)], ids=str)
def test_ratio_1_entries_match(record: RecordFormat, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, width, half = 11, record.width, 16
    projected = torch.randn((rows, width), generator=generator).to(device, torch.bfloat16)
    weight = torch.rand(width, generator=generator).add(0.5).to(device, torch.bfloat16)
    cos, sin = angles(rows, half, device, generator)
    emit = torch.tensor([4, -1, 0, 29, 7, -1, 12, 13, 14, 3, -1], dtype=torch.int32, device=device)
    entries = torch.full((30, record.record_elements), 255, dtype=torch.uint8, device=device)
    latent = publish_entries(projected, 1, weight, EPS, cos, sin, emit, entries)

    emits = emit >= 0
    expected = rms_norm(projected, weight.double(), EPS)
    assert share_differing(latent[emits], expected[emits]) <= MAX_DIFFERING
    assert (latent[~emits] == 0).all()
    # Given the same latent, the record is the same but for rotations next to a tie.
    turned = rotate(latent[emits], cos[emits], sin[emits])
    assert share_differing(entries[emit[emits].long()], record.encode(turned)) <= MAX_DIFFERING
    untouched = torch.ones(30, dtype=torch.bool, device=device)
    untouched[emit[emits].long()] = False
    assert (entries[untouched] == 255).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("width", [64, 160])
def test_ratio_2_pools_within_the_step_and_across_steps(width: int, in_place: bool, device: torch.device) -> None:
    """Two sequences: one continues an odd position (its even token is in the ring), one starts even; then padding."""
    generator = torch.Generator().manual_seed(2)
    ring_length, rows, half = 7, 10, 16
    ring = torch.randn((2 * ring_length, 2, width), generator=generator).to(device)
    ring[3] = torch.nan  # never read
    projected = torch.randn((rows, 2 * width), generator=generator).mul(3).to(device)
    weight = torch.rand(width, generator=generator).add(0.5).to(device, torch.bfloat16)
    cos, sin = angles(rows, half, device, generator)
    positions = [9, 10, 11, 12, 20, 21, 22, 23, 24, -1]
    slots = [0, 0, 0, 0, 1, 1, 1, 1, 1, -1]
    starts = {0: 9, 1: 20}
    emit, partner, store = [], [], []
    for row, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        completes = position >= 0 and position % 2 == 1
        emit.append(position // 2 + 16 * slot if completes else -1)
        before = -2 - (slot * ring_length + (position - 1) % ring_length)
        partner.append((row - 1 if position - 1 >= starts[slot] else before) if completes else -1)
        store.append(slot * ring_length + position % ring_length if position >= 0 else -1)
    as_int = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    record = Fp4Record(width)
    entries = torch.full((40, record.record_elements), 255, dtype=torch.uint8, device=device)
    old_ring = ring.clone()
    latent = publish_entries(
        projected, 2, weight, EPS, cos, sin, as_int(emit), entries, ring, as_int(partner), as_int(store), in_place
    )

    pairs = projected.view(rows, 2, width)
    done = [row for row in range(rows) if emit[row] >= 0]
    first = torch.stack([pairs[p] if (p := partner[row]) >= 0 else old_ring[-2 - p] for row in done])
    expected = rms_norm(pool_pairs(first, pairs[done], torch.bfloat16), weight.double(), EPS)
    assert share_differing(latent[done], expected) <= MAX_DIFFERING
    turned = rotate(latent[done], cos[done], sin[done])
    assert share_differing(entries[[emit[row] for row in done]], record.encode(turned)) <= MAX_DIFFERING
    stored = [row for row in range(rows) if store[row] >= 0]
    torch.testing.assert_close(ring[[store[row] for row in stored]], pairs[stored], rtol=0, atol=0)
    kept = [slot for slot in range(2 * ring_length) if slot not in store]
    assert torch.equal(ring[kept].nan_to_num(7.0), old_ring[kept].nan_to_num(7.0))
    assert not latent[[row for row in range(rows) if emit[row] < 0]].any()


def test_a_chunk_longer_than_the_ring_reads_before_it_writes(device: torch.device) -> None:
    """The row 14 places on overwrites the slot that the first row reads."""
    width, ring_length, rows = 32, 7, 15
    ring = torch.zeros((ring_length, 2, width), device=device)
    ring[:, 1] = torch.arange(1.0, ring_length + 1, device=device)[:, None] * 1.0
    projected = torch.zeros((rows, 2 * width), device=device)
    projected[:, width:] = 100.0
    projected[:, width // 2 * 3 :] = 50.0
    positions = torch.arange(1, 1 + rows)
    emit = torch.where(positions % 2 == 1, positions // 2, -1).to(device, torch.int32)
    partner = torch.where(positions % 2 == 1, torch.arange(rows) - 1, -1)
    partner[0] = -2 - 0
    store = torch.where(positions > positions[-1] - ring_length, positions % ring_length, -1)
    entries = torch.zeros((20, 16 + 2), dtype=torch.uint8, device=device)
    cos, sin = torch.ones((rows, 8), device=device), torch.zeros((rows, 8), device=device)
    weight = torch.ones(width, device=device)
    latent = publish_entries(
        projected, 2, weight, EPS, cos, sin, emit, entries, ring,
        partner.to(device, torch.int32), store.to(device, torch.int32),
    )  # fmt: skip
    pooled = (projected[:1, width:] + 1.0) / 2
    assert torch.equal(latent[:1], rms_norm(pooled.to(torch.bfloat16), weight.double(), EPS))


@pytest.mark.parametrize("width", [64, 96, 128])
def test_index_keys_match(width: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, half = 9, 16
    wide = torch.randn((rows, width + 32), generator=generator).to(device, torch.bfloat16)
    key = wide[:, :width]  # a slice of a wider product
    key[2] = 0
    weight = torch.rand(width, generator=generator).add(0.5).to(device)
    cos, sin = angles(rows, half, device, generator)
    emit = torch.tensor([3, -1, 8, 1, 0, -1, 11, 9, 6], dtype=torch.int32, device=device)
    record = IndexKeyRecord(width)
    store = torch.full((12, record.record_elements), 255, dtype=torch.uint8, device=device)
    publish_index_keys(key, weight, EPS, cos, sin, emit, store)
    emits = emit >= 0
    expected = record.encode(rotate(rms_norm(key, weight.double(), EPS), cos, sin))[emits]
    assert share_differing(store[emit[emits].long()], expected) <= 2 * MAX_DIFFERING
    untouched = [slot for slot in range(12) if slot not in emit.tolist()]
    assert (store[untouched] == 255).all()


@pytest.mark.parametrize("record", [Fp4Record(64), Fp8Record(64)], ids=str)
def test_records_are_bit_exact_where_nothing_else_rounds(record: RecordFormat, device: torch.device) -> None:
    """A constant row has norm 1, a unit weight and no rotation leave the weights as they are: every bf16 is encoded."""
    generator = torch.Generator().manual_seed(4)
    width = record.width
    size = torch.exp2(torch.randint(-14, 12, (64, width // 16), generator=generator).float()).repeat_interleave(16, 1)
    values = (torch.randn((64, width), generator=generator) * size).to(torch.bfloat16)
    values[:, 0::16] = (6 * size[:, ::16]).to(torch.bfloat16)  # groups whose scale is met exactly
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0])
    values[:, 1:15] = ties * size[:, :1]
    values[3] = 0
    for row in range(64):
        projected = torch.ones((1, width), dtype=torch.bfloat16, device=device)
        entries = torch.zeros((1, record.record_elements), dtype=torch.uint8, device=device)
        cos, sin = torch.ones((1, 8), device=device), torch.zeros((1, 8), device=device)
        emit = torch.zeros(1, dtype=torch.int32, device=device)
        publish_entries(projected, 1, values[row].to(device), EPS, cos, sin, emit, entries)
        # -0 cannot come out of a product with a positive number and a rotation by zero, up to the sign of zero codes.
        expected = record.decode(record.encode(values[row : row + 1].to(device)))
        assert torch.equal(record.decode(entries), expected), row
        assert torch.equal(
            entries[:, -width // 32 :], record.encode(values[row : row + 1].to(device))[:, -width // 32 :]
        )


def test_no_rows(device: torch.device) -> None:
    entries = torch.zeros((1, 36), dtype=torch.uint8, device=device)
    none = torch.zeros((0, 16), device=device)
    emit = torch.zeros(0, dtype=torch.int32, device=device)
    projected = torch.zeros((0, 64), dtype=torch.bfloat16, device=device)
    assert publish_entries(projected, 1, torch.ones(64, device=device), EPS, none, none, emit, entries).shape == (0, 64)
