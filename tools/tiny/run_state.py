"""What the programs share: where files lie, how a run is set up, saved and resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.reference.weights import load_weights
from deepinfer.tokenizer.compressed_vocab import build_compressed_vocab
from tools.tiny.backbone import Backbone
from tools.tiny.config import tiny_v41_config
from tools.tiny.conversation import Encoder
from tools.tiny.fused import enable_compilation
from tools.tiny.optimizer import Optimizer
from tools.tiny.parameters import StackedParameters, place_of

SEED = 1
HELD_OUT_TEXTS = Path("deepinfer/evaluation/texts")


@dataclass(slots=True)
class Setup:
    """Model, tokenizer and texts of a run."""

    parameters: StackedParameters
    backbone: Backbone
    encoder: Encoder
    tokenizer_file: Path
    prose: np.ndarray
    device: str

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and rounded weights."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def held_out_texts(self) -> dict[str, str]:
        return {file.stem: file.read_text(encoding="utf-8") for file in sorted(HELD_OUT_TEXTS.glob("*.txt"))}


def set_up(data: Path, device: str, *, is_compiled: bool = True) -> Setup:
    """Build the model from the prepared data folder (``prose.npy`` and ``tokenizer/``).

    Args:
        is_compiled: compile on a GPU; not worth its minute for a few passes.
    """
    torch.manual_seed(SEED)
    if device != "cpu":
        torch.backends.cuda.matmul.allow_tf32 = True
        if is_compiled:
            enable_compilation()
    file = data / "tokenizer" / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    vocab = build_compressed_vocab(backend)
    config = tiny_v41_config(vocab.size)
    parameters = StackedParameters(config, SEED).to(device)
    backbone = Backbone(config, parameters, vocab.token_map.tolist(), device)
    return Setup(parameters, backbone, Encoder.of(backend), file, np.load(data / "prose.npy"), device)


def save(path: Path, setup: Setup, optimizer: Optimizer, step: int) -> None:
    """Everything that a run needs to go on."""
    content = {
        "step": step,
        "parameters": setup.parameters.state_dict(),
        "optimizer": optimizer.state,
        "optimizer_step": optimizer.step_number,
    }
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.rename(path)


def resume(path: Path, setup: Setup, optimizer: Optimizer) -> int:
    """Load what :func:`save` wrote; the step to go on with."""
    content = torch.load(path, map_location=setup.device, weights_only=True)
    setup.parameters.load_state_dict(content["parameters"])
    optimizer.state = content["optimizer"]
    optimizer.step_number = content["optimizer_step"]
    return int(content["step"])


def load_parameters(path: Path, setup: Setup) -> None:
    """Only the parameters of a saved run."""
    content = torch.load(path, map_location=setup.device, weights_only=True)
    setup.parameters.load_state_dict(content["parameters"])


@torch.no_grad()
def load_checkpoint(folder: Path, setup: Setup, *, draft: bool = True) -> None:
    """Parameters from an exported model, with or without its draft: the rounded values, for want of the saved state."""
    weights = load_weights(folder)
    for name, value in weights.items():
        if name.startswith("mtp.") and not draft:
            continue
        place = place_of(name)
        target: Tensor = setup.parameters[place.key].data
        if place.owner is not None:
            target = target[setup.parameters.stacks[place.key].owners.index(place.owner)]
        if place.expert is not None:
            target = target[place.expert]
        stored = value if isinstance(value, Tensor) else value.gather(torch.arange(value.shape[0]))
        target.copy_(stored)


def log(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Append a line of JSON to ``name`` and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)
