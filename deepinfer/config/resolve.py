"""Raw arguments and variables in, one checked :class:`EngineConfig` out, with a reason for every choice we made.

An argument beats a variable, a variable beats the default.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepinfer.config.engine import (
    BLOCK_TOKENS,
    MAX_CHECKPOINTS,
    MAX_DRAFTS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelSource,
    ObserveConfig,
    SamplingConfig,
    SpeculationConfig,
    StructuredConfig,
)
from deepinfer.config.env import Environment
from deepinfer.config.layer_slice import model_config_of
from deepinfer.config.model import ModelConfig
from deepinfer.config.options import AUTO, FOREIGN, OPTIONS, Option
from deepinfer.config.prefill import PrefillConfig, check_truncation
from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.config.values import check_value, nearest
from deepinfer.errors import ConfigError
from deepinfer.platforms.selection import passed_over, select_platform

logger = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 4096
DEFAULT_STEP_TOKENS = 2048
SMALL_WIDTH = 512
"""Channels up to which one thread computes a model: measured, a second one gave 6 % in decode and 13 % in prefill, and
cost a factor where another process used its processor."""
MIN_BACKTRACKING = 6
"""Tokens that the window rings have to spare, at least: draft length + 1 when that is more (spec 5.2)."""

_OPTION_OF = {name: option for option in OPTIONS for name in (option.name, *option.aliases)}
_FOREIGN_OF = {argument.name: argument for argument in FOREIGN}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a field has the value that it has, when the caller did not say so."""

    field: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value} ({self.why})"


class Resolved(NamedTuple):
    """Result of :func:`resolve`; unpacks as ``config, reasons``."""

    config: EngineConfig
    reasons: tuple[Reason, ...]


def resolve(args: Mapping[str, Any], env: Environment) -> Resolved:
    """Check all engine arguments and work out those that were left to us. Logs warnings and reasons.

    ``cache.num_blocks`` stays None unless it was given: how many blocks fit is known only when the model's numbers
    and the free memory are (:func:`deepinfer.config.cache_size.size_cache`).

    Args:
        args: engine arguments by name or alias (:data:`OPTIONS`); None means not given, texts are parsed.
        env: the variables, from :func:`deepinfer.config.env.read_environment`.
    Raises:
        ConfigError: an unknown argument, a value out of range, or two values that contradict each other.
        CheckpointFileError: the model directory or its ``config.json`` does not exist.
    """
    for warning in env.warnings:
        logger.warning("%s", warning)
    given = _given(args)
    reasons: list[Reason] = []
    values: dict[str, Any] = {}
    for option in OPTIONS:
        values[option.name] = _value(option, given, env, reasons)
    model = _model_source(values, reasons)
    model_config = model_config_of(model)
    device = _device(values, model_config, reasons)
    if values["numerics"] == "fast" and device.platform != "nvidia":
        raise ConfigError(
            "numerics is 'fast'",
            why=f"the coarser products exist on NVIDIA GPUs only, and this engine runs on {device.platform}",
            fix="leave numerics at faithful",
        )
    speculation = _speculation(values, model_config, reasons)
    prefill = _prefill(values, model_config, speculation.num_tokens)
    scheduler = _scheduler(values, model_config, speculation.num_tokens, reasons)
    config = EngineConfig(
        model=model,
        device=device,
        numerics=values["numerics"],
        seed=values["seed"],
        scheduler=scheduler,
        speculation=speculation,
        batch_invariant=values["batch_invariant"],
        structured=StructuredConfig(
            timeout_s=values["grammar_timeout_s"],
            num_workers=values["grammar_workers"],
            cache_bytes=values["grammar_cache_bytes"],
            uses_cache=values["grammar_cache"],
        ),
        prefill=prefill,
        cache=_cache(values, device, reasons),
        sampling=_sampling(values, model_config),
        observe=ObserveConfig(
            logging_interval_steps=values["logging_interval_steps"], disable_log_stats=values["disable_log_stats"]
        ),
    )
    for reason in reasons:
        logger.info("%s", reason)
    return Resolved(config, tuple(reasons))


