"""Attention, hyper-connections, experts and Engram operators against loops written for reading."""

import math

import pytest
import torch

from deepinfer.ops.attention import sparse_attention
from deepinfer.ops.engram import engram_gate, engram_rows, ngram_context
from deepinfer.ops.hyper_connection import hc_mixes, hc_read, hc_write, sinkhorn
from deepinfer.ops.linear import grouped_linear, linear
from deepinfer.ops.moe import ExpertWeights, moe, route
from deepinfer.ops.records import Float32Record, Fp8Record, RecordStore
from deepinfer.ops.rope import rope_angles, rope_frequencies, rotate
from deepinfer.ops.step_views import RingView


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_attention_sees_its_window_and_nothing_unwritten():
    rows, heads, dim = 3, 2, 32
    ring = RecordStore.allocate(Float32Record(dim), 8, torch.device("cpu"))
    ring.data[:] = torch.nan
    ring.data[5] = rand(dim, seed=5)
    query, keys, sink = rand(rows, heads, dim, seed=1), rand(rows, dim, seed=2), rand(heads, seed=3).double()
    empty = torch.empty(0, dtype=torch.int64)
    index = torch.tensor([[-1, 3, 0], [3, 0, 1], [-1, -1, 2]])
    window = RingView(index=index, previous=torch.tensor([5, 7]), store_rows=empty, store_slots=empty)
    got = sparse_attention(query, keys, ring, window, sink, None)
    pool = torch.cat((keys, ring.data[[5, 7]])).double()
    for row in range(rows):
        seen = pool[[i for i in index[row].tolist() if i >= 0]]
        for head in range(heads):
            weights = torch.exp(seen @ query[row, head].double() / math.sqrt(dim))
            expected = (weights @ seen) / (weights.sum() + torch.exp(sink[head]))
            assert torch.allclose(got[row, head].double(), expected, atol=1e-6)


def test_attention_survives_large_logits():
    ring = RecordStore.allocate(Float32Record(32), 1, torch.device("cpu"))
    empty = torch.empty(0, dtype=torch.int64)
    window = RingView(index=torch.tensor([[0]]), previous=empty, store_rows=empty, store_slots=empty)
    got = sparse_attention(torch.full((1, 1, 32), 1e4), torch.full((1, 32), 1e4), ring, window, torch.zeros(1), None)
    assert torch.equal(got, torch.full((1, 1, 32), 1e4))


def test_sinkhorn_passes_are_counted_as_specified():
    logits = rand(5, 4, 4).double()
    eps = 1e-3
    expected = torch.softmax(logits, -1) + eps
    expected = expected / (expected.sum(-2, keepdim=True) + eps)
    for _ in range(6):
        expected = expected / (expected.sum(-1, keepdim=True) + eps)
        expected = expected / (expected.sum(-2, keepdim=True) + eps)
    assert torch.allclose(sinkhorn(logits, 7, eps), expected, rtol=1e-13)


def test_hyper_connection_mixes_and_orientation():
    trunk, fn = rand(2, 4, 32), rand(24, 128, seed=1).double()
    scale, base = torch.tensor([0.5, 0.7, 0.9]).double(), rand(24, seed=2).double()
    read, write, mix = hc_mixes(trunk, fn, scale, base, 1e-20, 1e-6, 20)
    flat = trunk[1].flatten().double()
    m = fn @ flat / flat.square().mean().sqrt()
    assert torch.allclose(read[1], torch.sigmoid(0.5 * m[:4] + base[:4]) + 1e-6)
    assert torch.allclose(write[1], 2 * torch.sigmoid(0.7 * m[4:8] + base[4:8]))
    assert torch.allclose(mix[1], sinkhorn((0.9 * m[8:] + base[8:]).view(1, 4, 4), 20, 1e-6)[0])
    update = rand(2, 32, seed=3)
    written = hc_write(trunk, update, write, mix)
    target = 2
    expected = write[1, target] * update[1].double() + sum(mix[1, i, target] * trunk[1, i].double() for i in range(4))
    assert torch.allclose(written[1, target].double(), expected, atol=1e-6)
    assert torch.allclose(hc_read(trunk, read)[0].double(), (read[0] @ trunk[0].double()), atol=1e-6)


def test_router_prefers_lower_ids_on_ties_and_weights_without_bias():
    x = rand(3, 32)
    weight = rand(6, 32, seed=1).double()
    weight[4] = weight[1]
    bias = torch.tensor([0.0, 0.3, 0.0, 9.0, 0.3, 0.0]).double()
    experts, weights = route(x, weight, bias, 3, 1.5)
    for row in range(3):
        scores = torch.nn.functional.softplus(weight @ x[row].double()).sqrt()
        expected = sorted(range(6), key=lambda e: (-(scores[e] + bias[e]).item(), e))[:3]
        assert experts[row].tolist() == expected
        assert torch.allclose(weights[row], 1.5 * scores[expected] / scores[expected].sum())


