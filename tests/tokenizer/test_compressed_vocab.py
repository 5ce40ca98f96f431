"""The compressed vocabulary against independent implementations and the numbers of spec A.3 and A.4."""

from __future__ import annotations

import hashlib
import unicodedata
import zlib

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from deepinfer.config.engram_hashing import engram_multipliers
from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.tokenizer.compressed_vocab import CompressedVocab, build_compressed_vocab, load_compressed_vocab
from deepinfer.tokenizer.tokenizer import Tokenizer

from .conftest import DATA, small_backend, with_text, wrap


@pytest.fixture(scope="module")
def released(released_backend: Backend) -> CompressedVocab:
    return build_compressed_vocab(released_backend)


@pytest.mark.parametrize(("name", "size"), [("s1_basic", 312), ("s2_real_heads", 281)])
def test_small_tokenizers_give_the_reference_map(name: str, size: int) -> None:
    built = build_compressed_vocab(Backend.from_file(str(DATA / f"{name}.tokenizer.json")))
    expected = np.load(DATA / "token_maps.npz")[name]
    assert built.size == size
    assert built.token_map.dtype == np.int32
    np.testing.assert_array_equal(built.token_map, expected)


def test_released_tokenizer_gives_the_published_checksum(released: CompressedVocab) -> None:
    assert released.size == 99092
    assert released.token_map.shape == (129280,)
    raw = released.token_map.astype("<i4").tobytes()
    assert hashlib.sha256(raw).hexdigest() == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


def test_released_examples(released: CompressedVocab, released_backend: Backend) -> None:
    token_map = released.token_map
    assert token_map[:5].tolist() == [0, 1, 2, 3, 4]
    assert set(token_map[[671, 270, 1805, 20852, 455]].tolist()) == {237}  # The, the, THE with and without space
    assert int((token_map == 174).sum()) == 163
    assert token_map[223] == token_map[201] == 174  # space, newline
    ids = released_backend.encode("<｜begin▁of▁sentence｜>The capital of France is").ids
    assert ids == [0, 671, 6102, 294, 8760, 344]
    assert token_map[ids].tolist() == [0, 237, 5095, 251, 7208, 242]


def test_released_map_agrees_with_an_independent_program(released: CompressedVocab, released_backend: Backend) -> None:
    golden = np.load(DATA / "engram_real_tokenizer.npz")
    np.testing.assert_array_equal(released.token_map[golden["map_ids"]], golden["map_compressed"])
    assert released.size == int(golden["compressed_vocab"])
    ids = released_backend.encode(str(golden["sample_text"]), add_special_tokens=False).ids
    assert ids == golden["sample_ids"].tolist()
    np.testing.assert_array_equal(released.token_map[ids], golden["compressed_ids"])
    assert zlib.crc32(released.token_map.astype("<i4").tobytes()) == int(golden["map_crc32"])
    for layer, expected in zip((1, 14), golden["multipliers"].tolist(), strict=True):
        assert list(engram_multipliers(layer, 4, released.size)) == expected


def test_small_map_agrees_with_a_plain_python_reading_of_the_rule() -> None:
    """The rule of spec 4.10 (a) written out with the standard library (this vocabulary has no final sigma)."""
    backend = small_backend(("Ｆull", "É", "e\u0301E", " \t\n ", "\u0bbe", "naïve  X"))
    keys: dict[str, int] = {}
    expected = []
    for token_id in range(backend.get_vocab_size()):
        text = backend.decode([token_id], skip_special_tokens=False)
        key = text
        if "\ufffd" in text:
            key = backend.id_to_token(token_id)
        else:
            form = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            form = "".join(c for c in form if unicodedata.category(c) not in ("Mn", "Mc", "Me")).lower()
            for space in "\t\r\n":
                form = form.replace(space, " ")
            while "  " in form:
                form = form.replace("  ", " ")
            key = (" " if form == " " else form.strip()) or text
        expected.append(keys.setdefault(key, len(keys)))
    built = build_compressed_vocab(backend)
    assert built.token_map.tolist() == expected
    assert built.size == len(keys)
    combining = backend.token_to_id("\u0bbe")  # category Mc alone: nothing is left, so the text itself is the key
    assert built.token_map[combining] == keys["\u0bbe"]


def test_map_is_checked_against_the_configuration(tokenizer: Tokenizer, config: ModelConfig) -> None:
    plain = wrap(small_backend())
    assert load_compressed_vocab(plain, config.text).size == 312
    with pytest.raises(CheckpointError, match=r"312 ids.*engram_compressed_vocab_size is 311"):
        load_compressed_vocab(plain, with_text(config, engram_compressed_vocab_size=311).text)
    with pytest.raises(CheckpointError, match=r"387 tokens.*384 embedding rows"):
        load_compressed_vocab(tokenizer, config.text)


@pytest.mark.parametrize("unset", [None, 0])
def test_without_a_size_the_map_is_the_identity(tokenizer: Tokenizer, config: ModelConfig, unset: int | None) -> None:
    built = load_compressed_vocab(tokenizer, with_text(config, engram_compressed_vocab_size=unset).text)
    assert built.size == 384
    np.testing.assert_array_equal(built.token_map, np.arange(384))


def test_the_map_cannot_be_changed_by_accident() -> None:
    built = build_compressed_vocab(small_backend())
    with pytest.raises(ValueError, match="read-only"):
        built.token_map[0] = 1
