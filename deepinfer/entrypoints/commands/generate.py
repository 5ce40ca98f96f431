"""``deepinfer generate``: complete prompts from arguments, a file or standard input."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from deepinfer.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from deepinfer.entrypoints.engine_args import add_model_arguments, load_llm
from deepinfer.entrypoints.inputs import Prompt
from deepinfer.entrypoints.llm import LLM, GenerationInterrupted
from deepinfer.entrypoints.sampling_flags import add_sampling_flags, sampling_params
from deepinfer.entrypoints.terminal import write
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="one more text; repeatable")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="one prompt per line, or with a name ending in .jsonl one JSON string or object (prompt, prompt_token_ids)"
        " per line; - reads lines from standard input",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt and line on standard output")
    parser.add_argument("--no-stream", action="store_true", help="print a single prompt's text only when it is done")
    add_sampling_flags(parser)
    add_model_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Exit code 2 if a request ended with an error; the others are printed all the same."""
    prompts = _prompts(namespace)
    with load_llm(namespace) as llm:
        params = sampling_params(namespace, llm.engine.config.sampling)
        if len(prompts) == 1 and params.n == 1 and not namespace.json and not namespace.no_stream:
            return _stream(llm, prompts[0], params)
        try:
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
            interrupted = False
        except GenerationInterrupted as error:
            outputs, interrupted = error.outputs, True
        for index, output in enumerate(outputs):
            print(json.dumps(as_json(output, index)) if namespace.json else _as_text(output, index))
        _report_errors(outputs)
        if interrupted:
            return 130
        return 2 if any(output.error for output in outputs) else 0


def _prompts(namespace: argparse.Namespace) -> list[Prompt]:
    prompts: list[Prompt] = [*namespace.prompts, *namespace.prompt]
    if namespace.prompts_file is not None:
        prompts += _prompts_of_file(namespace.prompts_file)
    elif not prompts:
        if sys.stdin.isatty():
            print("Type a prompt, then Ctrl-D:", file=sys.stderr)
        prompts.append(sys.stdin.read().removesuffix("\n"))
    if not prompts:
        raise RequestError("prompts", [], why="there is nothing to continue", fix="give a prompt")
    return prompts


def _prompts_of_file(name: str) -> list[Prompt]:
    try:
        text = _standard_input() if name == "-" else Path(name).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("prompts_file", name, why=str(error), fix="give a readable UTF-8 text file") from error
    lines = [(number, line) for number, line in enumerate(_lines(text), start=1) if line.strip()]
    if not name.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_json_prompt(line, f"{name}, line {number}") for number, line in lines]


def _standard_input() -> str:
    """All of standard input, with the line ends that it has."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(newline="")  # otherwise a lone carriage return is read as a line feed
    return sys.stdin.read()


def _lines(text: str) -> list[str]:
    r"""The lines of a file, without a byte order mark before the first one.

    Only ``\n`` and ``\r\n`` end a line: ``str.splitlines`` also cuts at U+2028, form feeds and other characters that
    may stand in a prompt, and bare in a JSON string.
    """
    return re.split(r"\r?\n", text.removeprefix("\ufeff"))


def _json_prompt(line: str, place: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(place, line, why=f"it is no JSON ({error})", fix="write one JSON value per line") from error
    if not isinstance(value, (str, dict)):
        raise RequestError(place, line, why="a prompt is a JSON string or object", fix='write {"prompt": "..."}')
    return value


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    begin, count, error, reason = time.perf_counter(), 0, None, None
    try:
        for delta in llm.stream(prompt, params):
            write(delta.text)
            count += len(delta.token_ids)
            error, reason = delta.error, delta.finish_reason
    finally:  # an interrupted text ends its line, too
        print(flush=True)
    elapsed_s = max(time.perf_counter() - begin, 1e-9)
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"[{count} tokens, {count / elapsed_s:.1f} tokens/s, finished: {reason}]", file=sys.stderr)
    return 0


def _as_text(output: RequestOutput, index: int) -> str:
    prompt = f"{len(output.prompt_token_ids)} token ids" if output.prompt is None else repr(output.prompt)
    lines = [f"[{index}] {prompt}"]
    lines += [f"  ({each.finish_reason}) {each.text!r}" for each in output.outputs]
    return "\n".join(lines)


def _report_errors(outputs: list[RequestOutput]) -> None:
    for index, output in enumerate(outputs):
        if output.error:
            print(f"error in prompt {index}: {output.error}", file=sys.stderr)


def as_json(output: RequestOutput, index: int) -> dict[str, Any]:
    """A result as JSON values. Log-probabilities are lists of alternatives, the chosen token first."""
    scores = output.prompt_logprobs
    metrics = output.metrics
    return {
        "index": index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_output_as_json(each) for each in output.outputs],
        "prompt_logprobs": None if scores is None else [_entry(each) for each in scores],
        "numerics": output.numerics,
        "time_to_first_token_s": None if metrics is None else metrics.time_to_first_token_s,
        "error": output.error,
    }


def _output_as_json(output: CompletionOutput) -> dict[str, Any]:
    logprobs = output.logprobs
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "cumulative_logprob": output.cumulative_logprob,
        "logprobs": None if logprobs is None else [_entry(each) for each in logprobs],
    }


def _entry(entry: TokenLogprobs | None) -> list[dict[str, Any]] | None:
    return None if entry is None else [{"token_id": token, **value._asdict()} for token, value in entry.items()]
