"""The n-gram memory: vectors of spec Appendix A, image barrier, gate."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.config.model import TextConfig
from deepinfer.reference.ablation import Ablation
from deepinfer.reference.engram import engram, engram_rows, ngram_contexts
from deepinfer.reference.parameters import Parameters
from deepinfer.reference.roundings import Roundings
from deepinfer.reference.setting import Setting

from .tiny import TEXT, random_ids, random_weights, tiny_config, tiny_model

A2_MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
A4_COMPRESSED = [0, 237, 5095, 251, 7208, 242]
A4_ROWS = {
    (1, 0): """5702652 24393184 39183301 61503783 78984481 90144770 103724983 121476532 131476717 152385926 164143652
        191599181 198145581 217419202 238329687 247482304 257520185 283540304 288689443 315264704 322314652 348890037
        367865216 380066193""",
    (1, 5): """8434518 28335418 33056762 54845833 79590735 82522014 107990915 114522034 130425857 150965795 160866148
        176873966 204352630 218104334 238747352 249482421 265625474 283863772 292296123 304668435 328974802 341520388
        359388308 379106837""",
    (14, 0): """14361964 29977809 32716444 61209771 67456205 84275051 108494439 120604547 132225184 150270452 174805952
        178895254 193207923 211610196 226280582 252505246 261362261 279862797 301364059 312864848 328367036 349372619
        363873742 372375971""",
    (14, 5): """15511642 19799350 44525188 61239392 69665586 94157954 98489139 126054713 139053356 149796646 167594211
        189386395 202012761 221347336 228940866 253372258 257015096 287916013 294274728 315314213 323264185 338209388
        366614273 380659356""",
}
A1_FIRST_AND_LAST = {1: (16000057, 16000463), 14: (16000477, 16000889)}
A1_SUMS = (384006168, 384016682)


@pytest.fixture(scope="module")
def released_text() -> TextConfig:
    """The tiny configuration with the released Engram: 40 layers are not needed to hash."""
    released = {
        "vocab_size": 129280,
        "num_hidden_layers": 15,
        "compress_ratios": [0, 0] + [2] * 2 + [1] * 11 + [0, 0],
        "engram_layer_ids": [1, 14],
        "engram_vocab_size": 16_000_000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_num_embeddings": list(A1_SUMS),
        "engram_compressed_vocab_size": 99092,
    }
    assert TEXT["engram_vocab_size"] != released["engram_vocab_size"]
    config = tiny_config(**{key: value for key, value in released.items() if key != "engram_num_embeddings"})
    return config.text


def test_primes_and_multipliers_of_appendix_a(released_text: TextConfig, golden_dir: Path) -> None:
    primes = engram_primes(2, 4, 8, 16_000_000)
    golden = np.load(golden_dir / "engram_real_tokenizer.npz")
    assert golden["primes"].reshape(2, 24).tolist() == [list(row) for row in primes]
    for (layer, (first, last)), row, total in zip(A1_FIRST_AND_LAST.items(), primes, A1_SUMS, strict=True):
        assert (row[0], row[-1], sum(row)) == (first, last, total)
        assert engram_multipliers(layer, 4, 99092) == A2_MULTIPLIERS[layer]
    assert tuple(released_text.engram_num_embeddings) == A1_SUMS


def test_rows_of_appendix_a4(released_text: TextConfig) -> None:
    contexts = ngram_contexts(torch.tensor(A4_COMPRESSED), torch.zeros(6, dtype=torch.bool), 4, 2)
    assert contexts[0].tolist() == [0, 2, 2, 2]
    assert contexts[5].tolist() == [242, 7208, 251, 5095]
    for (layer, position), text in A4_ROWS.items():
        assert engram_rows(contexts, layer, released_text)[position].tolist() == [int(row) for row in text.split()]


def test_rows_of_a_real_sentence(released_text: TextConfig, golden_dir: Path) -> None:
    golden = np.load(golden_dir / "engram_real_tokenizer.npz")
    compressed = torch.from_numpy(golden["compressed_ids"])
    contexts = ngram_contexts(compressed, torch.zeros(len(compressed), dtype=torch.bool), 4, 2)
    for column, layer in enumerate((1, 14)):
        assert np.array_equal(engram_rows(contexts, layer, released_text).numpy(), golden["engram_hash"][:, column])


def test_rows_equal_python_integers() -> None:
    text = tiny_config().text
    compressed, length = random_ids(9).tolist(), 4
    contexts = ngram_contexts(torch.tensor(compressed), torch.zeros(9, dtype=torch.bool), length, 2)
    multipliers, primes = engram_multipliers(3, 4, 512), [1039, 1049, 1051, 1061, 1063, 1069]
    for position, row in enumerate(engram_rows(contexts, 3, text).tolist()):
        ids = [compressed[position - back] if position >= back else 2 for back in range(length)]
        expected, offset, hashed = [], 0, ids[0] * multipliers[0]
        for size in (2, 3, 4):
            hashed ^= ids[size - 1] * multipliers[size - 1]
            for head in (0, 1):
                prime = primes[2 * (size - 2) + head]
                expected.append(hashed % prime + offset)
                offset += prime
        assert row == expected


def test_ngrams_stop_at_an_image_and_do_not_see_what_lies_behind_it() -> None:
    compressed = torch.arange(10, 18)
    mask = torch.tensor([False, False, False, True, True, False, False, False])
    assert ngram_contexts(compressed, mask, 4, 2).tolist() == [
        [10, 2, 2, 2],
        [11, 10, 2, 2],
        [12, 11, 10, 2],
        [2, 2, 2, 2],
        [2, 2, 2, 2],
        [15, 2, 2, 2],
        [16, 15, 2, 2],
        [17, 16, 15, 2],
    ]


def test_special_ids_inside_the_history_do_not_reset_it() -> None:
    contexts = ngram_contexts(torch.tensor([5, 0, 1, 6]), torch.zeros(4, dtype=torch.bool), 4, 2)
    assert contexts[3].tolist() == [6, 1, 0, 5]


def run_gate(trunk: Tensor, weights: dict[str, Tensor], mask: Tensor) -> Tensor:
    text = replace(tiny_config().text, hidden_size=32)
    setting = Setting(text, Roundings.none(), Ablation())
    rows = torch.zeros(len(trunk), 6, dtype=torch.int64)
    return engram(trunk, rows, mask, Parameters(weights, torch.float64), setting)


def gate_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed.weight": torch.randn(1, 32, generator=generator, dtype=torch.float64),
        "wkv.weight": torch.randn(160, 192, generator=generator, dtype=torch.float64),
        "q_weight": torch.randn(4, 32, generator=generator, dtype=torch.float64),
        "k_weight": torch.randn(4, 32, generator=generator, dtype=torch.float64),
    }


def test_gate_equals_scalar_loops() -> None:
    weights, trunk = gate_weights(), torch.randn(1, 4, 32, dtype=torch.float64)
    updated = run_gate(trunk, weights, torch.tensor([False]))
    projected = (weights["wkv.weight"] @ weights["embed.weight"][0].repeat(6)).unflatten(0, (5, 32))
    for stream in range(4):
        x, key = trunk[0, stream].tolist(), projected[stream].tolist()
        q, k = weights["q_weight"][stream].tolist(), weights["k_weight"][stream].tolist()
        match = sum(x[i] * q[i] * k[i] * key[i] for i in range(32))
        match /= math.sqrt(sum(v * v for v in x) / 32) * math.sqrt(sum(v * v for v in key) / 32) * math.sqrt(32)
        gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(match), 1e-6)), match)))
        torch.testing.assert_close(updated[0, stream], trunk[0, stream] + gate * projected[4])


@pytest.mark.parametrize(("match", "expected"), [(1e-9, 1e-3), (-1e-9, -1e-3), (0.0, 0.0), (4e-6, 2e-3)])
def test_small_matches_are_clamped_away_from_zero(match: float, expected: float) -> None:
    """The clamp acts on the magnitude under the root; the sign of an exact zero is zero."""
    weights = gate_weights() | {"k_weight": torch.ones(4, 32, dtype=torch.float64)}
    projected = (weights["wkv.weight"] @ weights["embed.weight"][0].repeat(6)).unflatten(0, (5, 32))
    trunk = torch.zeros(1, 4, 32, dtype=torch.float64)
    trunk[:, :, 0] = 1.0
    size = projected[:4].square().mean(-1).sqrt()
    weights["q_weight"] = torch.zeros(4, 32, dtype=torch.float64)
    weights["q_weight"][:, 0] = match * size / projected[:4, 0]  # the trunk's RMS is 1 / sqrt(32), as the last factor
    gate = ((run_gate(trunk, weights, torch.tensor([False])) - trunk) / projected[4])[0, :, 1:]
    torch.testing.assert_close(torch.logit(gate), torch.full_like(gate, expected), rtol=1e-6, atol=1e-9)


def test_image_rows_keep_their_trunk() -> None:
    trunk = torch.randn(2, 4, 32, dtype=torch.float64)
    updated = run_gate(trunk, gate_weights(), torch.tensor([True, False]))
    assert torch.equal(updated[0], trunk[0])
    assert not torch.allclose(updated[1], trunk[1])


def test_barrier_reaches_the_model() -> None:
    ids, mask = random_ids(12), torch.zeros(12, dtype=torch.bool)
    mask[4:7] = True
    traces: list[dict[str, Tensor]] = [{}, {}]
    model = tiny_model(weights=random_weights(tiny_config()))
    changed = ids.clone()
    changed[3] = (changed[3] + 1) % 500
    for sequence, trace in zip((ids, changed), traces, strict=True):
        model.forward(sequence, image_mask=mask, trace=trace)
    same = (traces[0]["layers.1.engram.rows"] == traces[1]["layers.1.engram.rows"]).all(1)
    assert same.tolist() == [position != 3 for position in range(12)]
    entering = traces[0]["layers.0.trunk"]
    assert torch.equal(traces[0]["layers.1.engram.trunk"][4:7], entering[4:7])