def _given(args: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Option name to (name as written, raw value). None is dropped; arguments of other engines are checked, dropped."""
    given: dict[str, tuple[str, Any]] = {}
    for name, value in args.items():
        if name in _FOREIGN_OF:
            _check_foreign(name, value)
            continue
        option = _OPTION_OF.get(name)
        if option is None:
            similar = nearest(name, [*_OPTION_OF, *_FOREIGN_OF])
            raise ConfigError(
                f"unknown engine argument {name!r}",
                why="no option has this name",
                fix=f"did you mean {similar!r}?" if similar else "see docs/configuration.md for the options",
            )
        if value is None:
            continue
        if option.name in given:
            raise ConfigError(
                f"both {given[option.name][0]!r} and {name!r} are given", why="they name one option", fix="drop one"
            )
        given[option.name] = (name, value)
    return given


def _check_foreign(name: str, value: Any) -> None:
    argument = _FOREIGN_OF[name]
    if value is not None and not any(value == accepted for accepted in argument.accepted):
        accepted = " or ".join(repr(item) for item in argument.accepted)
        raise ConfigError(
            f"engine argument {name} is {value!r}",
            why=f"not supported: {argument.note}",
            fix=f"leave it out, or give {accepted}",
        )


def _value(option: Option, given: Mapping[str, tuple[str, Any]], env: Environment, reasons: list[Reason]) -> Any:
    """The option's typed value: AUTO stays AUTO, for the functions below to work out."""
    if option.name in given:
        source, raw = given[option.name]
    elif option.name in env.options:
        source, raw = env.options[option.name]
    else:
        return option.default
    if option.default == AUTO and raw == AUTO:
        return AUTO
    try:
        value = check_value(option.kind, raw)
    except ValueError as error:
        raise ConfigError(f"{source} is {raw!r}", why=str(error), fix=_hint(option)) from error
    if option.choices and value not in option.choices:
        raise ConfigError(
            f"{source} is {raw!r}", why=f"it is one of {', '.join(option.choices)}", fix="choose one of them"
        )
    if option.name not in given:
        reasons.append(Reason(option.field, value, f"environment variable {source}"))
    return value


def _hint(option: Option) -> str:
    default = "" if option.default is None else f" (default: {option.default})"
    unit = f" in {option.unit}" if option.unit else ""
    return f"give a value of type {option.kind.value}{unit}{default}"


def _model_source(values: Mapping[str, Any], reasons: list[Reason]) -> ModelSource:
    path = values["model"]
    if path is None:
        raise ConfigError(
            "no model is given",
            why="the engine needs a checkpoint directory",
            fix="pass model=DIRECTORY or set DEEPINFER_HF_MODEL_DIR; the small model of the package is "
            "model=deepinfer.entrypoints.default_model.default_model()",
        )
    tokenizer = values["tokenizer"]
    if tokenizer == AUTO:
        tokenizer = path if path.is_dir() else path.parent
        reasons.append(Reason("model.tokenizer_path", tokenizer, "the model directory"))
    return ModelSource(
        path=path, tokenizer_path=tokenizer, load_format=values["load_format"], num_layers=values["num_layers"]
    )


def _device(values: Mapping[str, Any], model: ModelConfig, reasons: list[Reason]) -> DeviceConfig:
    wanted = values["accelerator"]
    platform = select_platform(None if wanted == AUTO else wanted)
    if wanted == AUTO:
        others = "; ".join(f"not {name}: {why}" for name, why in passed_over(platform).items())
        reasons.append(Reason("device.platform", platform.name, others or "the best platform that is available"))
    num_threads = values["num_threads"]
    if num_threads == AUTO:
        num_threads, why = platform.num_threads(), "torch's choice, within the processors we may use"
        width = model.text.hidden_size
        if width <= SMALL_WIDTH:
            num_threads, why = 1, f"a model of width {width} gains little from more, and they stall on a busy machine"
        reasons.append(Reason("device.num_threads", num_threads, why))
    return DeviceConfig(platform=platform.name, num_threads=num_threads, graphs=values["cuda_graphs"])


def _scheduler(
    values: Mapping[str, Any], model: ModelConfig, num_drafts: int, reasons: list[Reason]
) -> SchedulerConfig:
    limit = model.text.max_position_embeddings
    max_model_len = values["max_model_len"]
    if max_model_len == AUTO:
        max_model_len = min(DEFAULT_MODEL_LEN, limit)
        why = f"min({DEFAULT_MODEL_LEN}, max_position_embeddings {limit})"
        reasons.append(Reason("scheduler.max_model_len", max_model_len, why))
    if not 2 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len is {max_model_len}",
            why=f"a sequence has a prompt and an output token at least, and the model has {limit} positions",
            fix=f"give a number from 2 to {limit}",
        )
    max_num_seqs, chunked = values["max_num_seqs"], values["chunked_prefill"]
    tokens = values["max_num_batched_tokens"]
    if tokens == AUTO:
        tokens = max(DEFAULT_STEP_TOKENS, max_num_seqs * (1 + num_drafts), 0 if chunked else max_model_len)
        why = f"max({DEFAULT_STEP_TOKENS}, max_num_seqs {max_num_seqs} * (1 + {num_drafts} drafts)"
        why += ")" if chunked else f", max_model_len {max_model_len} without chunked_prefill)"
        reasons.append(Reason("scheduler.max_num_batched_tokens", tokens, why))
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        chunked_prefill=chunked,
        decoder_keep_tokens=values["prefill_keep_tokens"] if values["prefill_truncation"] != "off" else 0,
        pipeline_depth=2 if values["async_scheduling"] else 1,
        num_speculative_tokens=num_drafts,
    )


