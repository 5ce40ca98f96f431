"""``deepinfer doctor``: machine, versions, configuration with reasons, memory, operators. What a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform as host
import sys
from collections.abc import Iterable
from typing import Any

import torch

from deepinfer.checkpoint.inspect import summarize_config
from deepinfer.config.cache_size import size_cache
from deepinfer.config.env import read_environment
from deepinfer.config.layer_slice import model_config_of
from deepinfer.config.resolve import Resolved, resolve
from deepinfer.engine.factory import num_state_slots
from deepinfer.engine.fused_setup import not_fused_because
from deepinfer.engine.memory_planning import plan_device_memory
from deepinfer.entrypoints.default_model import describe_model
from deepinfer.entrypoints.engine_args import add_model_arguments, model_arguments
from deepinfer.errors import EngineError
from deepinfer.kvcache.sizing import cache_sizes
from deepinfer.ops.selection import parse_pins, select_ops
from deepinfer.platforms.selection import PREFERENCE, select_platform

_WEIGHT_BYTES = 8
"""The CPU operators keep weights in float64, whatever their stored format is."""

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "deepseek-recipe", "tqdm", "rich")
_OPTIONAL = {
    "triton": "optional: the NVIDIA path needs it",
    "humming-kernels": "optional: routed experts on GPUs where our Hopper kernels do not run",
    "matplotlib": "optional",
    "torch-npu": "optional",
    "pytest": "optional",
    "hypothesis": "optional",
}
"""Package name to what it is for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags: those of the engine, so that its choices can be seen without loading weights."""
    add_model_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Print the report. No weight is read. Exit code 2 when the configuration could not start."""
    _section("Machine", _machine())
    _section("Versions", _versions())
    _section("Environment variables", _environment())
    ok = True
    resolved: Resolved | None = None
    try:
        resolved = resolve(model_arguments(namespace), read_environment())
    except EngineError as error:
        ok = _say_error("Configuration", error)
    if resolved is not None:
        _section("Configuration", _configuration(resolved))
        for title, part in (("Memory", _memory), ("Operators", _operators)):
            try:
                lines = part(resolved, namespace)
            except EngineError as error:
                ok = _say_error(title, error)
            else:
                _section(title, lines)
    print("\nThis configuration can start." if ok else "\nThis configuration can NOT start: see the errors above.")
    return 0 if ok else 2


def _section(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}")
    for line in lines:
        print(f"  {line}")


def _say_error(title: str, error: EngineError) -> bool:
    _section(title, [f"ERROR: {error.what}", f"why: {error.why}", f"fix: {error.fix}"])
    return False


def _machine() -> list[str]:
    lines = [f"system: {host.platform()}"]
    for known in PREFERENCE:
        reason = known.unavailable_because()
        if reason is None:
            lines += [f"{name}: {value}" for name, value in known.facts().items()]
        else:
            lines.append(f"not {known.name}: {reason}")
    return lines


def _versions() -> list[str]:
    lines = [f"python: {sys.version.split()[0]} ({sys.executable})", f"deepinfer: {_version('deepinfer')}"]
    lines += [f"{name}: {_version(name)}" for name in _LIBRARIES]
    lines += [f"{name}: {_version(name)} ({use})" for name, use in _OPTIONAL.items()]
    return lines


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _environment() -> list[str]:
    try:
        environment = read_environment()
    except EngineError as error:
        return [f"ERROR: {error}"]
    lines = [f"{name} sets {option} = {value}" for option, (name, value) in environment.options.items()]
    return lines + [f"warning: {warning}" for warning in environment.warnings] or ["no DEEPINFER_* variable has effect"]


def _configuration(resolved: Resolved) -> list[str]:
    reasons = {reason.field: reason.why for reason in resolved.reasons}
    lines = [f"model: {describe_model(resolved.config.model.path)}"]
    for field, value in _leaves(resolved.config):
        why = f"  ({reasons[field]})" if field in reasons else ""
        lines.append(f"{field} = {'auto' if value is None and field == 'cache.num_blocks' else value}{why}")
    return lines


def _leaves(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every field of a tree of dataclasses."""
    found = []
    for name in config.__dataclass_fields__:
        value = getattr(config, name)
        if hasattr(value, "__dataclass_fields__"):
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _memory(resolved: Resolved, namespace: argparse.Namespace) -> list[str]:
    config = resolved.config
    model = model_config_of(config.model)
    if not_fused_because(config, model) is None:
        available = select_platform(config.device.platform).available_memory_bytes()
        plan = plan_device_memory(config, model, available)
        return [*plan.lines(), "(as of now; an engine looks at the free memory after it has loaded the weights)"]
    sizes = cache_sizes(model, config.numerics)
    available = select_platform(config.device.platform).available_memory_bytes()
    weights = summarize_config(model).backbone.num_parameters * _WEIGHT_BYTES
    num_slots = num_state_slots(config.scheduler.max_num_seqs)
    sized, reason = size_cache(
        config,
        bytes_per_block=sizes.block_bytes,
        fixed_bytes=num_slots * sizes.slot_bytes,
        available_bytes=available,
    )
    num_blocks = sized.cache.num_blocks or 0
    total = num_slots * sizes.slot_bytes + num_blocks * sizes.block_bytes
    verdict = "" if weights + total <= available else ": NOT enough together with the caches, loading will fail"
    return [
        f"weights of the text model in float64: {weights:,} bytes",
        f"free memory: {available:,} bytes{verdict}",
        *sizes.explain().splitlines(),
        f"state slots: {num_slots} x {sizes.slot_bytes:,} = {num_slots * sizes.slot_bytes:,} bytes",
        f"KV blocks: {num_blocks} x {sizes.block_bytes:,} = {num_blocks * sizes.block_bytes:,} bytes",
        f"caches together: {total:,} bytes",
        f"why so many blocks: {'given' if reason is None else reason.why}",
        "(free memory is as of now; an engine looks after it has loaded the weights)",
    ]


def _operators(resolved: Resolved, namespace: argparse.Namespace) -> list[str]:
    model = model_config_of(resolved.config.model)
    ops = select_ops(resolved.config.device.platform, model.text, parse_pins(namespace.ops))
    lines = []
    if resolved.config.device.platform == "nvidia":
        refusal = not_fused_because(resolved.config, model)
        if refusal is None:
            return ["the fused kernels (docs/nvidia.md) instead of single operators"]
        lines.append(f"no fused kernels: {refusal}")
    lines += [f"{choice.op}: {choice.implementation} ({choice.reason})" for choice in ops.explain()]
    return [*lines, f"torch threads: {torch.get_num_threads()} now, {resolved.config.device.num_threads} in the engine"]
