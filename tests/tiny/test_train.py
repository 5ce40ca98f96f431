"""The order of the training's stages, with each program replaced by what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tools.tiny import train


class Programs:
    """Stands in for the programs: notes their names and writes the files that the next stages look for."""

    def __init__(self, folder: Path, backbone_steps: list[int]) -> None:
        self.folder, self.backbone_steps = folder, backbone_steps
        self.names: list[str] = []
        self.fails_at = ""

    def run(self, program: str, *arguments: str) -> None:
        name = arguments[0] if program == "deepinfer" else program.removeprefix("tools.tiny.")
        self.names.append(name)
        if name == self.fails_at:
            raise RuntimeError(name)
        if name == "train_backbone":
            torch.save({"step": self.backbone_steps.pop(0)}, self.folder / "state.pt")
        elif name == "train_draft":
            (self.folder / "out" / "model").mkdir(parents=True, exist_ok=True)
            (self.folder / "draft_state.pt").touch()
        elif name == "calibrate":
            (self.folder / "out" / "model" / "dspark_calibration.json").touch()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs(tmp_path, [train.BACKBONE_STEPS])
    monkeypatch.setattr(train, "FOLDER", tmp_path)
    monkeypatch.setattr(train, "run", found.run)
    monkeypatch.setattr("sys.argv", ["train"])
    for name in ("texts/train.txt", "tokenizer/tokenizer.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    np.save(tmp_path / "prose.npy", np.zeros(1, np.uint16))
    return found


AFTER_BACKBONE = ["continuations", "train_draft", "fit_confidence", "eval", "calibrate", "report"]


def test_all_stages_in_order(programs: Programs):
    train.main()
    assert programs.names == ["train_backbone", *AFTER_BACKBONE]


def test_no_draft_is_trained_on_an_unfinished_backbone(programs: Programs):
    programs.backbone_steps = [1000, train.BACKBONE_STEPS]
    with pytest.raises(SystemExit, match="1000 of 2860"):
        train.main()
    assert programs.names == ["train_backbone"]
    train.main()
    assert programs.names == ["train_backbone", "train_backbone", *AFTER_BACKBONE]


@pytest.mark.parametrize("stage", AFTER_BACKBONE)
def test_a_stage_that_failed_is_the_next_to_run(programs: Programs, stage: str):
    programs.fails_at = stage
    with pytest.raises(RuntimeError, match=stage):
        train.main()
    programs.names, programs.fails_at = [], ""
    train.main()
    first = {"train_draft": "continuations", "calibrate": "eval"}.get(stage, stage)  # those are cheap or one stage
    assert programs.names == AFTER_BACKBONE[AFTER_BACKBONE.index(first) :]