def _speculation(values: Mapping[str, Any], model: ModelConfig, reasons: list[Reason]) -> SpeculationConfig:
    stages, block = model.text.num_nextn_predict_layers, model.text.dspark_block_size
    number = values["num_speculative_tokens"]
    # The rejection sampler's output depends on where steps begin, so nothing but the caller may decide about them.
    is_free = number == AUTO and values["sampler"] == "gumbel"
    if number == AUTO:
        number = min(block, MAX_DRAFTS) if stages else 0
        why = "the model has no draft"
        if stages:
            why = "the draft's block size" + (", and none where drafting does not pay" if is_free else "")
        reasons.append(Reason("speculation.num_tokens", number, why))
    elif number > 0 and not stages:
        raise ConfigError(
            f"num_speculative_tokens is {number}", why="this model has no draft stages", fix="use 0, or leave it out"
        )
    elif number > block:
        logger.warning("num_speculative_tokens = %d is more than the block of %d that was trained", number, block)
    return SpeculationConfig(
        num_tokens=number,
        adaptive=values["adaptive_verification"],
        sampler=values["sampler"],
        stops_where_it_does_not_pay=values["adaptive_verification"] or is_free,
        temperatures=tuple(values["confidence_temperatures"]),
        log_path=values["confidence_log"],
        cost_dir=values["cost_cache_dir"],
        cost_ttl_s=values["cost_cache_ttl_s"],
    )


def _cache(values: Mapping[str, Any], device: DeviceConfig, reasons: list[Reason]) -> CacheConfig:
    fraction = values["memory_fraction"]
    if fraction == AUTO:
        on_cpu = device.platform == "cpu"
        fraction = 0.5 if on_cpu else 0.9
        why = "a CPU's memory also holds the files of the checkpoint" if on_cpu else "the device is ours"
        reasons.append(Reason("cache.memory_fraction", fraction, why))
    num_blocks = values["num_blocks"]
    return CacheConfig(
        num_blocks=None if num_blocks == AUTO else num_blocks,
        memory_fraction=fraction,
        block_tokens=BLOCK_TOKENS if values["block_tokens"] == -1 else values["block_tokens"],
        prefix_cache=values["prefix_cache"],
        num_checkpoints=_num_checkpoints(values, reasons),
    )


def _num_checkpoints(values: Mapping[str, Any], reasons: list[Reason]) -> int:
    number: int | str = values["prefix_checkpoints"]
    if values["prefix_cache"] == "off":
        return 0
    if number == AUTO:
        number = min(4 * values["max_num_seqs"], MAX_CHECKPOINTS)
        why = f"4 * max_num_seqs, up to {MAX_CHECKPOINTS}: a few turns of every conversation"
        reasons.append(Reason("cache.num_checkpoints", number, why))
    return int(number)


def _prefill(values: Mapping[str, Any], model: ModelConfig, num_drafts: int) -> PrefillConfig:
    prefill = PrefillConfig(truncation=values["prefill_truncation"], keep_tokens=values["prefill_keep_tokens"])
    check_truncation(prefill, model.text, max(MIN_BACKTRACKING, num_drafts + 1))
    return prefill


def _sampling(values: Mapping[str, Any], model: ModelConfig) -> SamplingConfig:
    vocab = model.text.vocab_size
    blacklist = values["token_blacklist"]
    for first, last in blacklist:
        if last >= vocab:
            raise ConfigError(
                f"token_blacklist names {first}-{last}",
                why=f"the model has ids 0 to {vocab - 1}",
                fix="correct the range",
            )
    return SamplingConfig(
        temperature=values["default_temperature"],
        top_p=values["default_top_p"],
        top_k=values["default_top_k"],
        max_tokens=values["default_max_tokens"],
        token_blacklist=blacklist,
    )
