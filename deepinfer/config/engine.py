"""The engine's configuration: one frozen tree, built once by :func:`deepinfer.config.resolve.resolve`.

Defaults live in :mod:`deepinfer.config.options`; here are the fields and the ranges that each of them accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.config.prefill import PrefillConfig
from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.config.values import FLOAT32_MAX
from deepinfer.errors import ConfigError
from deepinfer.platforms.host_limits import num_processors

BLOCK_TOKENS = 128
"""Tokens of one block of KV memory over all streams; a design constant of the cache, not a tuning knob."""


MAX_CHECKPOINTS = 2**20
"""Most states in host memory; the released model's have 3 MB each."""
MAX_DRAFTS = 64
"""Most drafts per sequence and step."""


def _require(condition: bool, field: str, value: object, why: str, fix: str) -> None:
    if not condition:
        raise ConfigError(f"{field} is {value!r}", why=why, fix=fix)


def _require_few(number: int, field: str, things: str) -> None:
    """Refuse so many threads or processes that starting them would end this one, without a word: thousands do."""
    processors = num_processors()
    most = max(256, 8 * processors)
    _require(
        number <= most,
        field,
        number,
        f"this process may use {processors} processors, and more than {most} {things} could end it",
        f"give a number up to {most}; more than processors only wait for one another",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the model comes from. The model's own numbers are in :class:`deepinfer.config.model.ModelConfig`."""

    path: Path
    """Directory with ``config.json``."""
    tokenizer_path: Path
    load_format: str
    """``auto``: the checkpoint's weights. ``dummy``: random ones of the same shapes."""
    num_layers: int | None
    """Only the first layers are kept; None keeps all."""

    def __post_init__(self) -> None:
        number = self.num_layers
        _require(number is None or number >= 1, "num_layers", number, "it counts layers", "give a number >= 1")
        _require(
            number is None or self.load_format == "dummy",
            "num_layers",
            number,
            f"load_format is {self.load_format!r}, and a checkpoint is loaded whole or not at all",
            "add load_format='dummy', or leave num_layers out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What the engine runs on."""

    platform: str
    """``cpu``, ``nvidia`` or ``ascend``: already checked to be available."""
    num_threads: int
    """Host threads of one forward."""
    graphs: str = "startup"
    """When CUDA graphs are captured, where the platform's path has them: ``startup``, ``lazy`` or ``off``."""

    def __post_init__(self) -> None:
        number = self.num_threads
        _require(
            self.graphs in ("startup", "lazy", "off"),
            "cuda_graphs",
            self.graphs,
            "there is no such time to capture graphs at",
            "use startup, lazy or off",
        )
        _require(number >= 1, "num_threads", number, "a forward needs a thread", "give a number >= 1")
        _require_few(number, "num_threads", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How KV memory is cut up."""

    num_blocks: int | None
    """Blocks with the null block among them; None until the cache is sized."""
    memory_fraction: float
    """Share of the free device memory that the caches may take, in (0, 1]."""
    block_tokens: int
    """Tokens of one block."""
    prefix_cache: str = "off"
    """``off``, ``bounded`` or ``exact``: whether prompts reuse cached prefixes, and how lost windows come back."""
    num_checkpoints: int = 0
    """Most states (windows of one sequence) that are kept in host memory for ``exact`` hits."""

    def __post_init__(self) -> None:
        _require(
            self.num_blocks is None or self.num_blocks >= 2,
            "num_blocks",
            self.num_blocks,
            "block 0 is the null block, so a pool needs two",
            "give a number >= 2, or 'auto'",
        )
        _require(
            0 < self.memory_fraction <= 1,
            "memory_fraction",
            self.memory_fraction,
            "it is a share of free device memory, so it lies in (0, 1]",
            "try 0.5 on a CPU, 0.9 on a GPU; lower it if other processes use the memory",
        )
        _require(
            self.block_tokens == BLOCK_TOKENS,
            "block_tokens",
            self.block_tokens,
            f"caches, tables and their sizes are laid out for blocks of {BLOCK_TOKENS} tokens",
            f"leave it out, or give {BLOCK_TOKENS}",
        )
        _require(
            0 <= self.num_checkpoints <= MAX_CHECKPOINTS,
            "prefix_checkpoints",
            self.num_checkpoints,
            "each is a state of a sequence in host memory",
            f"give a number from 0 to {MAX_CHECKPOINTS}",
        )
        _require(
            self.prefix_cache in ("off", "bounded", "exact"),
            "prefix_cache",
            self.prefix_cache,
            "there is no such policy",
            "use off, bounded or exact",
        )
        _require(
            self.num_checkpoints >= 0,
            "prefix_checkpoints",
            self.num_checkpoints,
            "it counts states in host memory",
            "give a number >= 0, or 'auto'",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Drafting and verification."""

    num_tokens: int
    """Most drafts per sequence and step; 0: no speculation."""
    adaptive: bool
    """Choose the number of verified drafts by confidence and cost."""
    sampler: str
    """``gumbel`` or ``rejection``."""
    stops_where_it_does_not_pay: bool = False
    """Compare now and then with steps that do not draft, and stop drafting where those give more tokens per time."""
    temperatures: tuple[float, ...]
    """Of the draft's confidence: none, one for all slots, or one per slot."""
    log_path: Path | None = None
    """Where confidences and what became of them are appended; None: nowhere."""
    cost_dir: Path | None = None
    """Where measured step times are kept; None: nowhere."""
    cost_ttl_s: float = 3600.0
    """Age from which they are measured again."""

    def __post_init__(self) -> None:
        value = self.num_tokens
        _require(
            0 <= value <= MAX_DRAFTS,
            "num_speculative_tokens",
            value,
            "it counts drafts",
            f"give a number from 0 to {MAX_DRAFTS}",
        )
        count = len(self.temperatures)
        _require(
            count in (0, 1) or count >= value,
            "confidence_temperatures",
            self.temperatures,
            f"it has {count} entries for {value} draft tokens",
            "give one number, or one per draft token",
        )
        _require(
            all(temperature > 0 for temperature in self.temperatures),
            "confidence_temperatures",
            self.temperatures,
            "they divide logits",
            "give positive numbers",
        )
        age = self.cost_ttl_s
        _require(age > 0, "cost_cache_ttl_s", age, "nothing is younger than that", "give a positive number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredConfig:
    """What compiling the grammars of structured output may cost."""

    timeout_s: float
    num_workers: int
    cache_bytes: int
    """0 or less keeps every compiled grammar."""
    uses_cache: bool

    def __post_init__(self) -> None:
        value = self.timeout_s
        _require(value > 0, "grammar_timeout_s", value, "a compile takes time", "give a positive number of seconds")
        number = self.num_workers
        _require(number >= 1, "grammar_workers", number, "somebody has to compile", "give a number >= 1")
        _require_few(number, "grammar_workers", "processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Sampling of a request that brings no parameters of its own, and the ids that nobody gets."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    token_blacklist: tuple[tuple[int, int], ...]
    """Inclusive ranges of ids that are never generated."""

    def __post_init__(self) -> None:
        value: float = self.temperature
        _require(
            0 <= value <= FLOAT32_MAX,
            "default_temperature",
            value,
            "it divides float32 logits",
            f"give a number from 0 (greedy) to {FLOAT32_MAX:g}",
        )
        value = self.top_p
        _require(0 < value <= 1, "default_top_p", value, "it is a share of probability", "give a number in (0, 1]")
        value = self.top_k
        _require(value == -1 or value >= 1, "default_top_k", value, "it counts tokens", "give -1 for all, or >= 1")
        value = self.max_tokens
        _require(value >= 1, "default_max_tokens", value, "a request generates a token", "give a number >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What the engine says about itself while it runs."""

    logging_interval_steps: int
    """Steps between two lines of statistics; 0 or less: none."""
    disable_log_stats: bool

    @property
    def logs_statistics(self) -> bool:
        return self.logging_interval_steps > 0 and not self.disable_log_stats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that is decided before the engine starts. Each component is handed its own branch."""

    model: ModelSource
    device: DeviceConfig
    numerics: str
    """``faithful``: roundings where the model has them. ``float32``: none, for comparisons with float oracles."""
    seed: int
    scheduler: SchedulerConfig
    prefill: PrefillConfig
    speculation: SpeculationConfig
    batch_invariant: bool
    structured: StructuredConfig
    cache: CacheConfig
    sampling: SamplingConfig
    observe: ObserveConfig
