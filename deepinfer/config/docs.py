"""``docs/configuration.md``, made from the tables of options and variables.

``python -m deepinfer.config.docs FILE`` writes it; a test holds the committed file against this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer.config.env import VARIABLES, WITHOUT_COUNTERPART, Variable
from deepinfer.config.options import AUTO, FOREIGN, OPTIONS, Option

_INTRODUCTION = """\
# Configuration

Written by `make docs` from `deepinfer/config/options.py` and `deepinfer/config/env.py`: change those, not this page.

An argument beats a variable, a variable beats the default. Arguments are keyword arguments of `LLM(...)` and, with
dashes, flags of the command line. Everything is checked before any weight is read: an unknown argument or a value out
of range stops the start with an error that names both and says what to do. Where the value is `auto`, the engine works
it out and logs the result with its reason.
"""


def configuration_page() -> str:
    """The whole page as Markdown."""
    parts = [
        _INTRODUCTION,
        "## Engine arguments\n",
        _table(("Argument", "Type", "Default", "Unit", "Meaning"), _options()),
    ]
    parts += ["## Where values go\n", "The tree is `EngineConfig` in `deepinfer/config/engine.py`.\n"]
    parts += [_table(("Argument", "Field", "Other names"), _fields())]
    parts += ["## Arguments of other engines\n"]
    parts += ["Accepted with the values that ask for what this engine does anyway; any other value is an error.\n"]
    parts += [_table(("Argument", "Accepted", "Because"), _foreign())]
    parts += ["## Environment variables\n"]
    parts += ["A value that does not fit its type stops the start; an unknown `DEEPINFER_*` name is a warning.\n"]
    parts += [_table(("Variable", "Type", "Default", "Sets", "Meaning"), _used_variables())]
    parts += ["### Recognised, not yet used\n"]
    parts += [
        "The features behind these do not exist here yet. Setting one to anything but the harmless value warns.\n"
    ]
    parts += [_table(("Variable", "Type", "Default", "Harmless", "Meaning"), _unused_variables())]
    parts += ["### Known names without effect\n"]
    parts += ["Tuning and debugging knobs of the vendor's engine for parts that this engine does not have:\n"]
    parts += [", ".join(f"`DEEPINFER_{name}`" for name in sorted(WITHOUT_COUNTERPART)) + ".\n"]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _options() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for option in OPTIONS:
        kind = " or ".join(f"`{choice}`" for choice in option.choices) or option.kind.value
        rows.append((f"`{option.name}`", kind, _default(option), option.unit, option.help))
    return rows


def _default(option: Option) -> str:
    if option.default == AUTO and option.rule:
        return f"`auto`: {option.rule}"
    if option.name == "model":
        return "required"
    return "unset" if option.default in (None, ()) else f"`{option.default}`"


def _fields() -> list[tuple[str, ...]]:
    return [
        (f"`{option.name}`", f"`{option.field}`", ", ".join(f"`{alias}`" for alias in option.aliases))
        for option in OPTIONS
    ]


def _foreign() -> list[tuple[str, ...]]:
    return [(f"`{item.name}`", _values(item.accepted), item.note) for item in FOREIGN]


def _values(values: Sequence[Any]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _used_variables() -> list[tuple[str, ...]]:
    return [
        (f"`{item.full_name}`", item.kind.value, item.default, _sets(item), item.help)
        for item in VARIABLES
        if item.is_used
    ]


def _sets(item: Variable) -> str:
    if item.means is None:
        return f"`{item.option}`"
    return f"`{item.option}` to " + ", ".join(f"`{meant}` if `{value}`" for value, meant in item.means.items())


def _unused_variables() -> list[tuple[str, ...]]:
    return [
        (f"`{item.full_name}`", item.kind.value, item.default, _values(item.harmless), item.help)
        for item in VARIABLES
        if not item.is_used
    ]


def main(arguments: Sequence[str]) -> int:
    """Write the page to the file that is named, or print it."""
    if arguments:
        Path(arguments[0]).write_text(configuration_page(), encoding="utf-8")
    else:
        print(configuration_page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
