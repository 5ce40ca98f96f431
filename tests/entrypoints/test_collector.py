"""The garbage collector passes over what lives as long as an LLM, and gets it back afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer import LLM
from deepinfer.entrypoints.collector import spare_lasting_objects
from tests.entrypoints.conftest import SMALL


class Owner:
    """Somebody with a weak reference."""


class Ring:
    """In a cycle with itself: only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_spared() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_lasting_objects_are_passed_over() -> None:
    before = len(gc.get_objects())
    owner = Owner()
    end = spare_lasting_objects(owner)
    assert len(gc.get_objects()) < before / 10
    end()
    assert gc.get_freeze_count() == 0
    end()  # twice is as good as once


def test_the_end_of_the_owner_is_the_end() -> None:
    ring, owner = Ring(), Owner()
    gone = weakref.ref(ring)
    spare_lasting_objects(owner)
    del ring
    gc.collect()
    assert gone() is not None, "it should be spared as long as the owner is there"
    del owner
    gc.collect()
    assert gone() is None


def test_what_is_garbage_already_goes() -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    del ring
    owner = Owner()
    spare_lasting_objects(owner)
    assert gone() is None


@pytest.mark.parametrize("closes", [True, False])
def test_an_engine_that_nobody_uses_any_more_is_freed(closes: bool, model_path: Path) -> None:
    llm = LLM(model_path, **SMALL)
    assert gc.get_freeze_count() > 0
    runner = weakref.ref(llm.engine.runner)
    if closes:
        llm.close()
    else:
        del llm
    gc.collect()
    assert runner() is None
