"""The chat format at token level, as the engine's own encoding writes it (a test compares the two)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from deepinfer.evaluation.tasks import Sample

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜place▁holder▁no▁799｜>"
USER, ASSISTANT, THINK_END = "<｜User｜>", "<｜Assistant｜>", "</think>"
OTHER_CHAT_TOKENS = ("<think>", "｜DSML｜", "<｜System｜>", "<｜latest_reminder｜>")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns samples into token ids. ``backend`` must never see a special token in a text."""

    backend: Tokenizer
    bos: int
    eos: int
    user: int
    assistant: int
    think_end: int

    @classmethod
    def of(cls, backend: Tokenizer) -> Encoder:
        ids = {text: backend.token_to_id(text) for text in (BOS, EOS, USER, ASSISTANT, THINK_END)}
        missing = [text for text, token_id in ids.items() if token_id is None]
        if missing:
            raise ValueError(f"the tokenizer lacks {missing}: train it with tools.tiny.tokenizer")
        return cls(backend, ids[BOS], ids[EOS], ids[USER], ids[ASSISTANT], ids[THINK_END])

    @classmethod
    def of_file(cls, file: Path) -> Encoder:
        """From ``tokenizer.json``."""
        return cls.of(Tokenizer.from_file(str(file)))

    def text(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def measure(self, text: str) -> int:
        """Number of tokens of ``text``."""
        return len(self.text(text))

    def prompt(self, sample: Sample) -> list[int]:
        """Ids up to the place where the first answer begins."""
        return [self.bos, self.user, *self.text(sample.prompt), self.assistant, self.think_end]

    def conversation(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Ids of all turns, and which of them are answer tokens (EOS included): those the model has to produce."""
        ids, is_answer = [self.bos], [False]
        for turn in sample.turns:
            asked = [self.user, *self.text(turn.user), self.assistant, self.think_end]
            answer = [*self.text(turn.answer), self.eos]
            ids += asked + answer
            is_answer += [False] * len(asked) + [True] * len(answer)
        return ids, is_answer
