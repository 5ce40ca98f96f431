"""The model that commands use when none is named: the trained tiny one that comes with the package, or a random one."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.config.env import user_cache_dir
from deepinfer.config.model import ModelConfig
from deepinfer.errors import CapacityError

logger = logging.getLogger(__name__)

TRAINED = Path(__file__).parents[1] / "data" / "tiny_v41"
"""A small trained checkpoint, where the package was built with one."""

_VERSION = 1  # raised whenever the same call would write other files
_SEED = 0


def default_model(trained: Path = TRAINED) -> Path:
    """Directory of the default model. Random weights are made once and kept in the user's cache directory.

    Raises:
        CapacityError: the cache directory can't be written.
    """
    if (trained / "config.json").is_file():
        return trained
    return cached_random_model("tiny", tiny_config())


def cached_random_model(name: str, config: ModelConfig) -> Path:
    """A random checkpoint of ``config``, made at the first call. Several processes may call this at the same time.

    Args:
        name: of its directory, along with a version; equal names mean equal configurations.
    """
    home = user_cache_dir()
    directory = home / f"{name}-random-v{_VERSION}"
    if directory.is_dir():
        return directory
    try:
        home.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=home))
    except OSError as error:
        raise CapacityError(
            f"cache directory {home} cannot be written ({error.strerror})",
            why="a small random model is made there when no model is named",
            fix="set XDG_CACHE_HOME to a directory that can be written, or pass --model DIRECTORY",
        ) from error
    try:
        make_random_checkpoint(unfinished, config, seed=_SEED)
        try:
            os.rename(unfinished, directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    logger.info("made a random model in %s", directory)
    return directory


def describe_model(path: Path) -> str:
    """What to expect of a model's text, in one sentence, for the models of :func:`default_model`."""
    if path == TRAINED:
        return f"tiny trained model in {path}: it has the structure of DeepSeek-V4.1-Flash, and little knowledge"
    if path.parent == user_cache_dir():
        return f"tiny RANDOM model in {path}: its text is noise, only the computation is real"
    return f"model in {path}"
