"""Sampler, verifier and draft as the configuration asks for them, and the cost of a step as this machine has it."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.fused_setup import samples_in_graphs
from deepinfer.messages import Chunk, StepPlan
from deepinfer.models.dspark import DSpark
from deepinfer.platforms.selection import select_platform
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculative.confidence_log import ConfidenceLog
from deepinfer.speculative.cost_refinement import RefinedCost
from deepinfer.speculative.cost_store import CostStore, cost_key
from deepinfer.speculative.cost_table import CostTable
from deepinfer.speculative.draft_sampling import CoupledDraftSampler, DraftSampler, IndependentDraftSampler
from deepinfer.speculative.gumbel_verifier import GumbelVerifier
from deepinfer.speculative.rejection_verifier import RejectionVerifier
from deepinfer.speculative.temperatures import check_temperatures, load_temperatures
from deepinfer.speculative.verification import Verifier
from deepinfer.worker.drafter import Drafter
from deepinfer.worker.model_runner import ModelRunner
from deepinfer.worker.slot_state import SlotState
from deepinfer.worker.worker import Worker

if TYPE_CHECKING:
    from deepinfer.worker.sample_step import SampleStep

CALIBRATION_FILE = "dspark_calibration.json"
"""Beside a checkpoint: temperatures of its draft's confidence."""
_LARGEST_MEASURED_STEP = 256


def build_worker(config: EngineConfig, runner: ModelRunner, slots: SlotState) -> Worker:
    """The worker of one device."""
    vocab, device = runner.config.vocab_size, runner.device
    banned = [token for first, last in config.sampling.token_blacklist for token in range(first, last + 1)]
    sampler = Sampler(vocab, banned_ids=banned, device=device)
    num_drafts = config.speculation.num_tokens
    verifier: Verifier = GumbelVerifier(sampler)
    draft_sampler: DraftSampler = CoupledDraftSampler(sampler)
    if config.speculation.sampler == "rejection" and num_drafts:
        verifier, draft_sampler = RejectionVerifier(sampler), IndependentDraftSampler(sampler)
    drafter = None
    if runner.draft is not None:
        drafter = _build_drafter(runner, num_drafts, confidence_temperatures(config), draft_sampler, banned)
    sample_step = _build_sample_step(runner, banned) if runner.graph_sizes and samples_in_graphs(config) else None
    return Worker(runner, verifier, SamplingBatchBuilder(vocab, device=device), slots, drafter, sample_step)


def _build_sample_step(runner: ModelRunner, banned: Sequence[int]) -> SampleStep:
    """For a runner whose forwards are graphs."""
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.worker.fused_runner import FusedRunner
    from deepinfer.worker.sample_step import SampleStep

    assert isinstance(runner, FusedRunner)
    return SampleStep(runner, DeviceChoice(runner.config.vocab_size, banned, runner.device))


def _build_drafter(
    runner: ModelRunner, num_drafts: int, temperatures: Sequence[float], sampler: DraftSampler, banned: Sequence[int]
) -> Drafter:
    vocab, device = runner.config.vocab_size, runner.device
    batches = SamplingBatchBuilder(vocab, device=device)
    if isinstance(runner.draft, DSpark):
        return Drafter(runner.draft, runner, num_drafts, temperatures, sampler, batches)
    # Triton is imported with these, and it is there where the fused draft is.
    from deepinfer.sampling.device_choice import DeviceChoice
    from deepinfer.worker.fused_drafter import FusedDrafter
    from deepinfer.worker.fused_runner import FusedRunner

    assert isinstance(runner, FusedRunner)
    choice = DeviceChoice(vocab, banned, device)
    return FusedDrafter(runner, num_drafts, temperatures, sampler, batches, choice)


def confidence_temperatures(config: EngineConfig) -> tuple[float, ...]:
    """One per draft: as configured, else from the file beside the checkpoint, else 1.

    Raises:
        ConfigError: a list of the wrong length or a value that can't be one.
    """
    num_drafts = config.speculation.num_tokens
    given = config.speculation.temperatures
    if given:
        return check_temperatures(given if len(given) == 1 else given[:num_drafts], num_drafts)
    file = Path(config.model.path) / CALIBRATION_FILE
    if file.is_file():
        return load_temperatures(file, num_drafts)
    return (1.0,) * num_drafts


def confidence_log(config: EngineConfig) -> ConfidenceLog | None:
    """The log that was asked for, opened. Raises ConfigError if it can't be."""
    path = config.speculation.log_path
    if path is None or config.speculation.num_tokens == 0:
        return None
    return ConfidenceLog(path, confidence_temperatures(config))


def step_cost(config: EngineConfig, runner: ModelRunner) -> RefinedCost:
    """What a step takes: from the directory of earlier starts if it is configured and has it, else measured."""
    sizes = _measured_sizes(config, runner.graph_sizes)
    if config.speculation.cost_dir is None:
        return RefinedCost(measure_step_cost(config, runner, sizes))
    store = CostStore(config.speculation.cost_dir, config.speculation.cost_ttl_s)
    key = cost_key(_cost_facts(config, runner, sizes))
    table = store.load(key)
    if table is None:
        table = measure_step_cost(config, runner, sizes)
        store.save(key, table)
    return RefinedCost(table)


def _cost_facts(config: EngineConfig, runner: ModelRunner, sizes: Sequence[int]) -> dict[str, Any]:
    """All that step times depend on."""
    facts = select_platform(config.device.platform).facts()
    return {
        "platform": {name: value for name, value in facts.items() if name != "available memory"},
        "processor": platform.processor() or platform.machine(),
        "host": platform.node(),
        "num_threads": config.device.num_threads,
        "engine_version": version("deepinfer"),
        "model": hashlib.sha256(repr(runner.config).encode()).hexdigest(),
        "numerics": config.numerics,
        "num_drafts": config.speculation.num_tokens,
        "ops": [f"{choice.op}={choice.implementation}" for choice in runner.model.ops.explain()],
        "sizes": list(sizes),
        "is_staircase": bool(runner.graph_sizes),
        "graphs": config.device.graphs,
        "batch_invariant": config.batch_invariant,
        "world_size": 1,
    }


def _measured_sizes(config: EngineConfig, graph_sizes: Sequence[int]) -> list[int]:
    """Rows whose time is measured: those of the graphs, else powers of two and the largest verification step."""
    if graph_sizes:
        return sorted(graph_sizes)
    limits = config.scheduler
    largest = limits.max_num_seqs * (1 + config.speculation.num_tokens)
    largest = min(largest, limits.max_num_batched_tokens, _LARGEST_MEASURED_STEP)
    return [*(2**power for power in range(largest.bit_length()) if 2**power < largest), largest]


def measure_step_cost(config: EngineConfig, runner: ModelRunner, sizes: Sequence[int]) -> CostTable:
    """Time forwards of these numbers of rows, logits included, in the null block and slot that no sequence uses."""
    per_sequence = 1 + config.speculation.num_tokens

    def run(num_rows: int) -> float:
        counts = [min(per_sequence, num_rows - start) for start in range(0, num_rows, per_sequence)]
        chunks = tuple(Chunk(str(place), 0, (0,) * count, (), (0,), 0, 1, True) for place, count in enumerate(counts))
        begin = time.perf_counter()
        runner.run(StepPlan(0, chunks)).row_logits(slice(None))
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        return time.perf_counter() - begin

    # A graph has always the same rows, some of them padding; without graphs a step has exactly its own.
    return CostTable.measure(sizes, run, is_staircase=bool(runner.graph_sizes))
