"""Every ``DEEPINFER_*`` variable: one table, and the one place that reads the process environment.

Names and meanings are those that users of the vendor's engine know (engine spec 1.10, class U), and our own for the
options of :mod:`deepinfer.config.options`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.config.options import AUTO
from deepinfer.config.values import Kind, nearest, parse_text
from deepinfer.errors import ConfigError

PREFIX = "DEEPINFER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable. Either it fills an option, or it is recognised and not yet used."""

    name: str
    """Without the prefix."""
    kind: Kind
    help: str
    default: str
    """As one would write it, or ``unset``."""
    option: str | None = None
    """Name of the option that it fills; None while its feature does not exist here."""
    means: Mapping[Any, Any] | None = None
    """The option's value by this variable's, where their types differ; a value that is not in it says nothing."""
    choices: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    """Values of an unused variable that ask for what this engine does anyway, so that nobody needs a warning."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def is_used(self) -> bool:
        return self.option is not None


@dataclass(frozen=True, slots=True)
class Environment:
    """What the variables say, parsed. Reading it again is not needed: pass this object on."""

    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Option name to (full variable name, value)."""
    warnings: tuple[str, ...] = ()


def _used(name: str, option: str, kind: Kind, help: str, default: str = "unset", **more: Any) -> Variable:
    return Variable(name=name, option=option, kind=kind, help=help, default=default, **more)


def _unused(name: str, kind: Kind, default: str, help: str, **more: Any) -> Variable:
    return Variable(name=name, kind=kind, default=default, help=help, **more)


VARIABLES: tuple[Variable, ...] = (
    _used("ACCELERATOR", "accelerator", Kind.STR, "What to run on; build.sh reads it too. Unset: detect."),
    _used("HF_MODEL_DIR", "model", Kind.PATH, "Local checkpoint directory."),
    _used("NUMERICS", "numerics", Kind.STR, "Numerics mode.", "faithful"),
    _used("NUM_THREADS", "num_threads", Kind.INT, "Host threads of one forward.", "auto"),
    _used("MAX_NUM_SEQS", "max_num_seqs", Kind.INT, "Most sequences at the same time.", "256"),
    _used("MAX_NUM_BATCHED_TOKENS", "max_num_batched_tokens", Kind.INT, "Most rows of one step.", "auto"),
    _used("MAX_MODEL_LEN", "max_model_len", Kind.INT, "Most tokens of one sequence.", "auto"),
    _used("NUM_BLOCKS", "num_blocks", Kind.INT, "Blocks of KV memory.", "auto"),
    _used("MEMORY_FRACTION", "memory_fraction", Kind.FLOAT, "Share of free memory for the caches.", "auto"),
    _used("DECODE_TOKEN_BLACKLIST", "token_blacklist", Kind.ID_RANGES, "Ids that are never generated.", "empty"),
    _used("LOGGING_INTERVAL_STEP", "logging_interval_steps", Kind.INT, "Steps between statistics lines.", "100"),
    _used("USE_NEXTN_DECODE", "num_speculative_tokens", Kind.INT, "Most draft tokens per step; 0: none.", "auto"),
    _used("ENABLE_MTP_VARLEN", "adaptive_verification", Kind.BOOL, "Verify by confidence and cost.", "0"),
    _used(
        "DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
        "confidence_temperatures",
        Kind.FLOATS,
        "Calibration of the draft's confidence: one number, or one per draft token.",
    ),
    _used(
        "CUDA_GRAPHS",
        "cuda_graphs",
        Kind.STR,
        "When CUDA graphs are captured: startup, lazy or off.",
        "startup",
        choices=("startup", "lazy", "off"),
    ),
    _used("ENFORCE_EAGER", "cuda_graphs", Kind.BOOL, "No CUDA graphs.", "0", means={True: "off"}),
    _used("BATCH_INVARIANT", "batch_invariant", Kind.BOOL, "Results that do not depend on the batch.", "0"),
    _used("ZERO_OVERHEAD_SCHEDULING", "async_scheduling", Kind.BOOL, "Launch a step while one runs.", "1"),
    _used("PREFIX_CACHE", "prefix_cache", Kind.STR, "Policy of the prefix cache: off, bounded or exact.", "exact"),
    _used(
        "YOCO_PREFILL_TRUNCATION_MODE",
        "prefill_truncation",
        Kind.STR,
        "Skip the decoder half of the model for all but the end of a prompt.",
        "off",
        choices=("off", "mask", "compact"),
    ),
    _used(
        "YOCO_PREFILL_KEEP_TOKENS", "prefill_keep_tokens", Kind.INT, "Prompt tokens that keep the decoder half.", "0"
    ),
    _unused("OVERRIDE_NUM_EXTRA_EXPERTS", Kind.INT, "0", "Redundant experts for load balance.", harmless=(0,)),
    _unused("EXPERT_REARRANGEMENT_STEP_INTERVAL", Kind.INT, "0", "Steps between rebalancings.", harmless=(0,)),
    _unused("ENGRAM_FORCE_GPU_STORAGE", Kind.BOOL, "0", "N-gram tables in device memory.", harmless=(False,)),
    _unused("JIT_CACHE_DIR", Kind.PATH, "unset", "Where compiled kernels are kept."),
    _used("DECODE_PERF_CACHE_DIR", "cost_cache_dir", Kind.PATH, "Where measured step times are kept."),
    _used("DECODE_PERF_CACHE_TTL_SEC", "cost_cache_ttl_s", Kind.FLOAT, "Seconds that they stay valid.", "3600"),
    _used("XGRAMMAR_TIMEOUT", "grammar_timeout_s", Kind.FLOAT, "Seconds that a grammar may compile.", "20"),
    _used("SO_BUILDER_CPUS", "grammar_workers", Kind.INT, "Processes that compile grammars.", "2"),
    _used("XGRAMMAR_CACHE_LIMIT_BYTES", "grammar_cache_bytes", Kind.INT, "Grammars that are kept.", "1073741824"),
)

