"""The prefix cache of an engine, wired from its configuration."""

from __future__ import annotations

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import TextConfig
from deepinfer.config.prefill import PrefillConfig
from deepinfer.errors import RequestError
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.checkpoints import Checkpoints
from deepinfer.kvcache.prefix_index import PrefixIndex
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.prefix_lookup import HitFinder
from deepinfer.scheduler.prefix_planner import PrefixPlanner
from deepinfer.scheduler.prefix_state import PrefixState


def build_prefix_planner(
    config: EngineConfig, text: TextConfig, pool: BlockPool, backtracking: int
) -> PrefixPlanner | None:
    """A planner over ``pool``, or None when the prefix cache is off.

    Args:
        backtracking: spare places of the window rings.
    """
    cache, prefill = config.cache, config.prefill
    if cache.prefix_cache == "off":
        return None
    index = PrefixIndex(pool)
    finder = HitFinder(
        index,
        is_bounded=cache.prefix_cache == "bounded",
        window=text.sliding_window,
        decoder_keep=prefill.decoder_keep_tokens,
    )
    truncation = f"{prefill.truncation}/{prefill.decoder_keep_tokens}"
    return PrefixPlanner(
        finder,
        Checkpoints(index, cache.num_checkpoints),
        namespace=(config.numerics, truncation),
        backtracking=backtracking,
        cuts_chunks=config.scheduler.chunked_prefill,
    )


def prefix_state(params: SamplingParams, salt: str) -> PrefixState:
    """What a request wants of the prefix cache.

    A fixed seed asks for the same tokens every time, so such a request uses exact hits only, whatever the engine's
    policy. One that scores its prompt needs all of the prompt's rows.
    """
    return PrefixState(salt=salt, reads=params.num_prompt_logprobs is None, wants_exact=params.seq_seed is not None)


def refuse_truncated_logprobs(params: SamplingParams, prefill: PrefillConfig) -> None:
    """Raise RequestError for log-probabilities of prompt tokens that truncation does not compute."""
    if prefill.is_truncating and params.num_prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs",
            params.prompt_logprobs,
            why=f"with prefill_truncation={prefill.truncation} only the last {prefill.keep_tokens} prompt tokens go "
            "through all layers",
            fix="leave prompt_logprobs out, or start the engine with prefill_truncation=off",
        )
