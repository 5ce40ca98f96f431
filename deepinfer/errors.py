"""The error tree: every error says what was given, why it cannot work, and what to do.

Errors that a caller can act on derive from :class:`EngineError`. Those about a value that the caller chose are also
``ValueError`` (so that code written for other engines catches them), a missing file is also ``FileNotFoundError``.
``assert`` is for our own invariants.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that a user can act on.

    Args:
        what: the value or event that we saw.
        why: the rule that it meets.
        fix: the next thing to try.
    """

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        advice = fix[:1].upper() + fix[1:]
        sentences = [text if text.endswith(("?", ".")) else text + "." for text in (f"{what}: {why}", advice)]
        super().__init__(" ".join(sentences))
        self.what = what
        self.why = why
        self.fix = fix


class ConfigError(EngineError, ValueError):
    """A model or engine configuration value that cannot work."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint whose files or tensors do not fit its configuration."""


class CheckpointFileError(CheckpointError, FileNotFoundError):
    """A file or directory of a checkpoint is missing."""


class RequestError(EngineError, ValueError):
    """A request that is refused before anything is queued.

    Args:
        field: name of the field at fault, such as ``temperature`` or ``prompts[3]``.
        value: the value that was given.
    """

    def __init__(self, field: str, value: object, *, why: str, fix: str) -> None:
        try:
            shown = repr(value)
        except RecursionError:
            shown = f"a deeply nested {type(value).__name__}"
        if len(shown) > 80:
            shown = shown[:60] + f"... ({len(shown)} characters)"
        super().__init__(f"{field} is {shown}", why=why, fix=fix)
        self.field = field
        self.value = value


class CapacityError(EngineError, RuntimeError):
    """The machine's memory or a configured limit cannot hold what was asked for."""
