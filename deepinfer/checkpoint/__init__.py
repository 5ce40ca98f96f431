"""Checkpoint files: formats, expected tensors, validation, loading, and writers of dummy and tiny checkpoints."""

from deepinfer.checkpoint.dummy import DummyCheckpoint
from deepinfer.checkpoint.engram_table import EngramTable
from deepinfer.checkpoint.inspect import CheckpointSummary, summarize, summarize_config
from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.reader import Checkpoint, open_checkpoint
from deepinfer.checkpoint.released import released_config
from deepinfer.checkpoint.stored import StoredTensor, TensorSource
from deepinfer.checkpoint.tensor_specs import Kind, Part, TensorSpec, expected_tensors
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.checkpoint.writer import store_tensor, write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointSummary",
    "DummyCheckpoint",
    "EngramTable",
    "Kind",
    "Part",
    "StoredTensor",
    "TensorSource",
    "TensorSpec",
    "expected_tensors",
    "make_random_checkpoint",
    "open_checkpoint",
    "released_config",
    "store_tensor",
    "summarize",
    "summarize_config",
    "tiny_config",
    "write_checkpoint",
]
