"""The ``deepinfer`` command, in this process: what it prints, and its exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.checkpoint.inspect import summarize
from deepinfer.entrypoints import default_model as default_model_file
from deepinfer.entrypoints.cli import COMMANDS, build_parser, main
from deepinfer.entrypoints.llm import LLM
from deepinfer.sampling.params import SamplingParams

FAST = ["--max-model-len", "160", "--max-num-seqs", "4", "--num-threads", "1", "--num-speculative-tokens", "0"]
GREEDY = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]


@pytest.fixture
def generate(model_path, capsys):
    """Run ``deepinfer generate`` on the tiny model; returns (exit code, standard output, standard error)."""

    def run(*arguments: str):
        code = main(["generate", "--model", str(model_path), *FAST, *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def _expected(llm: LLM, prompt) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text


# ---- the program -----------------------------------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--traceback" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what", "help_of"),
    [
        (["generate", "x", "--nope"], "unrecognized arguments: --nope", "deepinfer generate"),
        (["--nope", "generate"], "unrecognized arguments: --nope", "deepinfer"),
        (["inspect", ""], "the path is empty", "deepinfer inspect"),
        (["make-checkpoint", " "], "the path is empty", "deepinfer make-checkpoint"),
    ],
)
def test_the_help_that_is_named_is_the_one_that_helps(arguments, what, help_of, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    first, _, fix = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{help_of}: error: ")
    assert what in first
    assert f"`{help_of} --help`" in fix


@pytest.mark.parametrize("arguments", ["dance", "generate --temprature=1", "generate --max-tokens x"])
def test_malformed_arguments_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    what, why, fix = capsys.readouterr().err.splitlines()
    assert arguments.split()[-1] in what
    assert why.startswith("  why: ")
    assert fix.startswith("  fix: ")


FULL = Path("/dev/full")
WRITING = [["generate", "x"], ["generate", "x", "y"], ["generate", "x", "--json"], ["inspect"], ["--help"], []]


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_message(model_path, arguments, unbuffered):
    more = {"generate": ["--model", str(model_path), *FAST, *GREEDY], "inspect": [str(model_path)]}
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deepinfer", *arguments, *more.get((arguments or [""])[0], [])],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    what, why, fix = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == 2
    assert "error: standard output" in what
    assert "No space left" in why
    assert fix.startswith("  fix: ")


def test_a_reader_that_left_is_no_error(model_path):
    command = [sys.executable, "-m", "deepinfer", "inspect", str(model_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_help_of_the_program_does_not_load_torch():
    program = "import sys; from deepinfer.entrypoints.cli import main; main([]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


# ---- generate --------------------------------------------------------------------------------------------------------


def test_one_prompt_is_streamed_and_nothing_else_goes_to_standard_output(generate, llm):
    code, out, err = generate("The sea", *GREEDY)
    assert code == 0
    assert out == _expected(llm, "The sea") + "\n"
    assert "5 tokens" in err
    assert "tokens/s" in err


def test_prompts_come_from_arguments_flags_and_files_in_order(generate, llm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"two"\n\n{"prompt_token_ids": [5, 6]}\n', encoding="utf-8")
    code, out, _ = generate("zero", "--prompt", "one", "--prompts-file", str(file), "--json", *GREEDY)
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["prompt"] for record in records] == ["zero", "one", "two", None]
    assert records[3]["prompt_token_ids"] == [5, 6]
    texts = [record["outputs"][0]["text"] for record in records]
    assert texts == [_expected(llm, prompt) for prompt in ("zero", "one", "two", [5, 6])]


def test_a_text_file_holds_one_prompt_per_line(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\nsecond\n", encoding="utf-8")
    code, out, _ = generate("--prompts-file", str(file), *GREEDY)
    assert code == 0
    assert "[0] 'first'" in out
    assert "[1] 'second'" in out


ODD_LINE = "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\rh"
"""Every character but the line feed at which ``str.splitlines`` cuts; none of them ends a line of a file."""


def _prompts_read(out: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in out.split("\n") if line]


def test_lines_of_a_text_file_end_at_line_feeds_only(generate, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"\ufeff{ODD_LINE}\r\nsecond\n\n\ufeffthird".encode())
    code, out, _ = generate("--prompts-file", str(file), "--json", "--max-tokens", "1")
    assert code == 0
    assert _prompts_read(out) == [ODD_LINE, "second", "\ufeffthird"]


def test_lines_of_a_json_file_end_at_line_feeds_only(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompt = "one\x85two\u2028three"
    file.write_bytes(("\ufeff" + json.dumps({"prompt": prompt}, ensure_ascii=False) + '\r\n"second"\r\n').encode())
    code, out, _ = generate("--prompts-file", str(file), "--json", "--max-tokens", "1")
    assert code == 0
    assert _prompts_read(out) == [prompt, "second"]


def test_lines_of_standard_input_end_at_line_feeds_only(generate, monkeypatch):
    bytes_in = io.BytesIO(f"\ufeff{ODD_LINE}\r\nsecond\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(bytes_in, encoding="utf-8"))
    code, out, _ = generate("--prompts-file", "-", "--json", "--max-tokens", "1")
    assert code == 0
    assert _prompts_read(out) == [ODD_LINE, "second"]


def test_standard_input_is_one_prompt(generate, llm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The sea\n"))
    code, out, _ = generate(*GREEDY)
    assert (code, out) == (0, _expected(llm, "The sea") + "\n")


def test_json_holds_log_probabilities(generate):
    code, out, _ = generate("The sea", "--json", "--logprobs", "2", "--prompt-logprobs", "true", *GREEDY)
    record = json.loads(out)
    assert code == 0
    (output,) = record["outputs"]
    assert [entry[0]["token_id"] for entry in output["logprobs"]] == output["token_ids"]
    assert [len(entry) for entry in output["logprobs"]] == [2] * 5
    assert record["prompt_logprobs"][0] is None
    assert len(record["prompt_logprobs"]) == len(record["prompt_token_ids"])
    assert record["error"] is None


def test_several_outputs_per_prompt(generate):
    code, out, _ = generate("The sea", "--n", "3", "--seq-seed", "4", "--max-tokens", "4", "--ignore-eos")
    assert code == 0
    assert out.count("(length)") == 3


def test_engine_defaults_apply_where_no_sampling_flag_is_given(generate):
    code, out, _ = generate("x", "--default-max-tokens", "2", "--default-temperature", "0", "--json", "--ignore-eos")
    assert code == 0
    assert len(json.loads(out)["outputs"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--max-tokens", "0"], "max_tokens is 0"),
        (["x", "--max-tokens", "-3"], "max_tokens is -3"),
        ([""], "empty"),
        (["\udcff"], "surrogate"),
        (["x", "--model", "/nowhere"], "/nowhere"),
        (["x", "--model", ""], "the path is empty"),
        (["x", "--numerics", "fp16"], "fp16"),
        (["x", "--ops", "moe=fast"], "moe=fast"),
        (["--prompts-file", "/nowhere.txt"], "/nowhere.txt"),
        (["x " * 400], "160"),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(generate, arguments, said):
    code, out, err = generate(*arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not out.strip()


def test_a_line_that_is_no_json_is_named(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\nnot json\n', encoding="utf-8")
    code, _, err = generate("--prompts-file", str(file))
    assert code == 2
    assert "line 2" in err


def test_traceback_shows_where_an_error_came_from(model_path):
    with pytest.raises(ValueError, match="max_tokens"):
        main(["generate", "--model", str(model_path), *FAST, "x", "--max-tokens", "0", "--traceback"])


def test_a_prompt_that_is_too_long_does_not_hurt_the_others(generate):
    code, out, err = generate("short", "x " * 400, *GREEDY, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 2
    assert [record["outputs"][0]["finish_reason"] for record in records] == ["length", "prompt_length_exceeded"]
    assert "prompt 1" in err


def test_every_sampling_field_has_a_flag_with_its_description():
    text = build_parser("generate").format_help()
    sub = next(action for action in build_parser("generate")._actions if action.dest == "command")
    text = sub.choices["generate"].format_help()
    for field in dataclasses.fields(SamplingParams):
        flag = "--" + field.name.replace("_", "-")
        assert (flag in text) == (field.name not in ("eos_id", "structured")), flag
    assert "Divides the logits" in text


def test_flags_reach_their_fields():
    from deepinfer.config.engine import SamplingConfig
    from deepinfer.entrypoints.sampling_flags import sampling_params

    given = shlex.split(
        "--temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --presence-penalty 1 --frequency-penalty -1"
        " --repetition-penalty 1.5 --logit-bias 3=1.5,4=-2 --allowed-token-ids 3,4 --max-tokens 9 --min-tokens 2"
        " --ignore-eos --first-n-token-no-eos 1 --stop a --stop b --stop-token-ids 8 --include-stop-str-in-output"
        " --logprobs 3 --prompt-logprobs false --logprobs-mode raw --n 2 --seq-seed -1 --golden-token-ids=-1,5"
        " --no-skip-special-tokens"
    )
    defaults = SamplingConfig(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16, token_blacklist=())
    params = sampling_params(build_parser("generate").parse_args(["generate", *given]), defaults)
    assert params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={3: 1.5, 4: -2},
        allowed_token_ids=[3, 4],
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        first_n_token_no_eos=1,
        stop=["a", "b"],
        stop_token_ids=[8],
        include_stop_str_in_output=True,
        logprobs=3,
        prompt_logprobs=False,
        logprobs_mode="raw",
        n=2,
        seq_seed=-1,
        golden_token_ids=[-1, 5],
        skip_special_tokens=False,
    )


# ---- inspect, make-checkpoint ----------------------------------------------------------------------------------------


def test_inspect_shows_sizes_and_layers(model_path, capsys):
    assert main(["inspect", str(model_path)]) == 0
    out = capsys.readouterr().out
    assert out.strip() == summarize(model_path).render()


def test_inspect_gives_json(model_path, capsys):
    assert main(["inspect", str(model_path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["total"]["num_parameters"] == sum(part["num_parameters"] for part in record["parts"].values())
    assert [layer["mode"] for layer in record["layers"]][:4] == ["none", "none", "full", "reuse"]


def test_inspect_of_a_configuration_alone(model_path, capsys):
    assert main(["inspect", str(model_path / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] is None


def test_inspect_of_nothing_is_an_error(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_make_checkpoint_writes_one_that_loads(tmp_path, capsys):
    directory = tmp_path / "made"
    assert main(["make-checkpoint", str(directory), "--no-vision", "--seed", "3"]) == 0
    assert "all tensors" in capsys.readouterr().out
    assert summarize(directory).config.vision is None
    assert main(["make-checkpoint", str(directory)]) == 2
    assert "--force" in capsys.readouterr().err
    before = (directory / "config.json").read_bytes()
    again = ["make-checkpoint", str(directory), "--force", "--no-vision", "--config", str(directory / "config.json")]
    assert main(again) == 0
    assert (directory / "config.json").read_bytes() == before


def test_make_checkpoint_refuses_a_huge_one(tmp_path, capsys):
    from deepinfer.checkpoint.released import released_config
    from deepinfer.config.model_file import model_config_to_dict

    config = tmp_path / "config.json"
    config.write_text(json.dumps(model_config_to_dict(released_config())), encoding="utf-8")
    assert main(["make-checkpoint", str(tmp_path / "made"), "--config", str(config)]) == 2
    assert "bytes" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_explains_the_configuration(model_path, capsys, monkeypatch):
    monkeypatch.setenv("DEEPINFER_MAX_NUM_SEQS", "12")
    assert main(["doctor", "--model", str(model_path), "--ops", "moe=reference"]) == 0
    out = capsys.readouterr().out
    assert "DEEPINFER_MAX_NUM_SEQS sets max_num_seqs = 12" in out
    assert "scheduler.max_num_seqs = 12" in out
    assert "moe: reference (pinned)" in out
    assert "growth per token" in out
    assert "can start" in out


def test_doctor_reports_what_cannot_work_and_goes_on(model_path, capsys):
    assert main(["doctor", "--model", str(model_path), "--num-blocks", str(1 << 40)]) == 2
    out = capsys.readouterr().out
    assert "num_blocks" in out
    assert "rms_norm: reference" in out
    assert main(["doctor", "--model", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().out


def test_doctor_survives_missing_libraries(model_path, capsys, monkeypatch):
    import importlib.metadata

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert main(["doctor", "--model", str(model_path)]) == 0
    assert "numpy: absent" in capsys.readouterr().out


# ---- demo and default model ------------------------------------------------------------------------------------------


def test_demo_says_what_the_model_is_and_batches_like_it_streams(model_path, capsys):
    assert main(["demo", "--model", str(model_path), "--max-tokens", "4", *FAST]) == 0
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "2 of 2 texts are the same" in out
    assert "What to try next" in out


def test_demo_of_the_trained_model_shows_tasks_and_whether_the_answers_are_right(capsys):
    assert main(["demo", "--max-tokens", "48"]) == 0
    out = capsys.readouterr().out
    assert out.count("tokens/s, right]") + out.count("tokens/s, expected: ") == 4
    assert out.count("tokens/s, right]") >= 3  # how often over many tasks: docs/tiny_model/eval.json
    assert "6 of 6 texts are the same" in out


def test_the_default_model_is_made_once_and_called_random(monkeypatch, tmp_path):
    missing = tmp_path / "missing"
    made = []
    original = default_model_file.make_random_checkpoint
    monkeypatch.setattr(
        default_model_file, "make_random_checkpoint", lambda *args, **kw: made.append(original(*args, **kw))
    )
    path = default_model_file.default_model(missing)
    assert path == default_model_file.default_model(missing)
    assert len(made) == 1
    assert path.parent == tmp_path / "cache" / "deepinfer"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert "RANDOM" in default_model_file.describe_model(path)


def test_an_unfinished_default_model_is_never_used(monkeypatch, tmp_path):
    def fails(directory, *args, **kwargs):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(default_model_file, "make_random_checkpoint", fails)
    with pytest.raises(RuntimeError, match="disk full"):
        default_model_file.default_model(tmp_path / "missing")
    assert list((tmp_path / "cache" / "deepinfer").iterdir()) == []


def test_a_trained_model_comes_first(model_path):
    assert default_model_file.default_model(model_path) == model_path


def test_a_cache_directory_that_cannot_be_made_is_explained(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(default_model_file.default_model, "__defaults__", (tmp_path / "missing",))
    assert main(["generate", "x"]) == 2
    assert "XDG_CACHE_HOME" in capsys.readouterr().err


def test_the_environment_names_the_model(model_path, monkeypatch, capsys):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(model_path))
    assert main(["generate", "x", *FAST, *GREEDY]) == 0
    assert not (Path(default_model_file.user_cache_dir())).exists()
