"""Grows one output token by token: text, log-probabilities, and the decision to stop."""

from __future__ import annotations

from deepinfer.engine.outputs import CompletionOutput, Logprob, StreamDelta, TokenLogprobs
from deepinfer.sampling.params import SamplingParams
from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer.stop_strings import StopMatcher
from deepinfer.tokenizer.tokenizer import Tokenizer

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ERROR = "error"


class OutputBuilder:
    """State of one output between the sampler and the caller.

    Stop conditions are tested after each token, in this order: EOS and stop tokens, stop strings, length. The text
    excludes a stop string, and the text of a stop token, unless ``include_stop_str_in_output`` is set.

    Args:
        tokenizer: None serves ids only (no text, no stop strings).
        max_total: most tokens of prompt and output together.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_id: int,
        num_prompt: int,
        max_total: int,
    ) -> None:
        self.output = CompletionOutput(index)
        if params.wants_logprobs:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._params = params
        self._tokenizer = tokenizer
        self._eos_id = eos_id
        self._max_output = min(params.max_tokens, max_total - num_prompt + 1)
        self._max_total = max_total
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._detokenizer = None
        self._matcher = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
            if params.stop:
                self._matcher = StopMatcher(list(params.stop), params.include_stop_str_in_output)
        self._streamed_text = 0  # characters
        self._streamed_tokens = 0

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take in one token. Returns True if the output is finished by it."""
        output = self.output
        output.token_ids.append(token_id)
        if output.logprobs is not None:
            assert logprobs is not None
            output.logprobs.append(logprobs)
            assert output.cumulative_logprob is not None
            output.cumulative_logprob += logprobs[token_id].logprob
        if self._ends_with_token(token_id):
            if self._params.include_stop_str_in_output:
                self._add_text(token_id)
            stop = self._stop_at_the_end()
            named = None if token_id == self._eos_id else token_id
            self.finish(FINISH_STOP, named if stop is None else stop)
            return True
        stop = self._add_text(token_id)
        is_full = len(output.token_ids) >= self._max_output
        if stop is None and is_full:
            stop = self._stop_at_the_end()
        if stop is not None:
            self.finish(FINISH_STOP, stop)
        elif is_full:
            self.finish(FINISH_LENGTH)
        return output.finished

    @property
    def cut_short(self) -> str | None:
        """Why the output has fewer tokens than ``max_tokens`` although nothing stopped it; None if that is not so."""
        output = self.output
        if output.finish_reason != FINISH_LENGTH or len(output.token_ids) >= self._params.max_tokens:
            return None
        return (
            f"the sequence reached max_model_len = {self._max_total} before max_tokens = {self._params.max_tokens}; "
            "raise max_model_len, or shorten the prompt"
        )

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the output; text that was held back is let go unless a stop string ended it."""
        output = self.output
        if output.finished:
            return
        output.finish_reason = reason
        output.stop_reason = stop_reason
        if self._detokenizer is None:
            return
        stopped_by_text = isinstance(stop_reason, str)
        if not stopped_by_text:
            held = "" if self._matcher is None else self._matcher.flush().text
            output.text += held + self._detokenizer.flush()

    def take_delta(self, request_id: str, error: str | None = None) -> StreamDelta:
        """What was added since the last call. Tokens whose text is still held back are reported all the same."""
        output = self.output
        text, ids = output.text[self._streamed_text :], output.token_ids[self._streamed_tokens :]
        logprobs = None if output.logprobs is None else output.logprobs[self._streamed_tokens :]
        self._streamed_text, self._streamed_tokens = len(output.text), len(output.token_ids)
        return StreamDelta(
            request_id, output.index, text, ids, logprobs, output.finish_reason, output.stop_reason, error
        )

    def _ends_with_token(self, token_id: int) -> bool:
        if token_id == self._eos_id and not self._params.ignore_eos:
            return True
        return token_id in self._stop_ids and len(self.output.token_ids) > self._params.min_tokens

    def _stop_at_the_end(self) -> str | None:
        """The stop string that the last token completes by being the last: half a character before it is U+FFFD now."""
        is_late = len(self.output.token_ids) > self._params.min_tokens
        if self._detokenizer is None or self._matcher is None or self._matcher.stop is not None or not is_late:
            return None
        step = self._matcher.flush(self._detokenizer.flush())
        self.output.text += step.text
        return step.stop

    def _add_text(self, token_id: int) -> str | None:
        """Append the text that became certain. Returns the stop string that it completed, if any."""
        if self._detokenizer is None:
            return None
        delta = self._detokenizer.push((token_id,))
        if self._matcher is None or len(self.output.token_ids) <= self._params.min_tokens:
            self.output.text += delta
            return None
        step = self._matcher.push(delta)
        self.output.text += step.text
        return step.stop


def token_logprobs(
    token_id: int, logprob: float, rank: int, alternatives: list[tuple[int, float]], tokenizer: Tokenizer | None
) -> TokenLogprobs:
    """The entry of one position: the token itself first, then alternatives by falling probability."""

    def text(token: int) -> str:
        return "" if tokenizer is None else tokenizer.token_text(token)

    entry = {token_id: Logprob(logprob, rank, text(token_id))}
    previous, tied = None, 0
    for place, (token, value) in enumerate(alternatives, start=1):
        tied = tied if value == previous else place  # equal tokens share a rank
        previous = value
        entry.setdefault(token, Logprob(value, tied, text(token)))
    return entry
