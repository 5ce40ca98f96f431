"""``SamplingParams``: how the tokens of one request are chosen and when it ends.

Torch-free. Names and defaults of engine spec 1.3 are kept; every addition has a default that changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeVar

from deepinfer.config.values import FLOAT32_MAX
from deepinfer.errors import RequestError
from deepinfer.sampling import param_checks as checks
from deepinfer.sampling.so_args import check_so_args

GREEDY_BELOW = 1e-5
"""Temperatures below this mean arg-max."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-30, 1e30
"""Beyond these a logit of some hundred million leaves float32's range, or the penalty itself does."""
MAX_LOGPROBS = 1000
"""Most alternatives that can be asked for per token."""
MAX_OUTPUTS = 1024
"""Most outputs that one request can ask for; each is a sequence of its own."""

_RENAMED = {
    "seed": "seq_seed",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "guided_decoding": "so_args",
    "structured_outputs": "so_args",
    "stop_strings": "stop",
    "no_stop_trim": "include_stop_str_in_output",
}

_Class = TypeVar("_Class", bound=type)


class _Follows(int):
    """A ``top_logprobs`` that ``logprobs`` set. ``dataclasses.replace`` hands it to the copy, which then knows that
    nobody gave it and follows its own ``logprobs``."""


def _refuse_unknown_names(cls: _Class) -> _Class:
    """Let the constructor of a dataclass name the nearest field when a keyword does not exist."""
    original: Callable[..., None] = cls.__dict__["__init__"]
    known = [field.name for field in dataclasses.fields(cls)]

    def checked_init(self: Any, *positional: Any, **values: Any) -> None:
        if positional:
            raise checks.RequestTypeError(
                "SamplingParams", positional, why="its parameters are given by name", fix="for example temperature=0.5"
            )
        for name in values:
            if name not in known:
                raise checks.unknown_name("parameter name", name, known, _RENAMED)
        original(self, **values)

    checked_init.__doc__ = original.__doc__
    setattr(cls, "__init__", checked_init)  # noqa: B010 (mypy refuses the plain assignment)
    return cls


