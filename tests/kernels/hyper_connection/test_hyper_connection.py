"""Hyper-connection kernels against ``ops.hyper_connection``: written trunk, read, norm, Q8, mixes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.hyper_connection.finish import collapse_head, hc_finish
from deepinfer.kernels.hyper_connection.parts import (
    DEFAULT_TILE,
    ExpertOutputs,
    Mixes,
    SplitSums,
    Tile,
    Update,
    new_mixes,
)
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.ops import number_formats as nf
from deepinfer.ops.hyper_connection import hc_mixes, hc_read, hc_write
from deepinfer.ops.norm import rms_norm

pytestmark = pytest.mark.gpu
STREAMS, NORM_EPS, HC_EPS, ITERATIONS = 4, 1e-20, 1e-6, 20
SMALL = Tile(columns=32)


def _trunk(rows: int, hidden: int, device: torch.device) -> Tensor:
    return torch.randn(rows, STREAMS, hidden).bfloat16().to(device)


def _mixes(rows: int, device: torch.device) -> Mixes:
    packed, mixes = new_mixes(torch.empty(0, device=device), rows, STREAMS)
    packed.copy_(torch.rand(packed.shape))
    return mixes


def _small_mixes(rows: int, device: torch.device) -> Mixes:
    """Multiples of 1/8: with small integers in the trunk every sum is exact."""
    packed, mixes = new_mixes(torch.empty(0, device=device), rows, STREAMS)
    packed.copy_(torch.randint(0, 9, packed.shape) / 8)
    return mixes


def _fn(hidden: int, device: torch.device) -> Tensor:
    return (torch.randn((2 + STREAMS) * STREAMS, STREAMS * hidden) * 0.02).to(device)


def _updates(rows: int, hidden: int, device: torch.device) -> dict[str, tuple[Update, Tensor]]:
    """Every form of an update, of small integers, and its value."""
    routed = torch.randint(-9, 10, (rows, 3, hidden)).bfloat16().to(device)
    shared = torch.randint(-9, 10, (rows, hidden)).bfloat16().to(device)
    experts = torch.randint(-1, 3, (rows, 3), dtype=torch.int32).to(device)
    chosen = routed.float() * (experts >= 0)[..., None]
    poisoned = torch.where((experts >= 0)[..., None], routed, torch.nan)
    sums = torch.randint(-99, 100, (3, rows, hidden)).float().to(device)
    return {
        "plain": (shared, shared),
        "experts": (ExpertOutputs(routed, shared), (routed.float().sum(1) + shared.float()).bfloat16()),
        "absent": (ExpertOutputs(poisoned, shared, experts), (chosen.sum(1) + shared.float()).bfloat16()),
        "splits": (SplitSums(sums), sums.sum(0).bfloat16()),
    }


def _share_different(found: Tensor, expected: Tensor) -> float:
    return float((found != expected).double().mean())


@pytest.mark.parametrize("form", ["plain", "experts", "absent", "splits"])
@pytest.mark.parametrize(("rows", "hidden", "tile"), [(1, 256, SMALL), (19, 96, SMALL), (35, 160, Tile(32, 4, 2))])
def test_write_and_read_are_exact_where_sums_are(form: str, rows: int, hidden: int, tile: Tile, device: torch.device):
    trunk = torch.randint(-8, 9, (rows, STREAMS, hidden)).bfloat16().to(device)
    mixes, read = _small_mixes(rows, device), _small_mixes(rows, device).read
    update, value = _updates(rows, hidden, device)[form]
    done = hc_write_read(trunk, read, _fn(hidden, device), update, mixes, wants_feature=True, tile=tile)
    expected = hc_write(trunk, value, mixes.write.double(), mixes.stream.double())
    assert torch.equal(done.trunk, expected)
    assert torch.equal(done.h, hc_read(expected, read.double()))
    assert torch.equal(done.feature, expected.double().mean(1).bfloat16())


def test_sublayer_input_and_mixes_match_the_reference(device: torch.device):
    rows, hidden = 5, 256
    trunk, mixes, read = _trunk(rows, hidden, device), _mixes(rows, device), _mixes(rows, device).read
    fn = _fn(hidden, device)
    update = torch.randn(rows, hidden).bfloat16().to(device)
    norm = (torch.rand(hidden) + 0.5).bfloat16().to(device)
    scale, base = torch.tensor([1.0, 0.5, 2.0]).to(device), torch.randn(24).to(device)
    done = hc_write_read(trunk, read, fn, update, mixes, tile=SMALL)
    found = hc_finish(
        done.partial, done.h, norm, scale, base, NORM_EPS, HC_EPS, ITERATIONS, wants_codes=True, columns=64
    )
    # One rounding each, of sums that differ by 2**-22 at most: the share of other roundings is about 2**-22 / 2**-9.
    assert _share_different(done.trunk, hc_write(trunk, update, mixes.write.double(), mixes.stream.double())) < 2e-3
    assert _share_different(done.h, hc_read(done.trunk, read.double())) < 2e-3
    x = rms_norm(done.h, norm.double(), NORM_EPS)
    assert _share_different(found.x, x) < 2e-3
    torch.testing.assert_close(found.x, x, rtol=2**-7, atol=0)
    codes, scales = nf.q8(found.x)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.xq.float(), nf.q8_round(found.x))
    again = hc_finish(
        done.partial,
        done.h,
        norm,
        scale,
        base,
        NORM_EPS,
        HC_EPS,
        ITERATIONS,
        wants_codes=True,
        scale_dtype=torch.float32,
    )
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.scales, nf.scale_from_byte(scales))
    wide = hc_mixes(done.trunk, fn.double(), scale.double(), base.double(), NORM_EPS, HC_EPS, ITERATIONS)
    for name, expected in zip(("read", "write", "stream"), wide, strict=True):
        torch.testing.assert_close(getattr(found.mixes, name).double(), expected, rtol=5e-6, atol=1e-7)


def test_fn_enters_with_all_its_bits(device: torch.device):
    """One product per sum: float32 times an integer power of two comes out exactly."""
    hidden = 32
    fn = torch.randn(24, STREAMS * hidden).to(device)
    trunk = torch.zeros(STREAMS * hidden, STREAMS * hidden)
    trunk.fill_diagonal_(0.5)
    trunk = trunk.view(-1, STREAMS, hidden).bfloat16().to(device)
    done = hc_write_read(trunk, _mixes(trunk.shape[0], device).read, fn, tile=SMALL)
    assert torch.equal(done.partial.records[:, :24], 0.5 * fn.T)


def test_trunk_may_be_overwritten_in_place_and_write_alone_reads_no_fn(device: torch.device):
    rows, hidden = 3, 96
    trunk, mixes = _trunk(rows, hidden, device), _mixes(rows, device)
    update = torch.randn(rows, hidden).bfloat16().to(device)
    apart = hc_write_read(trunk, None, None, update, mixes)
    assert (apart.h, apart.partial, apart.feature) == (None, None, None)
    own = trunk.clone()
    assert hc_write_read(own, None, None, update, mixes, out=own).trunk is own
    assert torch.equal(own, apart.trunk)


def test_without_an_update_the_trunk_is_only_read(device: torch.device):
    rows, hidden = 3, 96
    trunk, read = _trunk(rows, hidden, device), _mixes(rows, device).read
    before = trunk.clone()
    done = hc_write_read(trunk, read, _fn(hidden, device), wants_feature=True)
    assert done.trunk is trunk
    assert torch.equal(trunk, before)
    assert _share_different(done.h, hc_read(trunk, read.double())) < 2e-3
    assert _share_different(done.feature, trunk.double().mean(1).bfloat16()) < 2e-3


def test_a_row_is_the_same_alone_and_in_a_batch(device: torch.device):
    rows, hidden, chosen = 18, 64, 17
    trunk, mixes, read = _trunk(rows, hidden, device), _mixes(rows, device), _mixes(rows, device).read
    update, norm = torch.randn(rows, hidden).bfloat16().to(device), torch.ones(hidden).to(device)
    fn, scale, base = _fn(hidden, device), torch.ones(3).to(device), torch.randn(24).to(device)

    def run(part: slice, row_tiles: int = 1) -> tuple[Tensor, ...]:
        own = Mixes(*(mix[part] for mix in mixes))
        done = hc_write_read(trunk[part], read[part], fn, update[part], own, tile=Tile(32, 4, row_tiles))
        found = hc_finish(done.partial, done.h, norm, scale, base, NORM_EPS, HC_EPS, ITERATIONS)
        return done.trunk, found.x, found.xq, *found.mixes

    alone = run(slice(chosen, chosen + 1))
    for row_tiles in (1, 3):
        for own, among in zip(alone, run(slice(None), row_tiles), strict=True):
            assert torch.equal(own, among[chosen : chosen + 1])


@pytest.mark.parametrize("gather", [False, True])
def test_head_input_is_read_and_normed(gather: bool, device: torch.device):
    trunk, read = _trunk(5, 96, device), _mixes(5, device).read
    norm = (torch.rand(96) + 0.5).bfloat16().to(device)
    rows = torch.tensor([4, 0, 4], dtype=torch.int32, device=device) if gather else None
    picked = slice(None) if rows is None else rows.long()
    h = torch.empty_like(trunk[picked, 0])
    x = collapse_head(trunk, read, norm, NORM_EPS, rows, h=h)
    expected = hc_read(trunk[picked], read[picked].double())
    assert _share_different(h, expected) < 2e-3
    assert _share_different(x, rms_norm(h, norm.double(), NORM_EPS)) < 2e-3


@pytest.mark.parametrize("hidden", [64, 5120, 7168])
def test_row_limits_are_where_the_row_tiles_change(hidden):
    tiles = [DEFAULT_TILE.row_tiles_for(rows, hidden) for rows in range(9001)]
    changes = [rows for rows in range(1, 9000) if tiles[rows] != tiles[rows + 1]]
    assert changes == [limit for limit in DEFAULT_TILE.row_limits(hidden) if limit < 9000]
