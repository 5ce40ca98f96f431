"""What the prefix cache knows and decides about one sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from deepinfer.kvcache.block_keys import MediaSpan, TokenChain
from deepinfer.kvcache.prefix_index import CachedBlock


@dataclass(slots=True, kw_only=True)
class PrefixState:
    """Wishes of the request, and where its computation starts. Changed by the planner only.

    Positions are absolute, in tokens. The floors are those of :class:`deepinfer.messages.Chunk`.
    """

    salt: str = ""
    """Requests find blocks of requests with the same salt only: a tenant, for example."""
    reads: bool = True
    """Whether cached blocks may be used. Off for requests that need every prompt row, such as prompt logprobs."""
    wants_exact: bool = False
    """Results have to be those of an empty cache, whatever the engine's policy."""
    media: Items[MediaSpan] = ()
    """Images of the prompt, in order."""

    chain: TokenChain | None = None
    """Keys of its blocks; None while there is no prefix cache."""
    entries: list[CachedBlock] = field(default_factory=list)
    """Its blocks that can be found by others, from the first one on without a gap."""
    num_hit_blocks: int = 0
    """How many of them it found rather than made."""
    is_linked: bool = True
    """Whether its next block can be added behind ``entries``: not if another sequence made the same block first."""
    window_floor: int = 0
    entry_floor: int = 0
    decoder_floor: int = 0
    boundaries: list[int] = field(default_factory=list)
    """Positions inside the prompt at which its state is to be saved, ascending; chunks end there."""
    restore: int | None = None
    """Place of the checkpoint that its first chunk begins with."""
    newest_output: CachedBlock | None = None
    """Where its newest checkpoint inside the output hangs; an older one is of little use."""
    num_cached: int | None = None
    """Prompt tokens that its first start found in the cache; None before it."""

    leader: str | None = None
    """Request that it waits for, because that one computes a prefix of it."""
    num_shared_blocks: int = 0
    """Blocks from the first one on that the cache holds or the leader computes."""
    leader_rows: int = -1
    """How far the leader was when it was last looked at."""
    num_idle_looks: int = 0
    """How often in a row the leader had not moved."""
    num_fetch_looks: int = 0
    """How often it was looked at while blocks were on their way from a tier below."""
    gave_up: bool = False
    """It waited in vain and starts on its own."""

    def reset(self) -> None:
        """The sequence lost its memory and will start again."""
        self.entries = []
        self.num_hit_blocks = 0
        self.is_linked = True
        self.window_floor = self.entry_floor = 0
        self.boundaries = []
        self.restore = self.newest_output = None
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Forget whom it waited for."""
        self.leader = None
        self.num_shared_blocks = 0
        self.leader_rows = -1
        self.num_idle_looks = 0
