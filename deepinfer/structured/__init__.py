"""Structured output: descriptions of a language, grammars compiled in worker processes, and token masks."""
