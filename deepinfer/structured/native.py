"""The compiled part of the grammar library, loaded without its Python layer.

That layer imports whole frameworks (transformers, pydantic, triton) for conveniences that are not used here. The
compiled part needs ``apache-tvm-ffi`` only, which keeps an installation small and a worker's start short.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from deepinfer.errors import ConfigError

REQUIREMENT = "xgrammar>=0.2.9,<0.3"
_BINDINGS = "libxgrammar_bindings.so"
_RAW_BYTES = 0
"""Vocabulary type: entries are the bytes of the tokens."""


@cache
def bindings() -> ModuleType:
    """The library's classes: TokenizerInfo, GrammarCompiler, CompiledGrammar, GrammarMatcher.

    Raises:
        ConfigError: it is not installed, or has another layout than the versions of :data:`REQUIREMENT`.
    """
    loaded = sys.modules.get("xgrammar.tvm_ffi_binding._ffi_api")
    if loaded is not None:  # somebody imported the whole library; its classes can be registered once only
        return loaded
    found = importlib.util.find_spec("xgrammar")  # does not run the package
    if found is None or not found.submodule_search_locations:
        raise _missing("it is not installed")
    folder = Path(found.submodule_search_locations[0])
    source = folder / "tvm_ffi_binding" / "_ffi_api.py"
    try:
        import tvm_ffi
    except ImportError as error:
        raise _missing(f"apache-tvm-ffi is missing ({error})") from error
    if not source.is_file() or not (folder / _BINDINGS).is_file():
        raise _missing(f"version {metadata.version('xgrammar')} is laid out differently")
    tvm_ffi.load_module(str(folder / _BINDINGS), keep_module_alive=True)
    # The name that it has within its package: were it registered twice under two, objects would change class.
    spec = importlib.util.spec_from_file_location("deepinfer.structured._library", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _missing(why: str) -> ConfigError:
    return ConfigError(
        "structured output needs the package xgrammar",
        why=why,
        fix=f'pip install apache-tvm-ffi && pip install --no-deps "{REQUIREMENT}"',
    )


def tokenizer_info(token_bytes: Sequence[bytes], eos_id: int) -> Any:
    """The vocabulary as the library wants it.

    Args:
        token_bytes: bytes of each id of the model's vocabulary; empty for ids that no grammar may ever allow.
    """
    return bindings().TokenizerInfo(list(token_bytes), _RAW_BYTES, len(token_bytes), [eos_id], False)


def compile_ebnf(info: Any, text: str, root: str, num_threads: int) -> Any:
    """A compiled grammar. Raises RuntimeError with the library's message if the text is malformed."""
    return bindings().GrammarCompiler(info, num_threads, False, -1, False).compile_grammar_from_strings(text, root)
