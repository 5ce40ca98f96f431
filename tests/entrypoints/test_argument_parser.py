"""Mistakes on the command line: exit code 2, and a message that names what was probably meant."""

from __future__ import annotations

import argparse

import pytest

from deepinfer.entrypoints.cli import COMMANDS, build_parser, main


def complaint(capsys: pytest.CaptureFixture[str], arguments: str) -> tuple[str, str, str]:
    """What, why and fix of the error that a command line ends in."""
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    what, why, fix = err.splitlines()
    return what, why.removeprefix("  why: "), fix.removeprefix("  fix: ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("generate x --max-num-seq 3", "did you mean --max-num-seqs?"),
        ("generate x --max_tokens 3", "did you mean --max-tokens?"),
        ("generate x --temprature=1", "did you mean --temperature?"),
        ("generate x --temp 1 --topk=3", "did you mean --temperature? did you mean --top-k?"),
        ("generate x --max-num", "did you mean --max-num-seqs or --max-num-batched-tokens?"),
        ("generate x --no-ignore-eso", "did you mean --no-ignore-eos?"),
        ("chat --modle /m", "did you mean --model?"),
        ("bench --repeat 3", "did you mean --repeats?"),
        ("eval --quik", "did you mean --quick?"),
        ("--vers", "did you mean --version?"),
    ],
)
def test_a_mistyped_flag_names_the_nearest(arguments, hint, capsys):
    _, why, fix = complaint(capsys, arguments)
    assert why.startswith(("there is no flag --", "there are no flags --"))
    assert fix.startswith(hint)


def test_a_flag_that_is_like_no_other_points_to_the_help(capsys):
    _, why, fix = complaint(capsys, "generate x --foobarbaz 3")
    assert why == "there is no flag --foobarbaz"
    assert fix.startswith("`deepinfer generate --help`")


@pytest.mark.parametrize(
    "arguments",
    [
        "generate Once --ignore-eos true",
        "generate --ignore-eos true",
        "generate Once --ignore-eos=true",
        "generate Once --ignore-eos 1",
        "generate --ignore-eos False Once",
    ],
)
def test_a_value_behind_a_flag_that_takes_none_is_called_so(arguments, capsys):
    _, why, fix = complaint(capsys, arguments)
    assert why == "--ignore-eos takes no value"
    assert fix.startswith("write --ignore-eos alone, or --no-ignore-eos for the opposite")


def test_a_switch_without_an_opposite_is_left_out_instead(capsys):
    what, why, fix = complaint(capsys, "generate --no-stream true")
    assert "--no-stream true" in what
    assert why == "--no-stream takes no value"
    assert fix == "write --no-stream alone, or leave it out"


@pytest.mark.parametrize("arguments", ["--ignore-eos Once", "--prompt true --ignore-eos", "--ignore-eos -- true"])
def test_texts_behind_flags_are_texts(arguments):
    namespace = build_parser("generate").parse_args(["generate", *arguments.split()])
    assert [*namespace.prompts, *namespace.prompt] in (["Once"], ["true"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generat x", "did you mean generate?"),
        ("--max-tokens 3 generate x", "the command comes first"),
        ("make-checkpoint d --preset tny", "did you mean tiny?"),
        ("generate a --max-tokens 3 b", "write --prompt 'b'"),
        ("generate a --max-tokens 3 -- b", "write --prompt 'b'"),
        ("generate -vegan", "a text that begins with a minus stands behind --"),
        ("generate x --golden-token-ids -1,5", "--golden-token-ids=-VALUE"),
        ("bench --steps 3 4", "leave it out"),
        ("inspect", "`deepinfer inspect --help`"),
    ],
)
def test_other_mistakes_say_what_to_write(arguments, said, capsys):
    assert said in complaint(capsys, arguments)[2]


def test_the_flags_of_a_comparison_are_checked_like_the_others(capsys, model_path):
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--suite", "addition", "--model", str(model_path), "--compare", " --prefx-cache off", ""])
    assert caught.value.code == 2
    assert "did you mean --prefix-cache?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_no_flag_may_be_abbreviated(command):
    parser = build_parser(command)
    choices = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices
    assert not parser.allow_abbrev
    assert not any(each.allow_abbrev for each in choices.values())
