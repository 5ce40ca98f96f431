"""How the rows of a step are divided between decode and prefill, and among the prompts."""

from __future__ import annotations

from deepinfer.config.scheduler import SchedulerConfig
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.step_draft import StepDraft

LARGEST_MIN_CHUNK = 128
"""A prompt does not start with fewer rows than this (or a quarter of a small budget) unless they complete it."""

ROW_PATIENCE_STEPS = 8
"""Without chunks: after so many steps in which only rows were missing, a prompt gets its rows before decode."""


def decode_rows(config: SchedulerConfig, sequence: Sequence) -> int:
    """Rows that one decode step of ``sequence`` takes: its newest token and the drafts behind it.

    Drafts beyond ``max_tokens`` or ``max_model_len`` are not verified: they could not be used. Tokens that are still
    being sampled count as few as they can be for the first limit, and as many for the second, whose rows need memory.
    """
    num_drafts = config.num_speculative_tokens
    if not num_drafts:
        return 1
    if sequence.max_tokens is not None:
        num_drafts = min(num_drafts, sequence.max_tokens - sequence.num_output - min(1, sequence.num_pending) - 1)
    if num_drafts and sequence.max_model_len is not None:
        num_drafts = min(num_drafts, sequence.max_model_len - sequence.num_scheduled - 1)
    return 1 + max(0, num_drafts)


def min_chunk(config: SchedulerConfig) -> int:
    """Fewest rows of a first chunk that does not complete its prompt."""
    return min(LARGEST_MIN_CHUNK, max(1, config.max_num_batched_tokens // 4))


def prefill_share(config: SchedulerConfig, rows_left: int, num_prefilling: int, num_waiting: int) -> int:
    """Rows that each prompt may take before any prompt gets more.

    The rows are divided among the prompts in progress and as many waiting ones as leave each share at
    :func:`min_chunk` rows, but at least one waiting one: a short prompt behind long ones always finds a share.
    """
    wanted = num_prefilling + num_waiting
    sharers = max(num_prefilling + (num_waiting > 0), min(wanted, rows_left // min_chunk(config)))
    return max(1, rows_left // max(1, sharers))


def first_chunk_rows(
    config: SchedulerConfig, sequence: Sequence, share: int, step: StepDraft, is_only: bool, start: int = 0
) -> int:
    """Rows with which a waiting sequence would start in this step; 0 if it should not start now.

    Args:
        share: from :func:`prefill_share`.
        is_only: no other prompt is in progress, so that any progress is better than none.
        start: first row to run; later than 0 after a prefix hit.
    """
    needed = sequence.num_prefill - start
    if not config.chunked_prefill:
        return needed if needed <= step.rows_left else 0
    rows = min(needed, share, step.rows_left)
    return rows if rows == needed or is_only or rows >= min_chunk(config) else 0
