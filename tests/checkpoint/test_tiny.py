"""The tiny configuration against the values that the specification derives for it."""

from __future__ import annotations

from deepinfer.checkpoint import tiny_config
from deepinfer.config.engram_hashing import engram_multipliers, engram_primes
from deepinfer.config.layer_plan import IndexMode


def test_layer_roles_of_the_tiny_model() -> None:
    layers = tiny_config().text.layers
    modes = [IndexMode.NONE] * 2 + [IndexMode.FULL, IndexMode.REUSE] * 2 + [IndexMode.REINDEX, IndexMode.REUSE]
    assert [layer.mode for layer in layers] == modes
    assert [layer.index_source for layer in layers] == [None, None, 2, 2, 4, 4, 6, 6]
    assert [layer.layer_id for layer in layers if layer.is_candidate_source] == [4]
    assert tiny_config().text.first_decoder_layer == 4


def test_hash_constants_of_the_tiny_model() -> None:
    text = tiny_config().text
    primes = engram_primes(2, text.engram_max_ngram_size, text.engram_n_heads, text.engram_vocab_size)
    assert primes == ((1009, 1013, 1019, 1021, 1031, 1033), (1039, 1049, 1051, 1061, 1063, 1069))
    compressed = text.engram_compressed_vocab_size or text.vocab_size
    assert compressed == 512
    assert engram_multipliers(1, 4, compressed) == (
        14831304026200453,
        936705081716061,
        6959601268494069,
        14319439928568407,
    )
    assert engram_multipliers(3, 4, compressed)[0] == 5327545137947969


def test_fields_and_vision_can_be_overridden() -> None:
    config = tiny_config(vision=False, sliding_window=8)
    assert config.vision is None
    assert config.text.sliding_window == 8
    assert config.text.vocab_size == 512
