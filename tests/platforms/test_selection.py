"""The best available platform is chosen, and one that cannot be used says why."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.platforms.selection import PREFERENCE, passed_over, select_platform


class _Fake(CpuPlatform):
    def __init__(self, name: str, reason: str | None) -> None:
        self.name = name
        self.reason = reason

    def unavailable_because(self) -> str | None:
        return self.reason


def test_unset_takes_the_first_that_is_available():
    known = (_Fake("nvidia", "no driver"), _Fake("ascend", None), _Fake("cpu", None))
    chosen = select_platform(None, known)
    assert chosen.name == "ascend"
    assert passed_over(chosen, known) == {"nvidia": "no driver"}


def test_named_platform_is_taken_or_refused_with_its_reason():
    known = (_Fake("nvidia", "no driver"), _Fake("cpu", None))
    assert select_platform("cpu", known).name == "cpu"
    with pytest.raises(ConfigError) as caught:
        select_platform("nvidia", known)
    assert "not available, because no driver" in str(caught.value)
    assert "Use cpu" in str(caught.value)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="ascend, cpu, nvidia"):
        select_platform("tpu")


def test_this_version_runs_on_the_cpu():
    assert [platform.name for platform in PREFERENCE] == ["nvidia", "ascend", "cpu"]
    platform = select_platform(None)
    assert platform.name == "cpu"
    assert platform.device() == torch.device("cpu")
    assert platform.available_memory_bytes() > 2**20
    assert platform.num_threads() >= 1
    for other in PREFERENCE[:2]:
        assert other.unavailable_because()


@pytest.mark.parametrize("platform", PREFERENCE, ids=lambda platform: platform.name)
def test_facts_are_texts_for_a_report(platform):
    facts = platform.facts()
    assert facts["platform"] == platform.name
    assert facts["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in facts.values())
