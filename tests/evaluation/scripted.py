"""A model that says what a test tells it to say, for the logic of scoring."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from deepinfer.engine.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.evaluation.tasks import Sample
from deepinfer.sampling.params import SamplingParams
from deepinfer.worker.step_results import SequenceTokens

BOS, EOS = 0, 1_000_000


class WordTokenizer:
    """A word is a token, and so is every digit and every other character. Ids are given out as words appear."""

    bos_token_id = BOS

    def __init__(self) -> None:
        self._words = ["<BOS>"]
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, add_bos: bool, parse_special: bool = True, field: str = "prompt") -> list[int]:
        for word in (words := re.findall(r" ?[^\W\d]+|.", text, re.DOTALL)):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
        return ([BOS] if add_bos else []) + [self._ids[word] for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._words[token] for token in ids if token not in (BOS, EOS))

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id].encode()


TOKENIZER = WordTokenizer()


class ScriptedWorker:
    """Hands out prepared steps."""

    def sample(self, found: dict[str, SequenceTokens]) -> Any:
        return SimpleNamespace(by_sequence=found)


class ScriptedModel:
    """Answers with ``reply(prompt)``; every prompt token has probability 1 / 2.

    Args:
        chunk: tokens of every step behind the first, to play speculation.
    """

    def __init__(
        self, reply: Callable[[str], str], *, max_model_len: int = 8192, chunk: int = 1, drafts: int = 0
    ) -> None:
        self._reply, self._chunk = reply, chunk
        self.calls: list[list[tuple[int, ...]]] = []
        self.params: list[SamplingParams] = []
        self.engine: Any = SimpleNamespace(
            worker=ScriptedWorker(),
            model_config=SimpleNamespace(eos_token_id=EOS),
            config=SimpleNamespace(
                scheduler=SimpleNamespace(max_model_len=max_model_len),
                speculation=SimpleNamespace(num_tokens=drafts),
                prefill=SimpleNamespace(is_truncating=False),
            ),
        )

    def get_tokenizer(self) -> Any:
        return TOKENIZER

    def encode_conversation(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        return SimpleNamespace(ids=TOKENIZER.encode(messages[0]["content"], add_bos=True))

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        assert prompt_token_ids is not None
        self.calls.append([tuple(ids) for ids in prompt_token_ids])
        many = isinstance(sampling_params, list)
        params = sampling_params if many else [sampling_params] * len(prompt_token_ids)
        self.params += params
        return [self._one(list(ids), each) for ids, each in zip(prompt_token_ids, params, strict=True)]

    def _one(self, ids: list[int], params: SamplingParams) -> RequestOutput:
        text = self._reply(TOKENIZER.decode(ids))
        tokens = [*TOKENIZER.encode(text, add_bos=False), EOS][: params.max_tokens]
        steps = 1 + math.ceil((len(tokens) - 1) / self._chunk)
        output = CompletionOutput(0, text=TOKENIZER.decode(tokens), token_ids=tokens, num_steps=steps)
        scores: Any = None
        if params.num_prompt_logprobs is not None:
            scores = [None, *({token: Logprob(math.log(0.5), 1, "")} for token in ids[1:])]
        return RequestOutput("0", None, ids, [output], prompt_logprobs=scores)


def knows(samples: Sequence[Sample], wrong: int = 0) -> Callable[[str], str]:
    """Replies with the expected answers, the first ``wrong`` of which are spoiled."""
    answers = {sample.prompt: "no" if place < wrong else sample.expected for place, sample in enumerate(samples)}
    return lambda prompt: answers.get(prompt, "?")
