"""The garbage collector passes over lasting objects while requests run, and only then."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.entrypoints.collector import lasting_objects_spared
from tests.entrypoints.conftest import SMALL


class Ring:
    """In a cycle with itself: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_spared() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_lasting_objects_are_passed_over_inside() -> None:
    before, ring = len(gc.get_objects()), Ring()
    gone = weakref.ref(ring)
    with lasting_objects_spared():
        assert len(gc.get_objects()) < before / 10
        del ring
        gc.collect()
        assert gone() is not None
        young = weakref.ref(Ring())
        gc.collect()
        assert young() is None, "what is made inside is collected"
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None


def test_the_last_to_leave_ends_it() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with lasting_objects_spared():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with lasting_objects_spared():
        thread.start()
        assert inside.wait(30)
    assert gc.get_freeze_count() > 0
    leave.set()
    thread.join()
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    with lasting_objects_spared():
        pass
    assert gc.get_freeze_count() > 0


def test_generate_spares_them_and_errors_end_it(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, counts, run_step = LLM(model_path, **SMALL), list[int](), Engine.run_step

    def counting(engine: Engine) -> None:
        counts.append(gc.get_freeze_count())
        if len(counts) == 3:
            raise ValueError("third")
        run_step(engine)

    monkeypatch.setattr(Engine, "run_step", counting)
    with pytest.raises(ValueError, match="third"):
        llm.generate("The sea", SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert min(counts) > 1000
    assert gc.get_freeze_count() == 0
    # Also where the program holds it in a cycle, an engine that nobody uses any more is freed.
    holder = Ring()
    holder.llm = llm  # type: ignore[attr-defined]
    runner = weakref.ref(llm.engine.runner)
    del llm, holder
    gc.collect()
    assert runner() is None
