"""A tokenizer for tiny models: byte-level BPE with the special tokens of spec 9 at the ids of the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
CHAT_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")

_NUM_BYTES = 256

# Written for this file; only common letter pairs are learned from it.
_TEXT = """
The engine reads a prompt and writes one token after another. Each token passes through every layer of the model, and
each layer asks the tokens before it what they know. The nearest ones answer in full; those far behind have been pressed
into short notes, and a small index decides which of the notes are worth reading. When the answer is done, the engine
stops, hands back the memory, and waits for the next request.
A colleague once asked why we test with such a small model. Because it is wrong in the same places as the large one,
we said, and it is wrong in less than a second. Numbers such as 0, 1, 2, 10, 64 and 1024 appear in every test, and so do
the names of things: weight, scale, block, table, row, batch, step, cache, draft and expert.
There is a river behind the house. In spring the water is high and the children count the boats under the bridge.
In summer they swim. In autumn the leaves float down to the sea, and in winter the river is quiet, because it is frozen.
def main(): print("hello, world") # for i in range(10): if x == y: return {"key": [1, 2, 3], "value": None}
"""


def build_tiny_tokenizer(config: ModelConfig) -> str:
    """The JSON text of a tokenizer with exactly ``vocab_size`` ids.

    The 256 byte symbols and learned merges fill the ids that no special token takes. From the first of the configured
    special ids in the upper half on, everything is special: chat tokens, then place holders.

    Raises:
        ConfigError: ``vocab_size`` has no room for 256 bytes beside the special tokens.
    """
    special = _special_tokens(config)
    vocab_size = config.text.vocab_size
    ordinary_ids = [token_id for token_id in range(vocab_size) if token_id not in special]
    if len(ordinary_ids) < _NUM_BYTES:
        raise ConfigError(
            f"config key text_config.vocab_size is {vocab_size}",
            why=f"{len(special)} special tokens leave {len(ordinary_ids)} ids, and 256 bytes need one each",
            fix=f"supported: at least {len(special) + _NUM_BYTES}",
        )
    tokens, merges = _ordinary_tokens(len(ordinary_ids))
    vocab = {**dict(zip(tokens, ordinary_ids, strict=True)), **{text: token_id for token_id, text in special.items()}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token_id, text) for token_id, text in sorted(special.items())],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        # Special tokens are in the vocabulary as well: that is what lets their ids lie anywhere.
        "model": {"type": "BPE", "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])), "merges": merges},
    }
    return json.dumps(content, ensure_ascii=False)


def tokenizer_settings(config: ModelConfig) -> dict[str, object]:
    """Content of ``tokenizer_config.json``."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.text.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _special_tokens(config: ModelConfig) -> dict[int, str]:
    """Special tokens by id: configured ones, chat tokens in the next free ids, place holders in the rest."""
    size = config.text.vocab_size
    noise = config.text.dspark_noise_token_id
    fixed = {config.bos_token_id: BOS, config.eos_token_id: EOS, config.pad_token_id: PAD}
    fixed[config.image_token_id] = IMAGE
    if config.text.num_nextn_predict_layers and noise not in fixed:
        fixed[noise] = _place_holder(noise)
    first = min((token_id for token_id in fixed if token_id >= size // 2), default=size)
    while first > 0 and sum(token_id not in fixed for token_id in range(first, size)) < len(CHAT_TOKENS):
        first -= 1
    free = [token_id for token_id in range(first, size) if token_id not in fixed]
    chat = dict(zip(free, CHAT_TOKENS, strict=False))
    return {**{token_id: _place_holder(token_id) for token_id in free}, **chat, **fixed}


def _place_holder(token_id: int) -> str:
    return f"<｜place▁holder▁no▁{token_id}｜>"


def _added_token(token_id: int, text: str) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": text, **flags}


def _ordinary_tokens(count: int) -> tuple[list[str], list[list[str]]]:
    """The 256 byte symbols and ``count - 256`` merged tokens, with the merges that make them, in order."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(tokens) == _NUM_BYTES
    known = set(tokens)
    merges: list[list[str]] = []
    for left, right in _merge_candidates(count - _NUM_BYTES, list(tokens)):
        if len(tokens) == count:
            break
        merges.append([left, right])
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
    return tokens, merges


def _merge_candidates(wanted: int, symbols: list[str]) -> Iterator[tuple[str, str]]:
    """Merges learned from the built-in text, then arbitrary ones for vocabularies that it cannot fill."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_BYTES + wanted, initial_alphabet=symbols, show_progress=False, min_frequency=2
    )
    trained.train_from_iterator(_TEXT.splitlines(), trainer)
    for left, right in json.loads(trained.to_str())["model"]["merges"]:
        yield left, right
    pairs = [(left, right) for left in symbols for right in symbols]
    yield from pairs
    for left, right in pairs:
        for third in symbols:
            yield left + right, third
