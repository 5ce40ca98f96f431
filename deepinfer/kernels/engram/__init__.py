"""Engram, the n-gram memory. All Triton.

:mod:`.gather` hashes n-grams, gathers the table's rows and dequantises them: :func:`deepinfer.ops.engram.ngram_context`
and ``engram_rows``. :mod:`.gate` is :func:`deepinfer.ops.engram.engram_gate`. :mod:`.placement` is host code: the table
on the device, in pinned memory or in a file, and how rows arrive in time.
"""
