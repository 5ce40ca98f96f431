"""Train the tiny model's tokenizer: byte-level BPE that spells digits singly, with the tokens of the chat format.

``python -m tools.tiny.tokenizer`` writes ``build/tiny/tokenizer/`` from the fetched texts and the task generators.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.evaluation.tasks import Split
from tools.tiny.conversation import (
    ASSISTANT,
    BOS,
    EOS,
    IMAGE,
    NOISE,
    OTHER_CHAT_TOKENS,
    PAD,
    THINK_END,
    USER,
)
from tools.tiny.mixture import any_sample

VOCAB_SIZE = 2048
IMAGE_ID, NOISE_ID = VOCAB_SIZE - 12, VOCAB_SIZE - 11
_SEED = 7
_FOLDER = Path("build/tiny")


def special_tokens() -> dict[int, str]:
    """Special tokens by id: the first three as in the released model, the others at the end of the vocabulary."""
    tokens = {0: BOS, 1: EOS, 2: PAD, IMAGE_ID: IMAGE, NOISE_ID: NOISE}
    chat = (USER, ASSISTANT, THINK_END, *OTHER_CHAT_TOKENS)
    for number, text in enumerate(chat):
        tokens[NOISE_ID + 1 + number] = text
    for token_id in range(NOISE_ID + 1 + len(chat), VOCAB_SIZE):
        tokens[token_id] = f"<｜place▁holder▁no▁{token_id}｜>"
    return tokens


def train_tokenizer(texts: Iterator[str]) -> str:
    """JSON of a tokenizer with exactly :data:`VOCAB_SIZE` ids."""
    special = special_tokens()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special), initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    backend.train_from_iterator(texts, trainer)
    content = json.loads(backend.to_str())
    learned = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    ids = [token_id for token_id in range(VOCAB_SIZE) if token_id not in special]
    assert len(learned) == len(ids), f"{len(learned)} learned tokens for {len(ids)} ids: train on more text"
    vocab = dict(zip(learned, ids, strict=True)) | {text: token_id for token_id, text in special.items()}
    content["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": token_id, "content": special[token_id], **flags} for token_id in sorted(special)]
    return json.dumps(content, ensure_ascii=False)


def training_texts(prose: str) -> Iterator[str]:
    """Prose and task texts in about equal parts."""
    rng = random.Random(_SEED)
    lines = prose.split("\n")
    yield from lines[::2]
    for _ in range(20000):
        for turn in any_sample(rng, Split.TRAIN).turns:
            yield turn.user
            yield turn.answer


def write_tokenizer(folder: Path, text: str) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, default=_FOLDER / "texts")
    parser.add_argument("--out", type=Path, default=_FOLDER / "tokenizer")
    args = parser.parse_args()
    prose = (args.texts / "train.txt").read_text(encoding="utf-8")
    write_tokenizer(args.out, train_tokenizer(training_texts(prose)))


if __name__ == "__main__":
    main()
