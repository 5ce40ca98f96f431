"""The shape of ``so_args``, the description of structured output (engine spec 1.6). Grammars are compiled elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from deepinfer.errors import RequestError
from deepinfer.sampling.param_checks import RequestTypeError, check_choice, check_int, check_token_ids, unknown_name

SCHEMA_TYPES = ("json", "regex", "ebnf")
_KEYS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")
_REFUSED = {
    "serialized": "a compiled grammar cannot be handed in",
    "bound_token_ids": "only one bound token is supported",
}


def check_so_args(value: object) -> dict[str, Any] | None:
    """Check the keys and types of ``so_args`` and return a private copy.

    Keys: ``schema_type`` ('json', 'regex' or 'ebnf'), ``schema`` (text), and optionally ``trigger_token_ids`` (the
    grammar starts after exactly these ids) and ``bound_token_id`` (forces the rest of the trigger; needs a trigger).

    Raises:
        RequestError: names the key at fault.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestTypeError("so_args", value, why="it has to be a dict", fix=f"give the keys {', '.join(_KEYS[:2])}")
    for key in value:
        if key in _REFUSED:
            raise RequestError(f"so_args[{key!r}]", value[key], why=_REFUSED[key], fix="see the keys of so_args")
        if key not in _KEYS:
            raise unknown_name("so_args key", key, _KEYS)
    for key in ("schema_type", "schema"):
        if key not in value:
            raise RequestError("so_args", dict(value), why=f"the key {key!r} is missing", fix=f"add {key!r}")
    check_choice("so_args['schema_type']", value["schema_type"], SCHEMA_TYPES)
    if not isinstance(value["schema"], str):
        raise RequestTypeError(
            "so_args['schema']", value["schema"], why="it has to be text", fix="turn a dict into text with json.dumps"
        )
    checked = copy.deepcopy(dict(value))
    if value.get("trigger_token_ids") is not None:
        checked["trigger_token_ids"] = list(check_token_ids("so_args['trigger_token_ids']", value["trigger_token_ids"]))
    if value.get("bound_token_id") is not None:
        checked["bound_token_id"] = check_int("so_args['bound_token_id']", value["bound_token_id"], 0)
        if not checked.get("trigger_token_ids"):
            raise RequestError(
                "so_args['bound_token_id']",
                value["bound_token_id"],
                why="it forces the rest of a trigger, and there is no trigger",
                fix="add trigger_token_ids",
            )
    return checked