@_refuse_unknown_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, checked and brought into canonical form (lists become tuples) on construction.

    Raises:
        RequestError: a value is out of range (also a ``ValueError``); a wrong type or an unknown name gives the
            subclass ``RequestTypeError``, which is a ``TypeError`` too. The message names the field and the value.
    """

    temperature: float = 1.0
    """Divides the logits, 0 to 3.4e38. Below 1e-5: the most likely token, of equals the lowest id; top_p and
    top_k are off."""
    top_p: float = 1.0
    """Keep the most likely tokens until their mass exceeds this, in (0, 1]; the token that crosses it is kept."""
    top_k: int = -1
    """Keep this many of the most likely tokens that top_p left; -1 means all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one, in [0, 1]; applied before top_p."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output so far, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output so far, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, in [1e-30, 1e30]."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, each in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """Nothing but these ids can be sampled."""

    max_tokens: int = 16
    """Most tokens to generate, >= 1; the model's length limit applies as well."""
    min_tokens: int = 0
    """EOS (unless ignore_eos) and stop_token_ids cannot be sampled before this many tokens; stop strings wait too."""
    ignore_eos: bool = False
    """EOS does not end the request."""
    first_n_token_no_eos: int = 0
    """EOS cannot be sampled among the first so many tokens, even with ignore_eos."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request; stored as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the request like EOS does; stored as a tuple."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    eos_id: int = 0
    """End-of-sequence id; the engine overwrites it with the tokenizer's."""

    logprobs: bool | int | None = None
    """None or False: no log-probabilities. True or 0: of the chosen token. k >= 1: also the k most likely tokens
    (this sets top_logprobs unless top_logprobs is given)."""
    top_logprobs: int = 0
    """Alternatives per token, 0 to 1000; more than 0 implies logprobs."""
    prompt_logprobs: bool | int | None = False
    """None or False: none. True or 0: log-probability of every prompt token but the first. k >= 1: also the k most
    likely tokens there."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """processed: of the distribution that was sampled; raw: log-softmax of the model's own logits."""

    n: int = 1
    """Number of outputs, 1 to 1024. Output i draws with ``child_seed(seed, i)``; output 0 is the one that n=1 gives."""
    seq_seed: int | None = None
    """Seed of the request's random numbers, taken modulo 2**64; None draws 64 random bits."""
    so_args: Mapping[str, Any] | None = None
    """Structured output: a dict with schema_type, schema and optionally trigger_token_ids, bound_token_id."""
    structured: Any = None
    """Structured output, the friendlier way: a JsonSchema, Regex, Ebnf or Choice; not together with so_args."""
    golden_token_ids: Sequence[int] | None = None
    """Teacher forcing: output i is golden_token_ids[i]; -1 and positions beyond the list are sampled."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Turn ids into text at all."""

    def __post_init__(self) -> None:
        if isinstance(self.top_logprobs, _Follows):
            object.__setattr__(self, "top_logprobs", 0)
        for field, value in self._checked_values():
            object.__setattr__(self, field, value)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens",
                self.min_tokens,
                why=f"the request ends after max_tokens ({self.max_tokens})",
                fix="raise max_tokens or lower min_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop",
                self.stop,
                why="stop strings are found in text, and detokenize is False",
                fix="use stop_token_ids",
            )
        if isinstance(self.logprobs, int) and not isinstance(self.logprobs, bool) and not self.top_logprobs:
            object.__setattr__(self, "top_logprobs", _Follows(self.logprobs))

    def _checked_values(self) -> list[tuple[str, Any]]:
        """Every field in canonical form, in declaration order."""
        return [
            ("temperature", checks.check_number("temperature", self.temperature, 0.0, FLOAT32_MAX)),
            ("top_p", checks.check_number("top_p", self.top_p, 0.0, 1.0, above_low=True)),
            ("top_k", _check_top_k(self.top_k)),
            ("min_p", checks.check_number("min_p", self.min_p, 0.0, 1.0)),
            ("presence_penalty", checks.check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)),
            ("frequency_penalty", checks.check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)),
            (
                "repetition_penalty",
                checks.check_number(
                    "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
                ),
            ),
            ("logit_bias", checks.check_logit_bias(self.logit_bias)),
            ("allowed_token_ids", _check_allowed(self.allowed_token_ids)),
            ("max_tokens", checks.check_int("max_tokens", self.max_tokens, 1)),
            ("min_tokens", checks.check_int("min_tokens", self.min_tokens, 0)),
            ("ignore_eos", checks.check_bool("ignore_eos", self.ignore_eos)),
            ("first_n_token_no_eos", checks.check_int("first_n_token_no_eos", self.first_n_token_no_eos, 0)),
            ("stop", checks.check_stop(self.stop)),
            ("stop_token_ids", _check_stop_ids(self.stop_token_ids)),
            (
                "include_stop_str_in_output",
                checks.check_bool("include_stop_str_in_output", self.include_stop_str_in_output),
            ),
            ("eos_id", checks.check_int("eos_id", self.eos_id, 0)),
            ("logprobs", _check_logprobs("logprobs", self.logprobs)),
            ("top_logprobs", checks.check_int("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)),
            ("prompt_logprobs", _check_logprobs("prompt_logprobs", self.prompt_logprobs)),
            ("logprobs_mode", checks.check_choice("logprobs_mode", self.logprobs_mode, ("processed", "raw"))),
            ("n", checks.check_int("n", self.n, 1, MAX_OUTPUTS)),
            ("seq_seed", _check_seed(self.seq_seed)),
            ("so_args", check_so_args(self.so_args)),
            ("golden_token_ids", _check_golden(self.golden_token_ids)),
            ("skip_special_tokens", checks.check_bool("skip_special_tokens", self.skip_special_tokens)),
            ("detokenize", checks.check_bool("detokenize", self.detokenize)),
        ]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from parsed JSON. Raises as the constructor does; the message suggests the nearest known name."""
        if not isinstance(values, Mapping):
            raise checks.RequestTypeError(
                "sampling_params", values, why="it has to be a dict", fix="give names and values of parameters"
            )
        for name in values:
            if not isinstance(name, str):
                raise checks.RequestTypeError("parameter name", name, why="names are strings", fix="rename it")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values; :meth:`from_dict` gives equal parameters.

        A ``top_logprobs`` that only follows ``logprobs`` is 0 here, as it was given: changing ``logprobs`` in the dict
        then changes both.
        """
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values[field.name] = list(value) if isinstance(value, tuple) else value
        if isinstance(self.top_logprobs, _Follows):
            values["top_logprobs"] = 0
        return values

    def validate_for(self, vocab_size: int, *, supports_structured_output: bool = False) -> None:
        """Check what depends on the model, before the request is queued.

        Args:
            vocab_size: number of rows of the output head; ids have to be below it.
            supports_structured_output: whether the engine can compile grammars.
        Raises:
            RequestError: an id is out of range, more alternatives than tokens are asked for, or ``so_args`` is given
                to an engine without grammars.
        """
        checks.check_below_vocab("stop_token_ids", self.stop_token_ids or (), vocab_size)
        checks.check_below_vocab("logit_bias key", self.logit_bias or (), vocab_size)
        checks.check_below_vocab("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        checks.check_below_vocab("golden_token_ids", self.golden_token_ids or (), vocab_size)
        checks.check_below_vocab("eos_id", (self.eos_id,), vocab_size)
        for field, count in (("top_logprobs", self.top_logprobs), ("prompt_logprobs", self.num_prompt_logprobs or 0)):
            if count > vocab_size:
                raise RequestError(field, count, why=f"the vocabulary has {vocab_size} tokens", fix="ask for fewer")
        if self.so_args is None:
            return
        if not supports_structured_output:
            raise RequestError(
                "so_args",
                dict(self.so_args),
                why="this engine was built without structured output",
                fix="leave so_args out and check the text yourself",
            )
        checks.check_below_vocab("so_args trigger_token_ids", self.so_args.get("trigger_token_ids") or (), vocab_size)
        bound = self.so_args.get("bound_token_id")
        checks.check_below_vocab("so_args bound_token_id", () if bound is None else (bound,), vocab_size)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def wants_logprobs(self) -> bool:
        """The log-probability of each generated token is asked for."""
        return self.top_logprobs > 0 or (self.logprobs is not None and self.logprobs is not False)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token; None if no prompt log-probabilities are asked for."""
        if self.prompt_logprobs is None or self.prompt_logprobs is False:
            return None
        return 0 if self.prompt_logprobs is True else int(self.prompt_logprobs)

    @property
    def uses_penalties(self) -> bool:
        """The logits depend on which tokens came before, so a step needs the ids of all earlier ones on the host."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _check_top_k(value: object) -> int:
    if value == -1 and not isinstance(value, bool):
        return -1
    if value == 0 and isinstance(value, int) and not isinstance(value, bool):
        raise RequestError("top_k", value, why="no token would be left", fix="use -1 to keep all tokens")
    return checks.check_int("top_k", value, 1)


def _check_logprobs(field: str, value: object) -> bool | int | None:
    if value is None or isinstance(value, bool):
        return value
    return checks.check_int(field, value, 0, MAX_LOGPROBS)


def _check_allowed(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    allowed = checks.check_token_ids("allowed_token_ids", value)
    if not allowed:
        raise RequestError("allowed_token_ids", value, why="no token would be left", fix="name one, or leave it out")
    return allowed


def _check_stop_ids(value: object) -> tuple[int, ...]:
    return () if value is None else checks.check_token_ids("stop_token_ids", value)


def _check_golden(value: object) -> tuple[int, ...] | None:
    return None if value is None else checks.check_token_ids("golden_token_ids", value, low=-1)


def _check_seed(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise checks.RequestTypeError("seq_seed", value, why="it has to be an integer or None", fix="give any integer")
    return int(value) % 2**64  # every integer is legal, negatives too: only the low 64 bits count
