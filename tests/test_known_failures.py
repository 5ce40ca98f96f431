"""Every test that docs/known_failures.md names exists; those written for a block say so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "known_failures.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]\d) \|.*\| (.*) \|$", PAGE, re.MULTILINE)
WRITTEN_FOR = ("test_scripted_json", "test_model_input", "test_draft_state", "test_batch_invariance", "test_logprobs")
WRITTEN_FOR += ("test_stops_in_blocks", "test_zero_lengths")


def docstrings(file: Path) -> dict[str, str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_all_blocks_of_the_engine_are_listed() -> None:
    wanted = "E1 C2 C3 C4 C5 L1 M1 M2 G2 G3 S1 S3 S4 S6 D1 D4 P1 P3 P4 P5 O1 O2 O3 T1 T4 R5"
    assert " ".join(block for block, _ in ROWS) == wanted


@pytest.mark.parametrize(("block", "entry"), ROWS, ids=lambda value: value if len(value) == 2 else "")
def test_named_tests_exist(block: str, entry: str) -> None:
    names = re.findall(r"`(tests/[^`]+)`", entry)
    assert names, "a block has a test or shows the nearest one"
    for name in names:
        path, _, function = name.partition("::")
        assert (ROOT / path).is_file(), name
        if not function:
            continue
        known = docstrings(ROOT / path)
        assert function in known, name
        if Path(path).stem in WRITTEN_FOR and block != "R5":
            assert block in known[function], f"{name} does not say that it is about {block}"
