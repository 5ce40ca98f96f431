"""Write the trained model in the released checkpoint format."""

from __future__ import annotations

import json
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


def keep_backbone(folder: Path, source: Path) -> None:
    """Take everything but the draft from the files of ``source``, byte by byte.

    A value that was read from a file and is written again may get another scale and code, though it stays the same.
    """
    for file in sorted(folder.glob("*.safetensors")):
        content, original = bytearray(file.read_bytes()), (source / file.name).read_bytes()
        size = 8 + int.from_bytes(content[:8], "little")
        assert content[:size] == original[:size], f"{file.name} has other tensors than that of {source}"
        for name, entry in json.loads(content[8:size]).items():
            if name != "__metadata__" and not name.startswith("mtp."):
                begin, end = (size + offset for offset in entry["data_offsets"])
                content[begin:end] = original[begin:end]
        file.write_bytes(content)
