"""``deepinfer make-checkpoint``: a random checkpoint in the released format, for tests and experiments."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from deepinfer.checkpoint.inspect import summarize, summarize_config
from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.flags import path_argument
from deepinfer.config.model import ModelConfig
from deepinfer.config.model_file import load_model_config
from deepinfer.errors import CapacityError, ConfigError

PRESETS = {
    "tiny": tiny_config,
    "tiny-long": lambda: tiny_config(max_position_embeddings=32768),
}
"""Configurations by name: the one of the tests, and the same with room for 32768 positions."""

_MOST_BYTES = 4 * 2**30  # values are made in float32 one tensor at a time: meant for small models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("directory", type=path_argument, help="where to write; made when absent")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=path_argument, metavar="FILE", help="config.json of the model")
    source.add_argument("--preset", choices=PRESETS, default="tiny", help="a built-in configuration (default: tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    parser.add_argument("--no-vision", action="store_true", help="leave the vision part out")
    parser.add_argument("--force", action="store_true", help="write into a directory that holds files already")


def run(namespace: argparse.Namespace) -> int:
    """Write the checkpoint and print what it holds."""
    directory: Path = namespace.directory.expanduser()
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file", why="a checkpoint is a directory", fix="choose another name")
    if directory.is_dir() and any(directory.iterdir()) and not namespace.force:
        raise ConfigError(
            f"{directory} is not empty", why="its files could be overwritten", fix="choose another, or add --force"
        )
    config = _config(namespace)
    num_bytes = summarize_config(config).total.num_bytes
    if num_bytes > _MOST_BYTES:
        raise CapacityError(
            f"the checkpoint would have {num_bytes:,} bytes",
            why=f"this command writes at most {_MOST_BYTES:,}",
            fix="use a smaller configuration; load_format=dummy runs large ones without files",
        )
    try:
        make_random_checkpoint(directory, config, seed=namespace.seed)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written", why=str(error), fix="choose another directory") from error
    print(f"wrote random weights (seed {namespace.seed})", file=sys.stderr)
    print(summarize(directory).render())
    return 0


def _config(namespace: argparse.Namespace) -> ModelConfig:
    config = PRESETS[namespace.preset]() if namespace.config is None else load_model_config(namespace.config)
    return dataclasses.replace(config, vision=None) if namespace.no_vision else config
