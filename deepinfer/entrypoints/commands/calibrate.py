"""``deepinfer calibrate``: temperatures of the draft's confidence, fitted to logs of a running engine."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from deepinfer.config.flags import path_argument
from deepinfer.engine.speculation_setup import CALIBRATION_FILE
from deepinfer.errors import ConfigError
from deepinfer.speculative.calibration import MIN_ROWS, Calibration, calibrate

_FEW_ROWS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "logs", nargs="+", type=path_argument, metavar="LOG", help="files written with --confidence-log"
    )
    parser.add_argument(
        "--output",
        type=path_argument,
        metavar="FILE",
        help=f"where the temperatures go; named {CALIBRATION_FILE} beside a checkpoint, its engine finds them "
        f"(default: {CALIBRATION_FILE} here)",
    )
    parser.add_argument("--num-drafts", type=int, metavar="N", help="refuse logs of another number of drafts per step")


def run(namespace: argparse.Namespace) -> int:
    """Fit, write, and show what it achieved on the logs."""
    output = (namespace.output or Path(CALIBRATION_FILE)).expanduser()
    if output.is_dir():
        output /= CALIBRATION_FILE
    if any(path.expanduser().resolve() == output.resolve() for path in namespace.logs):
        raise ConfigError(f"the output is {str(output)!r}", why="it is also one of the logs", fix="name another file")
    if namespace.num_drafts is not None and namespace.num_drafts < 1:
        raise ConfigError(f"--num-drafts is {namespace.num_drafts}", why="it counts drafts", fix="give >= 1")
    try:
        found = calibrate([path.expanduser() for path in namespace.logs], output, namespace.num_drafts)
    except OSError as error:
        raise ConfigError(
            f"the output is {str(output)!r}",
            why=f"it cannot be written ({error.strerror})",
            fix="name a file that can be written",
        ) from error
    print(_table(found))
    if max(found.num_rows) < _FEW_ROWS:
        print(f"Only {max(found.num_rows)} observations: take the numbers with caution, or log more steps.")
    print(f"Written to {output}. Use it beside the checkpoint, or with --confidence-temperatures {_flag(found)}")
    return 0


def _table(found: Calibration) -> str:
    lines = ["draft  observations  temperature  calibration error: before   after"]
    columns = zip(found.num_rows, found.temperatures, found.errors_before, found.errors_after, strict=True)
    for slot, (rows, temperature, before, after) in enumerate(columns, start=1):
        note = "" if rows >= MIN_ROWS else f"  (fewer than {MIN_ROWS}: left at 1)"
        lines.append(f"{slot:5}  {rows:12}  {temperature:11.3f}  {_percent(before):>26}  {_percent(after):>6}{note}")
    return "\n".join(lines)


def _percent(error: float) -> str:
    return "-" if math.isnan(error) else f"{100 * error:.1f} %"


def _flag(found: Calibration) -> str:
    return ",".join(f"{temperature:.4g}" for temperature in found.temperatures)
