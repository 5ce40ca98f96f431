"""The engine against the executable specification: same roundings, tensor by tensor, bit by bit.

Both accumulate in float64 and round at the same places, so in ``faithful`` numerics nothing is left to a tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.messages import StepPlan
from tests.engine.support import (
    chunk_of,
    even_pieces,
    logits_in_pieces,
    make_checkpoint,
    make_engine,
    oracle,
    random_ids,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "no clamp reached, eps visible": {"swiglu_limit": 10.0, "rms_norm_eps": 1e-2},
    "hc_eps visible": {"hc_eps": 0.05, "hc_sinkhorn_iters": 3},
    "unshifted reads": {
        "hc_shifted": False,
        "num_nextn_predict_layers": 0,
        "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1),
        "dspark_target_layer_ids": (),
    },
    "fp8 main entries": {"use_fp4_sparse_kv": False},
    "no candidate source": {"candidate_source_layer_id": None},
    "index keys of another layer": {
        "compress_ratios": (0, 2, 2, 2, 1, 1, 1, 1, 0, 0),
        "kv_source_layer_ids": (1, 3, 4),
        "index_source_layer_ids": (1, 3, 4, 6),
        "index_k_source_layer_ids": (1, 4),
    },
    "no rope scaling": {"rope_scaling": None},
    "no n-gram memory": {"engram_layer_ids": (), "engram_num_embeddings": ()},
    "window of one": {"sliding_window": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_equals_the_specification(name: str, tmp_path: Any) -> None:
    path = make_checkpoint(tmp_path / "model", **VARIANTS[name])
    ids = random_ids(101)
    expected: dict[str, Any] = {}
    reference_logits = oracle(path, "faithful").forward(ids, trace=expected)
    engine = make_engine(path)
    found: dict[str, torch.Tensor] = {}
    result = engine.runner.run(StepPlan(0, (chunk_of(ids, 0, len(ids), (5,), 3),)), trace=found)
    assert torch.equal(result.sample_logits(), reference_logits.float())
    compared = 0
    for key, value in found.items():
        if key.endswith((".weights", ".read_mix")):  # never rounded, so the last bit of a float64 may differ
            torch.testing.assert_close(value, expected[key], rtol=1e-13, atol=0)
        elif key.endswith((".selected", ".blocks")):
            wanted = expected[key][:, : value.shape[1]]
            assert torch.equal(value, wanted), key
            assert (expected[key][:, value.shape[1] :] == -1).all(), key
        else:
            assert torch.equal(value.double(), expected[key].to(value.dtype).double()), key
        compared += 1
    assert compared > 80


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 257])
def test_all_lengths_of_the_tiny_configuration(length: int, tiny_path: Any) -> None:
    ids = random_ids(length, seed=length)
    for numerics in ("faithful", "float32"):
        expected = oracle(tiny_path, numerics).forward(ids).float()
        found = logits_in_pieces(make_engine(tiny_path, numerics=numerics), ids, [length])
        if numerics == "faithful":
            assert torch.equal(found, expected)
        else:
            assert (found - expected).abs().max() < 5e-6


def test_chunking_does_not_change_a_bit(tiny_path: Any) -> None:
    """Includes every split of a short prompt in two: n-gram history, compressor pairs and windows cross the border."""
    for numerics in ("faithful", "float32"):
        engine = make_engine(tiny_path, numerics=numerics)
        ids = random_ids(150, seed=5)
        whole = logits_in_pieces(engine, ids, [150])
        for size in (1, 3, 7, 64):
            assert torch.equal(logits_in_pieces(engine, ids, even_pieces(150, size), slot=4), whole)
        short = ids[:23]
        for cut in range(1, 23):
            pieces = logits_in_pieces(engine, short, [cut, 23 - cut], blocks=(7,), slot=5)
            assert torch.equal(pieces, whole[:23]), f"{numerics}, cut at {cut}"


def test_batch_mates_do_not_change_a_bit(tiny_path: Any) -> None:
    engine = make_engine(tiny_path)
    prompts = {name: random_ids(length, seed=length) for name, length in (("a", 40), ("b", 1), ("c", 17), ("d", 90))}
    slots = {"a": 1, "b": 2, "c": 3, "d": 4}
    alone = {name: logits_in_pieces(engine, ids, [len(ids)], (10 + slots[name],), 7) for name, ids in prompts.items()}
    # Interleaved: each step carries some rows of some sequences, in changing order.
    done = dict.fromkeys(prompts, 0)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    generator = torch.Generator().manual_seed(3)
    while any(done[name] < len(ids) for name, ids in prompts.items()):
        open_ones = [name for name, ids in prompts.items() if done[name] < len(ids)]
        order = [open_ones[i] for i in torch.randperm(len(open_ones), generator=generator)]
        chunks = []
        for name in order:
            left = len(prompts[name]) - done[name]
            count = int(torch.randint(1, min(left, 13) + 1, (), generator=generator))
            chunks.append(chunk_of(prompts[name], done[name], count, (slots[name] + 20,), slots[name], name))
        logits = engine.runner.run(StepPlan(0, tuple(chunks))).sample_logits()
        for chunk, rows in zip(chunks, logits.split([chunk.num_rows for chunk in chunks]), strict=True):
            found[chunk.request_id].append(rows)
            done[chunk.request_id] += chunk.num_rows
    for name in prompts:
        assert torch.equal(torch.cat(found[name]), alone[name]), name


def test_what_is_not_written_is_never_seen(tiny_path: Any) -> None:
    """Every cache byte that no row has written is NaN (or its worst pattern), and nothing changes."""
    ids = random_ids(70, seed=2)
    clean = logits_in_pieces(make_engine(tiny_path), ids, [50, 1, 1, 18])
    for numerics, junk in (("faithful", 0xFF), ("float32", float("nan"))):
        engine = make_engine(tiny_path, numerics=numerics)
        expected = clean if numerics == "faithful" else logits_in_pieces(engine, ids, [70])
        for layer in engine.runner.caches.layers:
            for store in (layer.window, layer.entries, layer.index_keys):
                if store is not None:
                    store.data.fill_(junk)
            if layer.pairs is not None:
                layer.pairs.fill_(float("nan"))
        assert torch.equal(logits_in_pieces(engine, ids, [50, 1, 1, 18], slot=6), expected)
