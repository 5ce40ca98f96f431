"""From a resolved configuration to a running engine: load, size, wire."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from deepinfer.checkpoint.dummy import DummyCheckpoint
from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.checkpoint.stored import StoredTensor, TensorSource
from deepinfer.config.cache_size import size_cache
from deepinfer.config.engine import EngineConfig
from deepinfer.config.layer_slice import model_config_of
from deepinfer.config.model import ModelConfig
from deepinfer.config.prefill import check_truncation
from deepinfer.config.resolve import Reason
from deepinfer.engine.engine import Engine
from deepinfer.engine.fused_setup import load_fused_runner, not_fused_because, step_shape
from deepinfer.engine.prefix_setup import build_prefix_planner
from deepinfer.engine.speculation_setup import build_worker, step_cost
from deepinfer.engine.verification_planner import VerificationPlanner
from deepinfer.errors import CheckpointFileError
from deepinfer.kvcache.block_pool import BlockPool
from deepinfer.kvcache.memory_plan import bytes_beside_context, step_reserves
from deepinfer.kvcache.sizing import MAX_BACKTRACKING, cache_sizes
from deepinfer.kvcache.state_slots import StateSlots
from deepinfer.layers.caches import CacheGeometry
from deepinfer.models.deepseek_v41 import DeepseekV41
from deepinfer.models.dspark import DSpark
from deepinfer.ops.numerics import Numerics
from deepinfer.ops.registry import Ops
from deepinfer.ops.selection import parse_pins, select_ops
from deepinfer.platforms.selection import select_platform
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.tokenizer.compressed_vocab import CompressedVocab, load_compressed_vocab
from deepinfer.tokenizer.tokenizer import Tokenizer
from deepinfer.worker.model_runner import ModelRunner
from deepinfer.worker.slot_state import SlotState

logger = logging.getLogger(__name__)


class _ProgressSource:
    """A checkpoint that shows how much of it was read, in bytes and GB/s."""

    def __init__(self, source: TensorSource, show: bool) -> None:
        self._source = source
        self._bar = tqdm(total=_dense_bytes(source), unit="B", unit_scale=True, desc="weights", disable=not show)
        self._begin = time.perf_counter()
        self._num_bytes = 0

    def tensor(self, name: str) -> StoredTensor:
        found = self._source.tensor(name)
        self._bar.update(found.num_bytes)
        self._num_bytes += found.num_bytes
        return found

    def engram_table(self, layer_id: int) -> Any:
        return self._source.engram_table(layer_id)

    def close(self) -> None:
        self._bar.close()
        elapsed_s = max(time.perf_counter() - self._begin, 1e-9)
        size = self._num_bytes / 1e9
        logger.info("loaded %.3f GB in %.2f s (%.2f GB/s)", size, elapsed_s, size / elapsed_s)


def _dense_bytes(source: TensorSource) -> int:
    return sum(spec.num_bytes for spec in source.specs.values() if not spec.name.endswith("engram.embed.weight"))


def load_tokenizer(config: EngineConfig, model_config: ModelConfig) -> Tokenizer | None:
    """The checkpoint's tokenizer; None for dummy weights without one (then only token ids are served)."""
    try:
        return Tokenizer.from_directory(config.model.tokenizer_path, model_config)
    except CheckpointFileError:
        if config.model.load_format == "dummy":
            logger.warning("no tokenizer in %s: serving token ids only", config.model.tokenizer_path)
            return None
        raise


def open_weights(config: EngineConfig, model_config: ModelConfig) -> TensorSource:
    """The tensors of the text model and, for speculation, of the draft: from the checkpoint, or synthetic ones."""
    parts = ("text", "draft") if config.speculation.num_tokens else ("text",)
    if config.model.load_format == "dummy":
        return DummyCheckpoint(model_config, config.seed, parts=parts)
    return open_checkpoint(config.model.path, parts=parts, config=model_config)


def num_state_slots(max_num_seqs: int) -> int:
    """State slots that an engine makes: one per running sequence, a fifth to spare, and the null slot."""
    return max_num_seqs + max_num_seqs // 5 + 2


