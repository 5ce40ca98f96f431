"""One launch between two sublayers against two: the same bits, whatever the shape and the order of threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.kernels.hyper_connection.cluster_cuda import ClusterShape, Sublayer, choose_shape
from deepinfer.kernels.hyper_connection.enter import Entered, hc_enter, make_mixes
from deepinfer.kernels.hyper_connection.finish import hc_finish
from deepinfer.kernels.hyper_connection.parts import ExpertOutputs, Mixes, MixLogits
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from tests.kernels.hyper_connection import test_hyper_connection as plain
from tests.kernels.hyper_connection.emulator import emulate, needs_compiler

pytestmark = [pytest.mark.gpu, needs_compiler]
_emulate = pytest.fixture(autouse=True)(emulate)


def _sublayer(hidden: int, device: torch.device, weight_dtype: torch.dtype = torch.bfloat16) -> Sublayer:
    norm = (torch.rand(hidden) + 0.5).to(weight_dtype).to(device)
    scale, base = torch.tensor([1.0, 0.5, 2.0]).to(device), torch.randn(24).to(device)
    return Sublayer(plain._fn(hidden, device), norm, scale, base, plain.NORM_EPS, plain.HC_EPS, plain.ITERATIONS)


def _update(form: str, rows: int, hidden: int, device: torch.device):
    if form == "none":
        return None
    return plain._updates(rows, hidden, device)[form][0]


def _two_launches(trunk: Tensor, read: Tensor, mixes: Mixes, update, layer: Sublayer, **wants) -> list[Tensor]:
    """trunk, feature, x, xq, codes, scales, mixes."""
    done = hc_write_read(
        trunk, read, layer.fn, update, None if update is None else mixes, wants_feature=wants.pop("wants_feature")
    )
    parameters = layer.norm_weight, layer.scale, layer.base, layer.norm_eps, layer.hc_eps, layer.iterations
    found = hc_finish(done.partial, done.h, *parameters, **wants)
    return [part for part in (done.trunk, done.feature, *found[:4], *found.mixes) if part is not None]


def _parts(found: Entered) -> list[Tensor]:
    mixes = make_mixes(found.mixes) if isinstance(found.mixes, MixLogits) else found.mixes
    return [part for part in (*found[:6], *mixes) if part is not None]


def _assert_same(found: Entered, expected: list[Tensor]) -> None:
    parts = _parts(found)
    assert len(parts) == len(expected)
    for one, two in zip(parts, expected, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)


WANTS = (
    {"wants_feature": False, "wants_xq": True},
    {"wants_feature": True, "wants_xq": True, "wants_codes": True, "scale_dtype": torch.float32},
    {"wants_feature": False, "wants_xq": False, "wants_codes": True},
)


@pytest.mark.parametrize(
    ("rows", "hidden", "form", "shape", "wants", "weight_dtype"),
    [
        (1, 256, "plain", ClusterShape(4), WANTS[0], torch.bfloat16),
        (5, 256, "absent", ClusterShape(2), WANTS[1], torch.bfloat16),
        (9, 512, "splits", ClusterShape(8), WANTS[2], torch.float32),
        (35, 256, "experts", ClusterShape(4), WANTS[0], torch.float32),
        (67, 256, "plain", ClusterShape(4, 2), WANTS[1], torch.bfloat16),
        (39, 256, "absent", ClusterShape(4, 1), WANTS[0], torch.bfloat16),
        (33, 768, "none", ClusterShape(4), WANTS[0], torch.bfloat16),
        (17, 1024, "absent", ClusterShape(16), WANTS[0], torch.bfloat16),
    ],
)
def test_one_launch_gives_the_bits_of_two(
    rows: int,
    hidden: int,
    form: str,
    shape: ClusterShape,
    wants: dict,
    weight_dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
):
    trunk, mixes, read = plain._trunk(rows, hidden, device), plain._mixes(rows, device), plain._mixes(rows, device).read
    layer, update = _sublayer(hidden, device, weight_dtype), _update(form, rows, hidden, device)
    expected = _two_launches(trunk, read, mixes, update, layer, **wants)
    prior = None if update is None else mixes
    for order in ("0", "1", "2"):
        monkeypatch.setenv("EMULATION_ORDER", order)
        _assert_same(hc_enter(trunk, read, prior, update, layer, shape=shape, **wants), expected)
    _assert_same(hc_enter(trunk, read, prior, update, layer, shape=shape, may_leave_logits=True, **wants), expected)


@pytest.mark.parametrize(("rows", "form", "shape"), [(3, "absent", ClusterShape(4)), (40, "plain", ClusterShape(2, 1))])
@pytest.mark.parametrize("early", [False, True])
def test_mixes_may_be_made_by_the_next_sublayer(
    rows: int, form: str, shape: ClusterShape, early: bool, device: torch.device
):
    hidden = 256
    first, second = _sublayer(hidden, device), _sublayer(hidden, device)
    trunk, read, update = (
        plain._trunk(rows, hidden, device),
        plain._mixes(rows, device).read,
        _update(form, rows, hidden, device),
    )
    lazy = hc_enter(trunk, read, None, None, first, shape=shape, may_leave_logits=True)
    assert isinstance(lazy.mixes, MixLogits)
    mixes = make_mixes(lazy.mixes)
    found = hc_enter(lazy.trunk, None, lazy.mixes, update, second, shape=shape, may_leave_logits=True, early=early)
    _assert_same(found, _two_launches(lazy.trunk, mixes.read, mixes, update, second, wants_feature=False))
    found = hc_enter(lazy.trunk, None, lazy.mixes, None, second, shape=shape, early=early)
    _assert_same(found, _two_launches(lazy.trunk, mixes.read, mixes, None, second, wants_feature=False))


def test_rows_do_not_depend_on_their_number(device: torch.device):
    rows, hidden = 21, 256
    layer = _sublayer(hidden, device)
    trunk, mixes, read = plain._trunk(rows, hidden, device), plain._mixes(rows, device), plain._mixes(rows, device).read
    update = ExpertOutputs(
        torch.randn(rows, 2, hidden).bfloat16().to(device), torch.randn(rows, hidden).bfloat16().to(device)
    )
    among = _parts(hc_enter(trunk, read, mixes, update, layer))
    for row in (0, 8, 20):
        part = slice(row, row + 1)
        own = ExpertOutputs(update.routed[part], update.shared[part])
        alone = _parts(hc_enter(trunk[part], read[part], Mixes(*(mix[part] for mix in mixes)), own, layer))
        for one, all_rows in zip(alone, among, strict=True):
            assert torch.equal(one, all_rows[part])


def test_logits_fall_back_to_two_launches(device: torch.device):
    rows, hidden = 4, 256
    first, second = _sublayer(hidden, device), _sublayer(hidden, device)
    trunk, read, update = (
        plain._trunk(rows, hidden, device),
        plain._mixes(rows, device).read,
        _update("plain", rows, hidden, device),
    )
    lazy = hc_enter(trunk, read, None, None, first, shape=ClusterShape(4), may_leave_logits=True)
    together = hc_enter(lazy.trunk, None, lazy.mixes, update, second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer.kernels.hyper_connection.enter.MAX_CLUSTER_ROWS", 0)
        apart = hc_enter(lazy.trunk, None, lazy.mixes, update, second)
    assert isinstance(apart.mixes, Mixes)
    _assert_same(together, _parts(apart))


def test_the_released_width_takes_the_largest_cluster():
    shape = choose_shape(5120)
    assert shape == ClusterShape(16)
    assert shape.warps(5120) == 10
    assert not ClusterShape(8).accepts(5120)
