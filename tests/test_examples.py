"""Every example runs as its reader would run it, on the random tiny model, and says that all went well."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint.random_checkpoint import make_random_checkpoint
from deepinfer.checkpoint.tiny import tiny_config

FOLDER = Path(__file__).parents[1] / "examples"
ARGUMENTS: dict[str, list[Any]] = {
    "offline_inference": [["The sea", "def main():"]],
    "streaming": ["The sea"],
    "score_text": ["The sea is blue."],
    "speculation": ["The sea"],
    "determinism": ["The sea"],
    "structured_output": [],
}
"""What ``main`` of each example takes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("examples") / "tiny"
    make_random_checkpoint(directory, tiny_config(vision=False), seed=0)
    return directory


def test_no_example_is_forgotten() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example_runs(name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR", raising=False)
    monkeypatch.setattr(program, "default_model", lambda: model)
    assert program.main(*ARGUMENTS[name]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 1
