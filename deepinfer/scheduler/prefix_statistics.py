"""How much the prefix cache saved."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepinfer.scheduler.prefix_lookup import Hit


@dataclass(slots=True)
class PrefixStatistics:
    """Totals over the first starts of all sequences; recomputation after a preemption does not count."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of these, tokens that were found: the hit, or with ``exact`` the part of it that was not computed again."""
    num_hit_tokens: int = 0
    """Tokens whose entries were found, whether or not their rows ran again."""
    num_hits: int = 0
    num_lookups: int = 0
    _taken: PrefixStatistics | None = None

    def count(self, num_prompt_tokens: int, hit: Hit) -> None:
        """A sequence starts with ``hit``."""
        self.num_lookups += 1
        self.num_hits += hit.num_cached > 0
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += hit.num_cached
        self.num_hit_tokens += hit.num_hit_tokens

    def take(self) -> PrefixStatistics:
        """What was counted since the call before."""
        total = replace(self, _taken=None)
        before = self._taken or PrefixStatistics()
        self._taken = total
        return PrefixStatistics(
            num_prompt_tokens=total.num_prompt_tokens - before.num_prompt_tokens,
            num_cached_tokens=total.num_cached_tokens - before.num_cached_tokens,
            num_hit_tokens=total.num_hit_tokens - before.num_hit_tokens,
            num_hits=total.num_hits - before.num_hits,
            num_lookups=total.num_lookups - before.num_lookups,
        )

    def line(self) -> str:
        """For the engine's log."""
        return (
            f"prefix cache {self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens "
            f"({100 * self.hit_share:.0f} %)"
        )

    @property
    def hit_share(self) -> float:
        """Cached tokens over prompt tokens, in [0, 1]."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)
