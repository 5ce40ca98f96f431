"""The memory plan of an engine that keeps packed weights on a device, from its configuration alone."""

from __future__ import annotations

from deepinfer.checkpoint.inspect import summarize_config
from deepinfer.checkpoint.tensor_specs import SizeGroup
from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.factory import num_state_slots
from deepinfer.engine.fused_setup import step_shape
from deepinfer.kvcache.memory_plan import MemoryPlan, plan_memory, step_reserves
from deepinfer.kvcache.sizing import MAX_BACKTRACKING, cache_sizes


def plan_device_memory(config: EngineConfig, model: ModelConfig, device_bytes: int) -> MemoryPlan:
    """What the weights, steps, state slots and KV blocks of ``config`` take on a device of ``device_bytes``.

    Weights keep the size that they have in the checkpoint. N-gram tables count as on the host.

    Raises:
        CapacityError: a sequence of ``max_model_len`` does not fit beside the weights; the message has the arithmetic.
    """
    limits, num_drafts = config.scheduler, config.speculation.num_tokens
    left_out = {SizeGroup.ENGRAM_TABLE, SizeGroup.VISION} | (set() if num_drafts else {SizeGroup.DRAFT})
    weights = {
        group.value: size.num_bytes for group, size in summarize_config(model).sizes.items() if group not in left_out
    }
    return plan_memory(
        device_bytes=device_bytes,
        weights=weights,
        reserves=step_reserves(model.text, step_shape(config)),
        sizes=cache_sizes(model, config.numerics, max(MAX_BACKTRACKING, num_drafts + 1)),
        num_slots=num_state_slots(limits.max_num_seqs),
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        fraction=config.cache.memory_fraction,
        num_blocks=config.cache.num_blocks,
    )
