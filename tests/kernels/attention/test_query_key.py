"""Query latent and window key against the reference: norm, rotation, Q8, and where the records go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.attention.query_key import key_records, norm_rounded, query_key, query_key_codes, store_ring
from deepinfer.kernels.dense.row_scaled import RowCodes
from deepinfer.ops import number_formats as nf
from deepinfer.ops.norm import rms_norm
from deepinfer.ops.records import Fp8Record
from deepinfer.ops.rope import rope_angles, rope_frequencies, rotate

pytestmark = pytest.mark.gpu
EPS, QUERY, KEY, ROPE = 1e-20, 160, 128, 32


def _inputs(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Projected, norms, cos, sin; the projections are columns of a wider matrix."""
    projected = torch.randn(rows, QUERY + KEY + 32).bfloat16()[:, 16:-16].to(device)
    query_norm, key_norm = ((torch.rand(width) + 0.5).bfloat16().to(device) for width in (QUERY, KEY))
    cos, sin = rope_angles(torch.randint(0, 100_000, (rows,)), rope_frequencies(10000.0, ROPE, None))
    return projected, query_norm, key_norm, cos.to(device), sin.to(device)


def _share_different(found: Tensor, expected: Tensor) -> float:
    return float((found != expected).double().mean())


def _expected_key(projected: Tensor, key_norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(rms_norm(projected[:, -KEY:], key_norm.double(), EPS), cos, sin)


def _check_records(records: Tensor, key: Tensor) -> None:
    """Few keys fall to the other side of a rounding tie; codes then differ by one step."""
    expected = Fp8Record(KEY).encode(key)
    assert _share_different(records, expected) < 4e-3
    values, wanted = Fp8Record(KEY).decode(records), Fp8Record(KEY).decode(expected)
    torch.testing.assert_close(values, wanted, rtol=2**-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 7])
def test_latent_and_key_match_the_reference(rows: int, device: torch.device):
    projected, query_norm, key_norm, cos, sin = _inputs(rows, device)
    ring = torch.full((2 * rows + 3, KEY + KEY // 32), 0xFF, dtype=torch.uint8, device=device)
    ring_slot = torch.arange(2, 2 * rows + 2, 2, dtype=torch.int32, device=device)
    ring_slot[rows // 2] = -1
    records = torch.empty(rows, ring.shape[1], dtype=torch.uint8, device=device)
    latent, rounded = query_key(
        projected, query_norm, key_norm, EPS, cos, sin, step_records=records, ring=ring, ring_slot=ring_slot
    )
    expected = rms_norm(projected[:, :QUERY], query_norm.double(), EPS)
    assert _share_different(latent, expected) < 4e-3
    assert torch.equal(rounded.float(), nf.q8_round(latent))
    _check_records(records, _expected_key(projected, key_norm, cos, sin))
    stored = ring_slot >= 0
    assert torch.equal(ring[ring_slot[stored].long()], records[stored])
    untouched = torch.ones(len(ring), dtype=torch.bool, device=device)
    untouched[ring_slot[stored].long()] = False
    assert (ring[untouched] == 0xFF).all()


def test_rotation_is_exact_where_the_angle_is(device: torch.device):
    """A quarter turn of small powers of two: every step is exact, so the records are equal to the bit."""
    rows = 3
    projected = torch.zeros(rows, KEY)
    projected[:, :4] = projected[:, -4:] = 2.0  # mean square 1/4, so the norm doubles
    projected = projected.bfloat16().to(device)
    norm = torch.exp2(torch.randint(-3, 4, (KEY,)).float()).to(device)
    cos, sin = torch.zeros(rows, ROPE // 2, device=device), torch.ones(rows, ROPE // 2, device=device)
    ring = torch.zeros(rows, KEY + KEY // 32, dtype=torch.uint8, device=device)
    key_records(projected, norm, EPS, cos, sin, ring, torch.arange(rows, dtype=torch.int32, device=device))
    assert torch.equal(ring, Fp8Record(KEY).encode(_expected_key(projected, norm, cos, sin)))


def test_partial_sums_are_added_and_rounded_once(device: torch.device):
    rows = 4
    _, query_norm, key_norm, cos, sin = _inputs(rows, device)
    sums = torch.randint(-99, 100, (3, rows, QUERY + KEY)).float().to(device)
    projected = sums.sum(0).bfloat16()
    found, expected = [], []
    for form, results in ((sums, found), (projected, expected)):
        records = torch.empty(rows, KEY + KEY // 32, dtype=torch.uint8, device=device)
        results += [*query_key(form, query_norm, key_norm, EPS, cos, sin, step_records=records), records]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_codes_are_those_of_the_rounded_latent(rows: int, device: torch.device):
    projected, query_norm, key_norm, cos, sin = _inputs(rows, device)
    projected[0] *= torch.exp2(torch.randint(-24, 4, (projected.shape[1],)).float()).to(device)
    if rows > 1:
        projected[2] = 0
        projected[3, 5] = torch.nan
    stores = [torch.zeros(rows, KEY + KEY // 32, dtype=torch.uint8, device=device) for _ in range(2)]
    given = projected, query_norm, key_norm, EPS, cos, sin
    _, rounded = query_key(*given, step_records=stores[0])
    found, expected = query_key_codes(*given, step_records=stores[1]), RowCodes.of(rounded)
    known = torch.arange(rows) != 3
    assert torch.equal(found.codes[:, known], expected.codes[:, known])
    assert torch.equal(found.scales[:, known], expected.scales[:, known])
    assert torch.equal(stores[0][known], stores[1][known])
    assert found.codes[0, 0].any()
    if rows > 1:
        assert ((found.codes[0, 3] & 0x7F) == 0x7F).all()


def test_parts_alone_equal_the_whole(device: torch.device):
    rows = 3
    projected, query_norm, key_norm, cos, sin = _inputs(rows, device)
    records = torch.zeros(rows, KEY + KEY // 32, dtype=torch.uint8, device=device)
    whole = query_key(projected, query_norm, key_norm, EPS, cos, sin, step_records=records)
    ring, slots = torch.zeros_like(records), torch.arange(rows, dtype=torch.int32, device=device)
    key_records(projected[:, QUERY:], key_norm, EPS, cos, sin, ring, slots)
    assert torch.equal(ring, records)
    for one, other in zip(norm_rounded(projected[:, :QUERY], query_norm, EPS), whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("width", [64, 128])  # 66 bytes per record: no whole words
def test_records_go_to_their_ring_slots_and_nowhere_else(width: int, device: torch.device):
    record = width + width // 32
    records = torch.randint(0, 256, (5, record), dtype=torch.uint8, device=device)
    ring = torch.full((9, record), 7, dtype=torch.uint8, device=device)
    expected = ring.clone()
    slots = torch.tensor([8, -1, 0, 3, -1], dtype=torch.int32, device=device)
    expected[slots[slots >= 0].long()] = records[slots >= 0]
    store_ring(records, slots, ring)
    assert torch.equal(ring, expected)