# Tuning and debugging knobs of the vendor's engine (engine spec 1.10, classes T and I) with no counterpart here.
WITHOUT_COUNTERPART: frozenset[str] = frozenset(
    """
    EXPERT_COUNT_WINDOW_SIZE REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE REARRANGE_P2P_GROUPS
    CUDAGRAPH_BATCH_SIZE_INTERVAL DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL DFLASH_ENFORCE_EAGER PREFILL_ATTEMPT_INTERVAL
    PREFILL_ANY_ATTEMPT_INTERVAL PREFILL_MAX_SUM_SEQLEN_K INDEX_ATTN_MEMORY_LIMIT MAX_BACKTRACKING_TOKENS
    NUM_STATE_SLOTS_RATIO PREFILL_STORE_EXTRA_STATE PREFILL_STORE_EXTRA_SIZE SAMPLER_FORCE_TOPK
    COMPUTE_SUM_SMALLER_PROBS XGRAMMAR_DISABLE_CACHE XGRAMMAR_DEBUG
    USE_MULTIMODAL_POOL MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT NCCL_NUM_SMS
    USERBUFFER_COMM_SMS GLOO_TIMEOUT ENGRAM_PAD_TOKEN MOE_LB_STAT_INTERVAL FORCE_IMBALANCE_RATIO FORCE_LOAD_BALANCE
    SHOW_EPLB_DETAIL NCCL_MEMORY_SAMPLE_INTERVAL_STEPS RINGBUFFER_WARNING_INTERVAL GC_INTERVAL_STEP
    DISABLE_SYNC_GUARD PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING PROFILE_HTTP_ENABLE PROFILE_HTTP_PORT_BASE
    TORCH_PROFILER_DIR
    """.split()  # noqa: SIM905 - as a list literal it would take 43 lines
)

_BY_NAME = {variable.full_name: variable for variable in VARIABLES}


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Parse all ``DEEPINFER_*`` variables; anything else is left alone.

    Args:
        variables: names to texts; the process environment when None.
    Raises:
        ConfigError: a variable holds a value that its type or its choices do not allow, or two contradict each other.
    """
    if variables is None:
        variables = os.environ
    options: dict[str, tuple[str, Any]] = {}
    warnings = []
    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        variable = _BY_NAME.get(name)
        if variable is None:
            warnings.append(_unknown(name))
            continue
        text = variables[name]
        if not text.strip() and variable.kind is not Kind.BOOL:
            continue  # VAR= in a shell unsets it, as far as its user is concerned
        value = _parse(variable, text)
        if variable.option is not None:
            _put(options, variable, value)
        elif value not in variable.harmless:
            warnings.append(f"{name}={text} is recognised but not yet used: {variable.help}")
    return Environment(options, tuple(warnings))


def _put(options: dict[str, tuple[str, Any]], variable: Variable, value: Any) -> None:
    """Fill the variable's option, unless the value says nothing about it."""
    assert variable.option is not None, variable.name
    if variable.means is not None:
        if value not in variable.means:
            return
        value = variable.means[value]
    other, known = options.get(variable.option, (variable.full_name, value))
    if known != value:
        raise ConfigError(
            f"environment variables {other} and {variable.full_name} contradict each other",
            why=f"they ask for {variable.option} {known!r} and {value!r}",
            fix="unset one of them",
        )
    options[variable.option] = (other, value)


def _parse(variable: Variable, text: str) -> Any:
    if text.strip() == AUTO and variable.default == AUTO:
        return AUTO
    try:
        value = parse_text(variable.kind, text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {variable.full_name} is {text!r}",
            why=str(error),
            fix=f"correct it, or unset it (default: {variable.default})",
        ) from error
    if variable.choices and value not in variable.choices:
        names = ", ".join(variable.choices)
        raise ConfigError(
            f"environment variable {variable.full_name} is {text!r}",
            why=f"it is one of {names}",
            fix="choose one of them",
        )
    return value


def _unknown(name: str) -> str:
    bare = name.removeprefix(PREFIX)
    if bare in WITHOUT_COUNTERPART:
        return f"{name} tunes a part of the vendor's engine that this engine does not have; it has no effect"
    similar = nearest(bare, [variable.name for variable in VARIABLES])  # the prefix alone would make all names alike
    hint = f"did you mean {PREFIX}{similar}?" if similar else "see docs/configuration.md for the known ones"
    return f"unknown environment variable {name} has no effect; {hint}"


def user_cache_dir(variables: Mapping[str, str] | None = None) -> Path:
    """Where to keep files that can be made again: ``$XDG_CACHE_HOME/deepinfer`` or ``~/.cache/deepinfer``.

    Args:
        variables: names to texts; the process environment when None.
    """
    home = (os.environ if variables is None else variables).get("XDG_CACHE_HOME", "").strip()
    return (Path(home) if home else Path("~/.cache").expanduser()) / "deepinfer"
