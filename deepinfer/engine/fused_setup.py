"""The fused model of the NVIDIA path: whether it can run what was asked for, and loading it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch

from deepinfer.checkpoint.device_dummy import DeviceDummyCheckpoint
from deepinfer.checkpoint.reader import open_checkpoint
from deepinfer.checkpoint.stored import TensorSource
from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig, TextConfig
from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.kvcache.block_pool import BLOCK_TOKENS
from deepinfer.kvcache.memory_plan import StepShape
from deepinfer.tokenizer.compressed_vocab import CompressedVocab
from deepinfer.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_SMALL_GRAPHS = (1, 2, 4, 8, 16, 24, 32)
_GRAPH_STEP = 16
_PROMPT_GRAPHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""A row of padding reaches no expert, so few sizes do."""
MAX_GRAPH_ROWS = 512
"""Larger steps run launch by launch: there the host is never what they wait for."""
_OLDEST_GPU = (8, 9)
"""Compute capability from which Triton converts to and from e4m3."""


def not_fused_because(config: EngineConfig, model_config: ModelConfig) -> str | None:
    """Why the reference operators run instead; None if the fused kernels can."""
    if config.device.platform != "nvidia":
        return f"the fused kernels are for NVIDIA GPUs, not for the platform {config.device.platform}"
    if config.numerics == "float32":
        return "numerics float32 rounds nowhere, and the fused kernels compute in the model's own formats"
    if not model_config.text.hc_shifted:
        return "the model reads its streams with the sublayer's own mix (hc_shifted is false)"
    misfit = _misfit(model_config.text)
    if misfit is not None:
        return misfit
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _OLDEST_GPU:
        return f"{torch.cuda.get_device_name()} is older than Ada and Hopper, and has no FP8 arithmetic"
    return None


def _misfit(text: TextConfig) -> str | None:
    """A size that the specification allows and the kernels do not take; None if there is none."""
    block, rank = text.candidate_block_size, text.o_lora_rank
    if text.candidate_source_layer_id is not None and block & (block - 1):
        return f"candidate_block_size is {block}, and candidate blocks are selected by powers of two"
    if text.o_groups > 1 and rank % 32:
        return f"o_lora_rank is {rank}: a tile of 32 weights would straddle two of {text.o_groups} output groups"
    return None


def step_shape(config: EngineConfig) -> StepShape:
    """The largest step of an engine, for its memory."""
    limits = config.scheduler
    steps, drafts = captured_sizes(config)
    prompts = prompt_graph_sizes(config)
    return StepShape(
        max_rows=limits.max_num_batched_tokens,
        max_sampled_rows=limits.max_num_seqs * (1 + limits.num_speculative_tokens),
        max_graph_rows=max([*steps, *prompts], default=0),
        num_graphs=len(steps) + len(prompts) + len(drafts),
        num_sampler_graphs=len(steps) if samples_in_graphs(config) else 0,
        max_graph_samples=steps[-1] if steps and samples_in_graphs(config) else 0,
        num_drafts=limits.num_speculative_tokens,
        max_graph_drafts=drafts[-1] if drafts else 0,
        is_fast=config.numerics == "fast",
    )


def samples_in_graphs(config: EngineConfig) -> bool:
    """Whether sampler and acceptance are graphs where the forward is one: of chained steps, without distributions."""
    is_chained = config.scheduler.pipeline_depth > 1
    return is_chained and (config.speculation.sampler != "rejection" or not config.speculation.num_tokens)


def captured_sizes(config: EngineConfig) -> tuple[list[int], list[int]]:
    """Rows of the steps and sequences of the drafts that an engine captures."""
    if config.device.graphs == "off":
        return [], []
    keeps_distributions = config.speculation.sampler == "rejection"  # these have no fixed place, so no graph
    return graph_sizes(config.scheduler), [] if keeps_distributions else draft_graph_sizes(config.scheduler)


def graph_sizes(limits: SchedulerConfig) -> list[int]:
    """Rows of the captured steps: any batch that decodes, with its drafts, padded to the next size."""
    decoding = limits.max_num_seqs * (1 + limits.num_speculative_tokens)
    return _sizes_up_to(min(decoding, MAX_GRAPH_ROWS, limits.max_num_batched_tokens))


def draft_graph_sizes(limits: SchedulerConfig) -> list[int]:
    """Sequences of the captured drafts, whose blocks have as many rows as there are drafts."""
    drafts = limits.num_speculative_tokens
    if not drafts:
        return []
    most = min(MAX_GRAPH_ROWS, limits.max_num_batched_tokens) // drafts
    return _sizes_up_to(min(limits.max_num_seqs, most)) if most else []


def prompt_graph_sizes(config: EngineConfig) -> list[int]:
    """Rows of the captured steps with a prompt. The last holds what a step may have, if that is not more than most."""
    if config.device.graphs == "off":
        return []
    most = min(MAX_GRAPH_ROWS, config.scheduler.max_num_batched_tokens)
    return [*(size for size in _PROMPT_GRAPHS if size < most), most]


def _sizes_up_to(largest: int) -> list[int]:
    sizes = [size for size in _SMALL_GRAPHS if size < largest]
    sizes += range(_SMALL_GRAPHS[-1] + _GRAPH_STEP, largest, _GRAPH_STEP)
    return [*sizes, largest]


def load_fused_runner(
    config: EngineConfig, model_config: ModelConfig, vocab: CompressedVocab, device: torch.device, progress: bool
) -> Callable[..., ModelRunner]:
    """Load the weights. Returns what makes the runner once the caches are sized (``geometry``, ``is_compact``)."""
    # Triton is imported with the kernels, so these come last.
    from deepinfer.checkpoint.device_loader import DeviceLoader
    from deepinfer.kernels import nvrtc
    from deepinfer.models.fused_loading import Precision, load_fused, load_fused_draft
    from deepinfer.worker.fused_runner import FusedRunner

    loader = DeviceLoader(_open(config, model_config, device), device, show_progress=progress)
    precision: Precision = "fast" if config.numerics == "fast" else "faithful"
    model = load_fused(
        model_config,
        loader,
        device,
        precision=precision,
        token_map=torch.tensor(vocab.token_map, dtype=torch.int64),
        num_compressed=vocab.size,
        max_rows=config.scheduler.max_num_batched_tokens,
        invariant=config.batch_invariant,
    )
    draft = load_fused_draft(model, loader, precision) if config.speculation.num_tokens else None
    loader.close()
    if not nvrtc.is_available(device) and importlib.util.find_spec("humming") is None:
        logger.warning(
            "no Hopper GPU, and the package humming-kernels is not installed: routed experts run in Triton, slower"
        )
    is_captured = device.type == "cuda"
    steps, drafts = captured_sizes(config) if is_captured else ([], [])
    prompts = prompt_graph_sizes(config) if is_captured else []
    max_blocks = -(-config.scheduler.max_model_len // BLOCK_TOKENS)

    def make(**arguments: object) -> ModelRunner:
        return FusedRunner(
            model_config.text,
            model,
            device=device,
            draft=draft,
            graph_sizes=steps,
            prompt_sizes=prompts,
            draft_sizes=drafts,
            max_blocks=max_blocks,
            num_drafts=config.speculation.num_tokens,
            **arguments,  # type: ignore[arg-type]
        )

    return make


def _open(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> TensorSource:
    parts = ("text", "draft") if config.speculation.num_tokens else ("text",)
    if config.model.load_format == "dummy":
        return DeviceDummyCheckpoint(model_config, device, config.seed, parts=parts)
    return open_checkpoint(config.model.path, parts=parts, config=model_config)
