"""``deepinfer inspect``: what a checkpoint holds, from its headers; no weight is read."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from deepinfer.checkpoint.inspect import CheckpointSummary, summarize, summarize_config
from deepinfer.config.flags import path_argument
from deepinfer.config.model_file import load_model_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "path", type=path_argument, help="checkpoint directory, or a config.json for the sizes it would have"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(namespace: argparse.Namespace) -> int:
    """Print the summary. A damaged checkpoint ends in the error that says what is wrong with it."""
    path: Path = namespace.path.expanduser()
    summary = summarize_config(load_model_config(path)) if path.is_file() else summarize(path)
    print(json.dumps(as_json(summary), indent=1) if namespace.json else summary.render())
    return 0


def as_json(summary: CheckpointSummary) -> dict[str, Any]:
    """Sizes and the layer map as JSON values."""
    return {
        "architecture": summary.config.architecture,
        "path": None if summary.path is None else str(summary.path),
        "num_shards": summary.num_shards,
        "file_bytes": summary.file_bytes,
        "parts": {group.value: dataclasses.asdict(size) for group, size in summary.sizes.items()},
        "backbone": dataclasses.asdict(summary.backbone),
        "total": dataclasses.asdict(summary.total),
        "layers": [{**dataclasses.asdict(layer), "mode": layer.mode.value} for layer in summary.config.text.layers],
        "num_draft_stages": summary.config.text.num_nextn_predict_layers,
        "warnings": list(summary.warnings),
    }
