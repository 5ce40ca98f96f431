"""Sparse attention from the raw query to the rounded output, against the float64 operators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.attention.sparse_attention import sparse_attention, sparse_attention_codes
from deepinfer.ops import number_formats as nf
from deepinfer.ops import rope
from deepinfer.ops.attention import _attend
from deepinfer.ops.records import Fp4Record, Fp8Record, RecordFormat

NAN_BYTE = 0x7F  # NaN as an e4m3 code


@dataclass
class Case:
    """Arguments of one call. Records that no index names are NaN."""

    q: Tensor
    step_records: Tensor
    ring: Tensor
    window_index: Tensor
    entries: Tensor | None
    entry_format: str
    entry_slots: Tensor | None
    sink: Tensor
    cos: Tensor
    sin: Tensor

    def run(self, quantize_output: bool = True, **options) -> Tensor:
        return sparse_attention(
            self.q, self.step_records, self.ring, self.window_index, self.entries, self.entry_format,
            self.entry_slots, self.sink, self.cos, self.sin, quantize_output, **options,
        )  # fmt: skip

    def expected(self, quantize_output: bool = True) -> Tensor:
        rows, _, dim = self.q.shape
        key_format = Fp8Record(dim)
        pool = torch.cat((key_format.decode(self.step_records), key_format.decode(self.ring)))
        index = self.window_index.long()
        place = torch.where(index <= -2, len(self.step_records) - 2 - index, index.clamp_min(0))
        keys, seen = pool[place], index != -1
        if self.entries is not None:
            record_format: RecordFormat = Fp4Record(dim) if self.entry_format == "fp4" else key_format
            slots = self.entry_slots.long()
            chosen = self.entries[slots.clamp_min(0).flatten()].view(*slots.shape, -1)
            keys = torch.cat((keys, record_format.decode(chosen)), dim=1)
            seen = torch.cat((seen, slots >= 0), dim=1)
        turned = rope.rotate(self.q.contiguous(), self.cos, self.sin)
        out = _attend(turned, keys.double(), seen, self.sink.double())
        out = rope.rotate(out, self.cos, self.sin, inverse=True)
        if quantize_output:
            out = nf.q8_round(out).bfloat16()
        return out.reshape(rows, -1)

    def row(self, i: int) -> Case:
        part = slice(i, i + 1)
        slots = None if self.entry_slots is None else self.entry_slots[part]
        return replace(
            self, q=self.q[part], window_index=self.window_index[part], entry_slots=slots,
            cos=self.cos[part], sin=self.sin[part],
        )  # fmt: skip


def make_case(
    rows: int, heads: int = 4, dim: int = 128, rope_width: int = 32, window: int = 16, selected: int = 24,
    entry_format: str = "fp4", device: torch.device | str = "cpu", seed: int = 0, sharp: float = 1.0,
) -> Case:  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    wide = (sharp * randn(rows, heads + 1, dim)).bfloat16()
    key_format = Fp8Record(dim)
    num_ring, num_entries = 64, 96
    step_records = key_format.encode(randn(rows, dim))
    ring = key_format.encode(randn(num_ring, dim) * 3)
    window_index = torch.where(
        torch.rand(rows, window, generator=g) < 0.5,
        torch.randint(0, rows, (rows, window), generator=g),
        -2 - torch.randint(0, num_ring, (rows, window), generator=g),
    )
    window_index[torch.rand(rows, window, generator=g) < 0.2] = -1
    ring[~torch.isin(torch.arange(num_ring), (-2 - window_index).flatten())] = NAN_BYTE
    step_records[~torch.isin(torch.arange(rows), window_index.flatten())] = NAN_BYTE
    entries = slots = None
    if selected:
        record_format = Fp4Record(dim) if entry_format == "fp4" else key_format
        entries = record_format.encode(randn(num_entries, dim))
        slots = torch.randint(0, num_entries, (rows, selected), generator=g)
        slots[torch.rand(rows, selected, generator=g) < 0.2] = -1
        entries[~torch.isin(torch.arange(num_entries), slots.flatten())] = NAN_BYTE
        entries, slots = entries.to(device), slots.int().to(device)
    cos, sin = rope.rope_angles(
        torch.randint(0, 5000, (rows,), generator=g), rope.rope_frequencies(10000.0, rope_width, None)
    )
    return Case(
        wide.to(device)[:, :heads], step_records.to(device), ring.to(device), window_index.int().to(device), entries,
        entry_format, slots, randn(heads).to(device), cos.to(device), sin.to(device),
    )  # fmt: skip


def assert_near(actual: Tensor, expected: Tensor, one_part: bool) -> None:
    """Softmax weights in one bf16 part move a result by about as much as its own rounding to bf16 does."""
    actual, expected = actual.double(), expected.double()
    error = float((actual - expected).norm() / expected.norm())
    assert error < (2**-8 if one_part else 2**-10), error


SHAPES = [
    {"rows": 1},
    {"rows": 3, "heads": 3, "window": 21, "selected": 70},
    {"rows": 7, "selected": 0, "dim": 64},
    {"rows": 3, "entry_format": "fp8", "heads": 6, "window": 5, "selected": 9},
    {"rows": 2, "dim": 96, "rope_width": 64, "heads": 17},
    {"rows": 2, "dim": 512, "rope_width": 64, "heads": 2, "window": 70, "sharp": 0.5},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split_weights", [False, True])
def test_plain_output_is_near_the_reference(shape, split_weights, device):
    case = make_case(**shape, device=device)
    assert_near(case.run(False, split_weights=split_weights), case.expected(False), not split_weights)


@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_rounded_output_is_the_rounding_of_the_plain_one(shape, device):
    case = make_case(**shape, device=device)
    plain = case.run(False)
    heads, dim = case.q.shape[1:]
    assert torch.equal(case.run(True), nf.q8_round(plain.view(-1, heads, dim)).bfloat16().flatten(1))
    case.window_index.fill_(-1)
    if case.entry_slots is not None:
        case.entry_slots.fill_(-1)
    assert torch.equal(case.run(True), torch.zeros_like(plain))


def test_single_key_without_competition_returns_its_value(device):
    """Weight 1 and no rotation: the output is the key itself, bit for bit, in every format."""
    for entry_format in ("fp4", "fp8"):
        case = make_case(3, entry_format=entry_format, device=device)
        case.cos.fill_(1)
        case.sin.zero_()
        case.sink.fill_(-1e4)
        case.window_index.fill_(-1)
        case.entry_slots[:, 1:] = -1
        case.entry_slots[:, 0] = torch.tensor([5, 6, 5], dtype=torch.int32, device=device)
        record_format = Fp4Record(128) if entry_format == "fp4" else Fp8Record(128)
        g = torch.Generator().manual_seed(1)
        case.entries[5:7] = record_format.encode(torch.randn(2, 128, generator=g) * torch.tensor([[1e-3], [9e3]])).to(
            device
        )
        keys = record_format.decode(case.entries[case.entry_slots[:, 0].long()])
        expected = keys.bfloat16()[:, None].expand(3, 4, 128).flatten(1)
        assert torch.equal(expected.double(), keys.double()[:, None].expand(3, 4, 128).flatten(1))
        assert torch.equal(case.run(False), expected)


def test_large_sink_and_large_logits_stay_finite(device):
    for sharp, sink in ((100.0, -50.0), (0.01, 80.0), (30.0, 1.0)):
        case = make_case(3, device=device, sharp=sharp)
        case.sink.fill_(sink)
        assert_near(case.run(False, split_weights=True), case.expected(False), one_part=False)


@pytest.mark.parametrize("entry_format", ["fp4", "fp8"])
def test_row_alone_equals_row_among_others(entry_format, device):
    case = make_case(5, entry_format=entry_format, window=40, selected=150, device=device)
    together = case.run(invariant=True)
    for i in (0, 3, 4):
        assert torch.equal(case.row(i).run(invariant=True)[0], together[i])


def test_nothing_is_written_beside_the_output(device):
    case = make_case(3, heads=3, device=device)
    room = torch.full((5, 3 * 128), 7.0, dtype=torch.bfloat16, device=device)
    assert case.run(out=room[1:4]).data_ptr() == room[1:4].data_ptr()
    assert (room[[0, 4]] == 7).all()
    assert torch.equal(room[1:4], case.run())


def test_codes_stand_for_the_rounded_output(device):
    case = make_case(5, heads=6, device=device)
    made = sparse_attention_codes(
        case.q, case.step_records, case.ring, case.window_index, case.entries, "fp4", case.entry_slots,
        case.sink, case.cos, case.sin, 3,
    )  # fmt: skip
    values = case.run(True).view(5, 3, 256).transpose(0, 1)
    assert made.codes.shape == values.shape
    kept = values.abs() >= 2.0**-6 * made.scales[:, :, None]
    found = made.codes.view(torch.float8_e4m3fn).float() * made.scales[:, :, None]
    assert torch.equal(found[kept], values.float()[kept])
    assert (found - values.float()).abs().max() <= 2.0**-10 * made.scales.max()
