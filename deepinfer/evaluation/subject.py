"""What evaluation needs of the thing that it evaluates; ``deepinfer.LLM`` offers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.tokenizer.tokenizer import Tokenizer


class Encoded(Protocol):
    """A prompt as token ids."""

    @property
    def ids(self) -> Sequence[int]: ...


class Subject(Protocol):
    """A model that answers; see :class:`deepinfer.entrypoints.llm.LLM` for what the methods do."""

    @property
    def engine(self) -> Engine: ...

    def get_tokenizer(self) -> Tokenizer: ...

    def encode_conversation(self, messages: Sequence[Mapping[str, Any]]) -> Encoded: ...

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...
