"""Write the trained model in the released checkpoint format."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from deepinfer.checkpoint import write_checkpoint
from tools.tiny.run_state import SEED, Setup

_IMAGE_BIAS_NOISE = 0.02


def export_model(folder: Path, setup: Setup) -> None:
    """Checkpoint and tokenizer in ``folder``.

    ``bias_vl`` was never trained (there are no images): it is the text bias with a little noise, so that an engine
    that takes the wrong one of the two shows it.
    """
    tensors = {name: value.cpu() for name, value in setup.parameters.named_tensors().items()}
    generator = torch.Generator().manual_seed(SEED)
    for name in tensors:
        if name.endswith("gate.bias_vl"):
            text_bias = tensors[name.removesuffix("_vl")]
            tensors[name] = text_bias + _IMAGE_BIAS_NOISE * torch.randn(text_bias.shape, generator=generator)
    write_checkpoint(folder, setup.backbone.config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(setup.tokenizer_file.with_name(name), folder / name)
