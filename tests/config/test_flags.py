"""Flags of the command line are the options of the table."""

from __future__ import annotations

import argparse

import pytest

from deepinfer.config.flags import add_engine_flags, engine_arguments
from deepinfer.config.options import OPTIONS


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepinfer")
    add_engine_flags(parser)
    return parser


def test_nothing_given_is_nothing_passed_on(parser):
    assert engine_arguments(parser.parse_args([])) == {}


def test_given_flags_become_arguments(parser):
    flags = ["--model", "/m", "--max-num-seqs", "4", "--no-chunked-prefill", "--num-blocks", "auto"]
    expected = {"model": "/m", "max_num_seqs": "4", "chunked_prefill": False, "num_blocks": "auto"}
    assert engine_arguments(parser.parse_args(flags)) == expected
    assert engine_arguments(parser.parse_args(["--chunked-prefill"])) == {"chunked_prefill": True}


def test_help_shows_every_flag_with_its_default(parser):
    text = " ".join(parser.format_help().split())  # argparse breaks lines where the terminal ends
    for option in OPTIONS:
        assert option.flag in text
    assert "(default: 256)" in text