@pytest.mark.parametrize("quantize", [False, True])
def test_experts_equal_a_loop_over_tokens(quantize):
    hidden, width, limit = 64, 32, 0.5
    experts = [
        ExpertWeights(rand(2 * width, hidden, seed=e).double(), rand(hidden, width, seed=e + 9).double())
        for e in range(4)
    ]
    shared = ExpertWeights(rand(2 * width, hidden, seed=50).double(), rand(hidden, width, seed=51).double())
    x = rand(7, hidden, seed=60).to(torch.bfloat16 if quantize else torch.float32)
    chosen = torch.tensor([[0, 2], [2, 3], [0, 3], [3, 0], [2, 0], [0, 2], [3, 2]])  # expert 1 gets nothing
    weights = rand(7, 2, seed=61).abs().double()
    got = moe(x, chosen, weights, experts, shared, limit, quantize)
    for row in range(7):
        alone = moe(x[row : row + 1], chosen[row : row + 1], weights[row : row + 1], experts, shared, limit, quantize)
        assert torch.equal(got[row], alone[0]), "a row's result must not depend on its neighbours"
        if not quantize:
            total = torch.zeros(hidden, dtype=torch.float64)
            for e, w in [*zip(chosen[row].tolist(), weights[row].tolist(), strict=True), (-1, 1.0)]:
                expert = shared if e == -1 else experts[e]
                gate, up = (expert.gate_up @ x[row].double()).split(width)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                total += expert.down @ (gate * torch.sigmoid(gate) * up * w)
            assert torch.allclose(got[row].double(), total, rtol=1e-5, atol=1e-5)


def test_padding_rows_reach_no_expert():
    experts = [ExpertWeights(rand(64, 32, seed=e).double(), rand(32, 32, seed=e + 9).double()) for e in range(3)]
    x = rand(5, 32)
    x[3:] = torch.nan
    chosen, weights = route(x, rand(3, 32, seed=1).double(), torch.zeros(3).double(), 2, 1.5, num_live=3)
    assert (chosen[3:] == -1).all()
    assert (weights[3:] == 0).all()
    out = moe(x, chosen, weights, experts, experts[0], 10.0, False)
    assert torch.isfinite(out[:3]).all()


def test_context_stops_at_a_barrier_and_at_unknown_ids():
    token_map = torch.tensor([0, 7, 2, 9])
    ids = torch.tensor([[1, 3, 2, 1], [1, -1, 3, 1], [3, 9, 1, 1], [-1, 1, 1, 1]])
    assert ngram_context(token_map, ids, 2).tolist() == [[7, 9, 2, 7], [7, 2, 2, 2], [9, 2, 2, 2], [2, 2, 2, 2]]


def test_rows_of_the_specification():
    """Appendix A.4, layer 1, p = 5, first hash of each n-gram size."""
    from deepinfer.config.engram_hashing import engram_multipliers, engram_primes

    primes = torch.tensor(engram_primes(2, 4, 8, 16_000_000)[0])
    offsets = torch.cumsum(primes, 0) - primes
    multipliers = torch.tensor(engram_multipliers(1, 4, 99092))
    context = torch.tensor([[242, 7208, 251, 5095], [0, 2, 2, 2]])
    rows = engram_rows(context, multipliers, primes.view(3, 8), offsets.view(3, 8))
    assert rows[0, [0, 1, 8, 23]].tolist() == [8434518, 28335418, 130425857, 379106837]
    assert rows[1, [0, 23]].tolist() == [5702652, 380066193]


def test_engram_gate_equals_its_formula():
    trunk, kv = rand(2, 4, 32), rand(2, 5, 32, seed=1)
    weight = rand(4, 32, seed=2).double()
    got = engram_gate(trunk, kv, weight, 1e-20)
    for stream in range(4):
        x, k, v = trunk[1, stream].double(), kv[1, stream].double(), kv[1, 4].double()
        delta = (x * weight[stream] * k).sum() / x.square().mean().sqrt() / k.square().mean().sqrt() / math.sqrt(32)
        gate = torch.sigmoid(torch.sign(delta) * delta.abs().clamp(min=1e-6).sqrt())
        assert torch.allclose(got[1, stream].double(), x + gate * v, atol=1e-6)


def test_rotation_undoes_itself_and_leaves_other_channels():
    x = rand(3, 2, 48)
    angles = rope_angles(torch.tensor([0, 5, 100000]), rope_frequencies(10000.0, 32, None))
    turned = rotate(x, *angles)
    assert torch.equal(turned[..., :16], x[..., :16])
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(rotate(turned, *angles, inverse=True), x, atol=1e-6)
    angle = 5 * 10000.0 ** (-2 / 32)
    a, b = x[1, 0, 18].item(), x[1, 0, 19].item()
    assert turned[1, 0, 18].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-6)


def test_products_do_not_depend_on_the_batch():
    x, w = rand(33, 96).bfloat16(), rand(40, 96, seed=1).double()
    whole = linear(x, w, True)
    assert all(torch.equal(linear(x[i : i + 1], w, True)[0], whole[i]) for i in range(33))
    grouped, gw = rand(33, 3, 64).bfloat16(), rand(3, 20, 64, seed=2).double()
    whole = grouped_linear(grouped, gw, True)
    assert all(torch.equal(grouped_linear(grouped[i : i + 1], gw, True)[0], whole[i]) for i in range(33))


def test_fp8_record_round_trip_and_layout():
    record = Fp8Record(64)
    x = rand(5, 64).bfloat16()
    packed = record.encode(x)
    assert packed.shape == (5, 66)
    assert torch.equal(record.encode(record.decode(packed)), packed)
