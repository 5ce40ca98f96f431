"""Imports point down: a request goes entrypoint -> engine -> scheduler, worker -> model -> layer -> op, never back.

The tests read the import statements with ``ast``; nothing is executed except in the torch-free check.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "deepinfer"

BASE = {"errors", "config"}
MODEL = BASE | {"platforms", "ops", "kernels", "layers", "models", "checkpoint"}
WORKER = MODEL | {"messages", "kvcache", "sampling", "tokenizer", "observe"}

# Part of the package -> the parts that it may import, besides itself. A new part needs a line: think where it belongs.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "messages": set(),
    "platforms": {"errors"},
    "config": {"errors", "platforms"},
    "tokenizer": BASE,
    "kvcache": BASE | {"messages"},
    "scheduler": BASE | {"messages", "kvcache"},
    "checkpoint": BASE | {"tokenizer"},
    "ops": BASE | {"platforms"},
    "kernels": BASE | {"platforms", "ops", "checkpoint"},
    "layers": BASE | {"platforms", "ops", "kernels", "checkpoint"},
    "models": MODEL - {"models"},
    "sampling": BASE | {"messages", "ops", "kernels"},
    "observe": BASE | {"platforms"},
    "speculative": BASE | {"sampling", "kernels"},
    "structured": BASE | {"tokenizer", "sampling"},
    "worker": WORKER | {"speculative", "structured"},
    "engine": WORKER | {"worker", "scheduler", "speculative", "structured"},
    "evaluation": WORKER | {"worker", "scheduler", "engine", "speculative"},
    "entrypoints": WORKER | {"worker", "scheduler", "engine", "speculative", "structured", "evaluation", "reference"},
    # The executable specification must not share a line with what it judges.
    "reference": BASE | {"checkpoint", "tokenizer"},
}
# The package's own front door hands out entry points.
FRONT_DOOR = {"__init__", "__main__"}
TORCH_FREE = ("errors", "messages", "scheduler", "kvcache")
FILES = sorted(PACKAGE.rglob("*.py"))


def _part(file: Path) -> str:
    """Name of the folder of ``file`` below the package, or of the file itself for those at the top."""
    inside = file.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def _imports(file: Path) -> list[tuple[int, str]]:
    """(line, dotted module or object) of every import in a file, those inside functions among them."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write the whole name, deepinfer..."
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def _parts_imported(file: Path) -> list[tuple[int, str]]:
    names = [(line, name.split(".")) for line, name in _imports(file)]
    return [(line, path[1] if len(path) > 1 else "") for line, path in names if path[0] == "deepinfer"]


def test_every_part_has_its_place():
    assert FILES
    unplaced = {_part(file) for file in FILES} - set(MAY_IMPORT) - FRONT_DOOR
    assert not unplaced, f"add {sorted(unplaced)} to MAY_IMPORT"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_down(part):
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{line} imports deepinfer.{target}"
        for file in FILES
        if _part(file) == part
        for line, target in _parts_imported(file)
        if target != part and target not in MAY_IMPORT[part]
    ]
    assert not wrong, f"{part} may import {sorted(MAY_IMPORT[part])} only:\n" + "\n".join(wrong)


def test_the_table_itself_has_no_cycle():
    placed: set[str] = set()
    while len(placed) < len(MAY_IMPORT):
        ready = {part for part, below in MAY_IMPORT.items() if part not in placed and below <= placed}
        assert ready, f"cycle among {sorted(set(MAY_IMPORT) - placed)}"
        placed |= ready


def test_the_specification_shares_nothing_with_the_engine():
    judged = {"ops", "layers", "models", "worker", "kvcache", "scheduler", "engine", "sampling"}
    assert not MAY_IMPORT["reference"] & judged


def test_only_config_reads_the_environment():
    allowed = {"config/env.py"}
    readers = []
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if (
                is_read
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and not _is_setdefault(tree, node)
            ):
                readers.append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert not [reader for reader in readers if reader.split(":")[0] not in allowed], readers


def _is_setdefault(tree: ast.AST, environ: ast.Attribute) -> bool:
    """Whether ``os.environ`` stands in ``os.environ.setdefault(...)``, which configures a library rather than us."""
    parents = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.value is environ)
    return any(parent.attr == "setdefault" for parent in parents)


def test_scheduler_and_cache_bookkeeping_load_without_torch():
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in FILES if _part(file) in TORCH_FREE
    ]
    program = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    program += "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


NEEDS_TRITON = (
    *("kernels", "layers/fused", "models/fused", "sampling/device_choice"),
    *("worker/draft_step", "worker/fused_drafter", "worker/fused_runner", "worker/sample_step"),
)
"""Beginnings of the files that only an engine on a GPU imports."""


def test_triton_is_loaded_only_for_a_gpu():
    """Triton is not on every machine: all but the GPU's own files load without it, the commands among them."""
    inside = {file: file.relative_to(PACKAGE.parent).with_suffix("") for file in FILES}
    names = [
        ".".join(path.parts).removesuffix(".__init__")
        for file, path in inside.items()
        if not str(file.relative_to(PACKAGE)).startswith(NEEDS_TRITON) and path.stem != "__main__"
    ]
    program = "import importlib, sys\nsys.modules['triton'] = None  # importing it raises\nfailed = []\n"
    program += f"for name in {names!r}:\n    try: importlib.import_module(name)\n"
    program += "    except ImportError as error: failed.append(f'{name}: {error}')\n"
    program += "sys.exit('\\n'.join(failed) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
