"""``deepinfer eval``: task suites, perplexity and draft metrics of any engine configuration."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from deepinfer.config.engine import MAX_DRAFTS
from deepinfer.config.env import read_environment
from deepinfer.config.flags import path_argument
from deepinfer.config.model_file import load_model_config
from deepinfer.entrypoints.argument_parser import ArgumentParser
from deepinfer.entrypoints.benchmark.record import environment_record
from deepinfer.entrypoints.engine_args import add_model_arguments, load_llm, model_arguments
from deepinfer.entrypoints.llm import LLM
from deepinfer.errors import ConfigError
from deepinfer.evaluation.ablation import Ablation, ablated
from deepinfer.evaluation.compare import compare, render_comparison
from deepinfer.evaluation.evaluate import Evaluation, Plan, evaluate
from deepinfer.evaluation.model_digest import model_digest
from deepinfer.evaluation.perplexity import QUICK_WINDOWS
from deepinfer.evaluation.report import as_json, plain, render
from deepinfer.evaluation.suite import DEFAULT_SAMPLES, QUICK_SAMPLES, SUITES, cells_of, tasks_of

_ROOT = Path(__file__).parents[3]
_MAX_SEQS = 32
_FILE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.epilog = "docs/evaluation.md explains tasks, intervals and the JSON record."
    parser.add_argument("--suite", default="all", metavar="NAME,...", help=f"of {', '.join(SUITES)} (default: all)")
    parser.add_argument(
        "--samples",
        type=_samples,
        metavar="N,LENGTH=N,...",
        help=f"samples per task and context length, such as 200,4096=50 (default: {DEFAULT_SAMPLES})",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"a first impression: {QUICK_SAMPLES} samples, short texts"
    )
    parser.add_argument("--eval-seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write the record")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar="FLAGS",
        help='two more sets of engine flags, such as "--prefix-cache off" "--prefix-cache bounded": both are'
        " evaluated on the same samples (an empty text is no flags; begin with a space if it is a single word)",
    )
    parser.add_argument("--ablations", action="store_true", help="also without single mechanisms of the model")
    parser.add_argument(
        "--warm-tokens",
        type=int,
        default=0,
        metavar="TOKENS",
        help="ask for each prompt without its last so many tokens first, so that the prefix cache is used (default: 0)",
    )
    add_model_arguments(parser)


def run(namespace: argparse.Namespace) -> int:
    """Evaluate and print; exit code 1 if a request ended with an error."""
    plan = _plan(namespace)
    _check_output(namespace.json)
    if namespace.compare and namespace.ablations:
        raise ConfigError("--compare and --ablations", why="each has tables of its own", fix="run them one by one")
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    record = _compared(namespace, plan, console) if namespace.compare else _single(namespace, plan, console)
    if namespace.json is not None:
        text = json.dumps(_relative(record), indent=1, ensure_ascii=False)
        namespace.json.write_text(text + "\n", encoding="utf-8")
    parts = [record["a"], record["b"]] if namespace.compare else [record]
    return 1 if any(part["num_errors"] for part in parts) else 0


def _check_output(file: Path | None) -> None:
    """Before the work, not after it."""
    if file is None:
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--json is {file}", why="its directory does not exist", fix="make it first")
    if file.is_dir():
        raise ConfigError(f"--json is {file}", why="that is a directory", fix="name a file in it")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ConfigError(f"--json is {file}", why="it cannot be written", fix="name a file that can be")


def _plan(namespace: argparse.Namespace) -> Plan:
    if namespace.warm_tokens < 0:
        raise ConfigError(f"--warm-tokens is {namespace.warm_tokens}", why="it counts tokens", fix="give >= 0")
    quick = {0: QUICK_SAMPLES} if namespace.quick else {0: DEFAULT_SAMPLES}
    tasks = tasks_of([name.strip() for name in namespace.suite.split(",")])
    samples = namespace.samples or quick
    lengths = {cell.length for cell in cells_of(SUITES["all"])}
    for length in samples.keys() - lengths - {0}:
        known = ", ".join(map(str, sorted(lengths)))
        raise ConfigError(
            f"--samples names the length {length}", why=f"the lengths of the tasks are {known}", fix="name one of these"
        )
    return Plan(
        tasks=tasks,
        samples=samples,
        seed=namespace.eval_seed,
        max_windows=QUICK_WINDOWS if namespace.quick else None,
        batch=_MAX_SEQS,
        warm_tokens=namespace.warm_tokens,
    )


def _single(namespace: argparse.Namespace, plan: Plan, console: Console) -> dict[str, Any]:
    with _load(namespace) as llm:
        origin = _origin(llm, plan)
        whole = _evaluate(llm, plan, "")
        record = {**as_json(whole), **origin}
    if namespace.ablations:
        record["ablations"] = {each.value: _ablation(namespace, plan, each, whole) for each in Ablation}
    console.print(render(record))
    return record


def _ablation(namespace: argparse.Namespace, plan: Plan, ablation: Ablation, whole: Evaluation) -> dict[str, Any]:
    """Scores without one mechanism, and how they differ from those of the whole model on the same samples."""
    with _load(namespace) as llm, ablated(llm.engine, ablation, plan.seed):
        found = _evaluate(llm, plan, ablation.value)
    changes = compare(whole, found)
    scores, before = as_json(found), as_json(whole)
    return {
        "tasks": {
            task: {
                length: {"exact_match": row["b"], "whole_model": row["a"], "change": row["difference"], "n": row["n"]}
                for length, row in lengths.items()
            }
            for task, lengths in changes["tasks"].items()
        },
        "perplexity": scores["perplexity"],
        "whole_model_perplexity": before["perplexity"],
    }


def _compared(namespace: argparse.Namespace, plan: Plan, console: Console) -> dict[str, Any]:
    records, evaluations = [], []
    for name, flags in zip("AB", namespace.compare, strict=True):
        with _load(_with_flags(namespace, flags)) as llm:
            origin = _origin(llm, plan)
            evaluations.append(_evaluate(llm, plan, name))
            records.append({**as_json(evaluations[-1]), **origin, "flags": flags.strip()})
    record = {"a": records[0], "b": records[1], "differences": compare(*evaluations)}
    for name, part in zip("AB", records, strict=True):
        console.print(f"\n{name}: {part['flags'] or '(no flags)'}")
        console.print(render(part))
    console.print(render_comparison(record["differences"]))
    return record


def _with_flags(namespace: argparse.Namespace, flags: str) -> argparse.Namespace:
    """The same arguments with more engine flags, which win over those that were given to both."""
    parser = ArgumentParser(prog="deepinfer eval")
    add_model_arguments(parser)
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"--compare has the flags {flags!r}", why=f"{error}", fix="close what is open") from error
    given = vars(parser.parse_args(words))
    return argparse.Namespace(
        **{**vars(namespace), **{name: value for name, value in given.items() if value not in (None, "")}}
    )


def _load(namespace: argparse.Namespace) -> LLM:
    defaults: dict[str, Any] = {"max_num_seqs": _MAX_SEQS, "disable_log_stats": True}
    if "num_speculative_tokens" not in read_environment().options:
        # Left open, an engine stops drafting where its times say so, and tokens per step would depend on the machine.
        text = load_model_config(model_arguments(namespace)["model"]).text
        defaults["num_speculative_tokens"] = (
            min(text.dspark_block_size, MAX_DRAFTS) if text.num_nextn_predict_layers else 0
        )
    return load_llm(namespace, **defaults)


def _evaluate(llm: LLM, plan: Plan, name: str) -> Evaluation:
    with tqdm(disable=not sys.stderr.isatty(), unit="sample") as bar:
        return evaluate(llm, plan, _progress(bar, name))


def _progress(bar: Any, name: str) -> Callable[[str, int, int], None]:
    """Moves ``bar``; where there is no terminal, says in a line what begins."""
    last = ""

    def note(what: str, done: int, total: int) -> None:
        nonlocal last
        label = f"{name}: {what}" if name else what
        if bar.disable:
            if label != last:
                print(f"{label} ({done} of {total} done)", file=sys.stderr, flush=True)
            last = label
            return
        bar.set_description_str(label, refresh=False)
        if bar.total != total:
            bar.reset(total)
        bar.n = done
        bar.refresh()

    return note


def _origin(llm: LLM, plan: Plan) -> dict[str, Any]:
    """Where scores come from; asked before they are made, since a source tree may change meanwhile."""
    config = llm.engine.config
    return {
        "model": {"path": str(config.model.path), "digest": model_digest(Path(config.model.path))},
        "numerics": config.numerics,
        "seed": plan.seed,
        "samples": {str(length): count for length, count in plan.samples.items()},
        "command": shlex.join(["deepinfer", *sys.argv[1:]]),
        **environment_record(config),
    }


def _relative(value: Any) -> Any:
    """Paths inside the source tree without the way to it: a record may be read elsewhere."""
    if isinstance(value, dict):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item) for item in value]
    return value.replace(f"{_ROOT}/", "") if isinstance(value, str) else plain(value)


def _samples(text: str) -> dict[int, int]:
    """``"200,4096=50"``: 0 stands for every length without a number of its own."""
    found = {0: DEFAULT_SAMPLES}
    for part in text.split(","):
        length, separator, count = part.rpartition("=")
        key, number = int(length) if separator else 0, int(count)
        if number < 1 or key < 0:
            raise ValueError("numbers >= 1")
        found[key] = number
    return found


_samples.__name__ = "list N,LENGTH=N,... of numbers >= 1"
