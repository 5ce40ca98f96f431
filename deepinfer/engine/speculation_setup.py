"""Sampler, verifier and draft as the configuration asks for them, and the cost of a step as this machine has it."""

from __future__ import annotations

import time
from pathlib import Path

from deepinfer.config.engine import EngineConfig
from deepinfer.messages import Chunk, StepPlan
from deepinfer.sampling.batch import SamplingBatchBuilder
from deepinfer.sampling.sampler import Sampler
from deepinfer.speculative.cost_refinement import RefinedCost
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
        temperatures = confidence_temperatures(config)
        builder = SamplingBatchBuilder(vocab, device=device)
        drafter = Drafter(runner.draft, runner, num_drafts, temperatures, draft_sampler, builder)
    return Worker(runner, verifier, SamplingBatchBuilder(vocab, device=device), slots, drafter)


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


def measure_step_cost(config: EngineConfig, runner: ModelRunner) -> RefinedCost:
    """Time forwards of rising size. They run in the null block and slot, so no sequence notices."""
    most = config.scheduler.max_num_seqs * (1 + config.speculation.num_tokens)
    sizes, size = [], 1
    while size < min(most, _LARGEST_MEASURED_STEP):
        sizes.append(size)
        size *= 2
    sizes.append(min(most, _LARGEST_MEASURED_STEP))
    per_sequence = 1 + config.speculation.num_tokens

    def run(num_rows: int) -> float:
        counts = [min(per_sequence, num_rows - start) for start in range(0, num_rows, per_sequence)]
        chunks = tuple(Chunk(str(place), 0, (0,) * count, (), (0,), 0, 1, True) for place, count in enumerate(counts))
        begin = time.perf_counter()
        runner.run(StepPlan(0, chunks))
        return time.perf_counter() - begin

    # Without graphs a step has exactly its rows.
    return RefinedCost(CostTable.measure(sizes, run, is_staircase=False))
