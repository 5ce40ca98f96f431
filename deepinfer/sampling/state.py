"""``SamplingState``: what the sampler has to know about one sequence."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence

from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.random import as_int64, child_seed
from deepinfer.sampling.token_counts import counts_for

_serials = itertools.count()


class SamplingState:
    """Parameters, seed and output of one sequence.

    A pure function of (params, prompt, output, seed): after preemption or a rollback it is what replaying the output
    gives. Owned by the engine, which calls :meth:`append` with every committed token and :meth:`rollback` to take
    tokens back; the batch builder reads.

    Args:
        params: the request's parameters, already checked with ``validate_for``.
        prompt_ids: the prompt as the model sees it, image placeholders included.
        vocab_size: number of tokens that the model can produce.
        eos_id: end-of-sequence id; None takes ``params.eos_id``.
        seed: overrides ``params.seq_seed``; if both are None 64 random bits are drawn.
        output_ids: tokens generated so far, for a sequence that moves here or is rebuilt.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_id: int | None = None,
        seed: int | None = None,
        output_ids: Iterable[int] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.num_prompt = len(prompt_ids)
        self.eos_id = params.eos_id if eos_id is None else eos_id
        if seed is None:
            seed = secrets.randbits(64) if params.seq_seed is None else params.seq_seed
        self.seed = seed % 2**64
        self.seed_int64 = as_int64(seed)
        self.serial = next(_serials)
        """Never used twice, so a batch can recognise a membership that it has seen."""
        self.early_bans = _early_bans(params, self.eos_id, self.num_prompt)
        """(token, position): the token cannot be sampled at a position below."""
        self.early_until = max((until for _token, until in self.early_bans), default=0)
        self.counts = counts_for(params, vocab_size, prompt_ids)
        self.is_plain = _is_plain(params)
        """Whether :class:`~deepinfer.sampling.row_parameters.RowParameters` say all that is asked of its tokens, but
        for ``early_bans``."""
        self.output_ids: list[int] = []
        self.append(output_ids)

    @property
    def next_position(self) -> int:
        """Absolute position of the next token to be generated."""
        return self.num_prompt + len(self.output_ids)

    @property
    def ignores_output(self) -> bool:
        """Whether the next distribution depends on the length of the output only, not on its tokens."""
        return self.counts is None

    def append(self, token_ids: Iterable[int]) -> None:
        """Commit generated tokens."""
        counts = self.counts
        for token_id in token_ids:
            assert 0 <= token_id < self.vocab_size, f"{token_id=} is not in [0, {self.vocab_size})"
            self.output_ids.append(token_id)
            if counts is not None:
                counts.add(token_id)

    def rollback(self, num_output: int) -> None:
        """Keep the first ``num_output`` generated tokens only."""
        assert 0 <= num_output <= len(self.output_ids), f"{num_output=} of {len(self.output_ids)}"
        if self.counts is not None:
            for token_id in self.output_ids[num_output:]:
                self.counts.remove(token_id)
        del self.output_ids[num_output:]

    def golden_at(self, position: int) -> int:
        """The token that teacher forcing puts at ``position``, or -1."""
        golden = self.params.golden_token_ids or ()
        index = position - self.num_prompt
        return golden[index] if 0 <= index < len(golden) else -1

    def child(self, index: int, prompt_ids: Sequence[int]) -> SamplingState:
        """The state of output ``index`` of a request with ``n > 1``; child 0 draws what this state draws."""
        return SamplingState(
            self.params,
            prompt_ids,
            vocab_size=self.vocab_size,
            eos_id=self.eos_id,
            seed=child_seed(self.seed, index),
        )

    def check(self) -> None:
        """Raise if the incremental counts differ from a recount."""
        if self.counts is None:
            return
        ids, counts = self.counts.snapshot()
        kept = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        for token_id in set(self.output_ids) | {token for token, count in kept.items() if count}:
            expected = self.output_ids.count(token_id)
            assert kept.get(token_id) == expected, f"{token_id=} occurs {expected} times, counted {kept.get(token_id)}"


def _is_plain(params: SamplingParams) -> bool:
    return (
        not params.wants_logprobs
        and not params.uses_penalties
        and params.allowed_token_ids is None
        and not params.logit_bias
        and not params.golden_token_ids
    )


def _early_bans(params: SamplingParams, eos_id: int, num_prompt: int) -> tuple[tuple[int, int], ...]:
    """Which ids cannot be sampled before which position, from min_tokens and first_n_token_no_eos."""
    until = dict.fromkeys(params.stop_token_ids or (), num_prompt + params.min_tokens)
    # With ignore_eos an EOS is a token like any other, so min_tokens has no reason to ban it.
    num_without_eos = max(params.first_n_token_no_eos, 0 if params.ignore_eos else params.min_tokens)
    until[eos_id] = max(until.get(eos_id, 0), num_prompt + num_without_eos)
    return tuple((token_id, position) for token_id, position in until.items() if position > num_prompt)