def build_engine(
    config: EngineConfig, *, ops_pins: str = "", progress: bool = True
) -> tuple[Engine, tuple[Reason, ...]]:
    """Load the model and make an engine.

    Args:
        config: from :func:`deepinfer.config.resolve.resolve`.
        ops_pins: ``"OP=IMPLEMENTATION,..."``, see :func:`deepinfer.ops.registry.parse_pins`.
        progress: show a bar while weights are loaded.
    Returns:
        the engine, and reasons for what was decided here (the number of blocks).
    Raises:
        CheckpointError, CheckpointFileError: the checkpoint does not fit or is damaged.
        CapacityError: the caches do not fit into memory.
    """
    model_config = model_config_of(config.model)
    platform = select_platform(config.device.platform)
    device = platform.device()
    torch.set_num_threads(config.device.num_threads)
    ops = select_ops(config.device.platform, model_config.text, parse_pins(ops_pins))
    tokenizer = load_tokenizer(config, model_config)
    if tokenizer is None:
        vocab = CompressedVocab.identity(model_config.text.vocab_size)
    else:
        vocab = load_compressed_vocab(tokenizer, model_config.text)
    num_drafts = config.speculation.num_tokens
    refusal, step_bytes = not_fused_because(config, model_config), 0
    if refusal is None:
        step_bytes = bytes_beside_context(step_reserves(model_config.text, step_shape(config)))
        make_runner = load_fused_runner(config, model_config, vocab, device, progress)
    else:
        if config.device.platform == "nvidia":
            logger.warning("running the reference operators on the GPU, which is slow: %s", refusal)
        model, draft = _load_model(config, model_config, vocab, ops, device, progress)
        make_runner = partial(ModelRunner, model_config.text, model, device=device, draft=draft)
    num_slots = num_state_slots(config.scheduler.max_num_seqs)
    backtracking = max(MAX_BACKTRACKING, num_drafts + 1)
    sizes = cache_sizes(model_config, config.numerics, backtracking)
    config, reason = size_cache(
        config,
        bytes_per_block=sizes.block_bytes,
        fixed_bytes=num_slots * sizes.slot_bytes,
        available_bytes=platform.available_memory_bytes(),
        step_bytes=step_bytes,
    )
    assert config.cache.num_blocks is not None
    geometry = CacheGeometry.of(model_config.text, config.cache.num_blocks, num_slots, backtracking)
    is_compact = config.prefill.truncation != "mask"
    check_truncation(config.prefill, model_config.text, backtracking)
    runner = make_runner(geometry=geometry, is_compact=is_compact)
    history_len = model_config.text.engram_max_ngram_size - 1
    pool = BlockPool(config.cache.num_blocks)
    prefix = build_prefix_planner(config, model_config.text, pool, backtracking)
    scheduler = Scheduler(config.scheduler, pool, StateSlots(num_slots), history_len, prefix)
    worker = build_worker(config, runner, SlotState(num_slots, num_drafts, history_len))
    if config.device.graphs == "startup":
        limits = config.scheduler
        worker.prepare(limits.max_num_batched_tokens, limits.decoder_keep_tokens, progress)
        runner.timer.reset()
    planner = None
    if num_drafts and config.speculation.stops_where_it_does_not_pay:
        cost = step_cost(config, runner) if config.speculation.adaptive else None
        planner = VerificationPlanner(cost, runner.timer)
        runner.timer.reset()
    engine = Engine(config, model_config, tokenizer, worker, scheduler, planner)
    return engine, () if reason is None else (reason,)


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    vocab: CompressedVocab,
    ops: Ops,
    device: torch.device,
    progress: bool,
) -> tuple[DeepseekV41, DSpark | None]:
    source = _ProgressSource(open_weights(config, model_config), progress)
    model = DeepseekV41(
        model_config.text,
        source,
        ops,
        Numerics.from_mode(config.numerics),
        torch.tensor(vocab.token_map, dtype=torch.int64),
        vocab.size,
        device,
    )
    draft = DSpark(model, source) if config.speculation.num_tokens else None
    source.close()
    return model, draft
