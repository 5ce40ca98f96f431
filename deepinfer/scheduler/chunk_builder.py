"""From "this sequence gets so many rows" to the chunk that the worker reads, and back from its results."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from deepinfer.messages import PLACEHOLDER_TOKEN, Chunk
from deepinfer.scheduler.sequence import Sequence


def build_chunk(sequence: Sequence, num_rows: int, step_id: int, history_len: int) -> Chunk:
    """Make the chunk of the next ``num_rows`` rows and count them as in flight.

    The block table has to cover the rows. Only ids that are needed are copied, so the cost does not grow with the
    length of the sequence.
    """
    start = sequence.num_scheduled
    end = start + num_rows
    is_prefill = start < sequence.num_prefill
    if is_prefill:
        num_sampled = int(end == sequence.num_prefill)
    else:
        num_sampled = num_rows
        # The worker fills placeholders from the step just before; any older token has been committed by now.
        is_fresh = sequence.num_pending == 0 or sequence.last_step == step_id - 1
        assert is_fresh, f"{sequence.request_id}: placeholder of step {sequence.last_step} in step {step_id}"
    prefix = sequence.prefix
    chunk = Chunk(
        request_id=sequence.request_id,
        start=start,
        token_ids=sequence.slice_ids(start, end, PLACEHOLDER_TOKEN),
        history=tuple(sequence.token_ids[max(0, start - history_len) : start]),
        block_table=sequence.table(),
        state_slot=sequence.state_slot,
        num_sampled=num_sampled,
        is_prefill=is_prefill,
        window_floor=prefix.window_floor,
        entry_floor=prefix.entry_floor,
        decoder_floor=prefix.decoder_floor,
    )
    sequence.num_in_flight += num_rows
    sequence.num_pending += num_sampled
    sequence.last_step = step_id
    return chunk


def commit_chunk(sequence: Sequence, chunk: Chunk, new_tokens: Mapping[str, Items[int]]) -> bool:
    """Count the chunk's rows as computed and append its tokens. Returns whether there were any.

    Of rows that are sampled, as many count as gave a token: a rejected draft is not computed.
    """
    num_rows, num_sampled, count = len(chunk.token_ids), chunk.num_sampled, 0
    if num_sampled:
        tokens = new_tokens.get(chunk.request_id, ())
        count = len(tokens)
        assert 1 <= count <= num_sampled, f"{chunk.request_id}: {count} tokens for {num_sampled} sampled rows"
        sequence.append_tokens(tokens)
    sequence.num_in_flight -= num_rows
    sequence.num_pending -= num_sampled
    sequence.num_computed += num_rows - num_sampled + count
    return count > 0
