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
from deepinfer.config.model import ModelConfig
from deepinfer.kvcache.block_pool import BLOCK_TOKENS
from deepinfer.tokenizer.compressed_vocab import CompressedVocab
from deepinfer.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_SMALL_GRAPHS = (1, 2, 4, 8, 16, 24, 32)
_GRAPH_STEP = 16
MAX_GRAPH_ROWS = 512
"""Larger steps run launch by launch: there the host is never what they wait for."""


def not_fused_because(config: EngineConfig, model_config: ModelConfig) -> str | None:
    """Why the reference operators run instead; None if the fused kernels can."""
    if config.device.platform != "nvidia":
        return f"the fused kernels are for NVIDIA GPUs, not for the platform {config.device.platform}"
    if config.numerics == "float32":
        return "numerics float32 rounds nowhere, and the fused kernels compute in the model's own formats"
    if not model_config.text.hc_shifted:
        return "the model reads its streams with the sublayer's own mix (hc_shifted is false)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def graph_sizes(max_num_seqs: int, num_drafts: int) -> list[int]:
    """Rows of the captured steps: any batch that decodes, with its drafts, padded to the next size."""
    largest = min(max_num_seqs * (1 + num_drafts), MAX_GRAPH_ROWS)
    sizes = [size for size in _SMALL_GRAPHS if size < largest]
    sizes += range(_SMALL_GRAPHS[-1] + _GRAPH_STEP, largest, _GRAPH_STEP)
    return [*sizes, largest]


def load_fused_runner(
    config: EngineConfig, model_config: ModelConfig, vocab: CompressedVocab, device: torch.device, progress: bool
) -> Callable[..., ModelRunner]:
    """Load the weights. Returns what makes the runner once the caches are sized (``geometry``, ``is_compact``)."""
    # Triton is imported with the kernels, so these come last.
    from deepinfer.checkpoint.device_loader import DeviceLoader
    from deepinfer.models.fused_loading import load_fused, load_fused_draft
    from deepinfer.worker.fused_runner import FusedRunner

    loader = DeviceLoader(_open(config, model_config, device), device, show_progress=progress)
    model = load_fused(
        model_config,
        loader,
        device,
        precision="fast" if config.numerics == "fast" else "faithful",
        token_map=torch.tensor(vocab.token_map, dtype=torch.int64),
        num_compressed=vocab.size,
        max_rows=config.scheduler.max_num_batched_tokens,
        invariant=config.batch_invariant,
    )
    draft = load_fused_draft(model, loader) if config.speculation.num_tokens else None
    loader.close()
    sizes: list[int] = []
    if device.type == "cuda":
        sizes = graph_sizes(config.scheduler.max_num_seqs, config.speculation.num_tokens)
    max_blocks = -(-config.scheduler.max_model_len // BLOCK_TOKENS)

    def make(**arguments: object) -> ModelRunner:
        return FusedRunner(
            model_config.text,
            model,
            device=device,
            draft=draft,
            graph_sizes=sizes,
            max_blocks=max_blocks,
            **arguments,  # type: ignore[arg-type]
        )

    return make


def _open(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> TensorSource:
    parts = ("text", "draft") if config.speculation.num_tokens else ("text",)
    if config.model.load_format == "dummy":
        return DeviceDummyCheckpoint(model_config, device, config.seed, parts=parts)
    return open_checkpoint(config.model.path, parts=parts, config=model_config)
