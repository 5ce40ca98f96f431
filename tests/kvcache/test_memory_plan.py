"""The memory plan adds up, says how, and refuses what cannot fit."""

from __future__ import annotations

import pytest

from deepinfer.errors import CapacityError
from deepinfer.kvcache.memory_plan import MemoryItem, StepShape, plan_memory, step_reserves
from deepinfer.kvcache.sizing import CacheItem, CacheSizes, blocks_for, cache_sizes
from deepinfer.kvcache.sublayer_memory import sublayer_bytes
from tests.kvcache.test_sizing import model, released_text

GB = 10**9
SIZES = CacheSizes("faithful", (CacheItem("keys", 128, 100),), (CacheItem("ring", 10, 1000),))


def plan(**changes):
    values = {
        "device_bytes": 1_000_000,
        "weights": {"experts": 500_000, "dense": 100_000},
        "reserves": (MemoryItem("context", 50_000),),
        "sizes": SIZES,
        "num_slots": 5,
        "max_num_seqs": 4,
        "max_model_len": 300,
    }
    return plan_memory(**{**values, **changes})


def test_every_byte_has_an_owner():
    made = plan(max_num_seqs=100)
    assert made.num_blocks == (350_000 - 50_000) // 12_800
    together = made.weight_bytes + made.reserve_bytes + made.slot_bytes + made.block_bytes + made.unused_bytes
    assert together == made.device_bytes
    assert 0 <= made.unused_bytes < SIZES.block_bytes


def test_no_more_blocks_than_can_be_used():
    made = plan()
    assert made.num_blocks == 4 * 3 + 1
    assert "all that could be used" in "\n".join(made.lines())
    assert "of 301 wanted" in "\n".join(plan(max_num_seqs=100).lines())


def test_fraction_is_of_what_weights_and_steps_leave():
    assert plan(max_num_seqs=100, fraction=0.5).num_blocks == (175_000 - 50_000) // 12_800


def test_agrees_with_the_division_of_cache_memory():
    made = plan(max_num_seqs=100)
    assert made.num_blocks == blocks_for(350_000, SIZES, 5).num_blocks


def test_lines_show_the_arithmetic():
    text = "\n".join(plan().lines())
    for part in ("experts: 500,000 bytes", "1 x (1,000,000 - 600,000 - 50,000) = 350,000", "5 x 10,000 = 50,000",
                 "13 x 12,800 = 166,400", "room for 1,536 tokens"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("device_bytes", [0, 600_000, 700_000, 751_199])
def test_less_than_one_sequence_is_an_error_with_the_arithmetic(device_bytes):
    with pytest.raises(CapacityError, match="a sequence of 300 tokens needs 4") as caught:
        plan(device_bytes=device_bytes)
    assert "state slots: 5 x 10,000" in str(caught.value)
    assert plan(device_bytes=751_200).num_blocks == 4


def test_given_blocks_are_kept_or_refused():
    assert plan(num_blocks=20).num_blocks == 20
    with pytest.raises(CapacityError, match="given number of blocks needs 30"):
        plan(num_blocks=30)


def test_windows_only_need_no_block_memory():
    sizes = CacheSizes("faithful", (), SIZES.slot_items)
    assert plan(sizes=sizes).num_blocks == 13
    with pytest.raises(CapacityError):
        plan(sizes=sizes, device_bytes=650_000)


def test_reserves_grow_with_the_step():
    text = released_text()
    small = sum(item.num_bytes for item in step_reserves(text, StepShape(256, 256, 10)))
    large = sum(item.num_bytes for item in step_reserves(text, StepShape(16384, 256, 10)))
    assert 1 * GB < small < 2 * GB
    assert 4 * GB < large < 12 * GB
    assert any("16,384 rows" in str(item) for item in step_reserves(text, StepShape(16384, 256)))


def test_one_sublayer_runs_at_a_time():
    text = released_text()
    items = {item.name: item for item in step_reserves(text, StepShape(8192, 256))}
    largest = max(sublayer_bytes(text, 8192).values())
    assert items["sublayer"].num_bytes == largest
    assert f"experts {largest:,}" in str(items["sublayer"]), "which one it is, and what the others take"
    drafting = {item.name: item for item in step_reserves(text, StepShape(8192, 256, num_drafts=5))}
    assert items["features for drafts"].num_bytes == 0
    assert drafting["features for drafts"].num_bytes == 3 * 8192 * 5120 * 2


def test_a_slice_of_the_released_model_on_one_large_gpu():
    sliced = model(
        num_hidden_layers=12,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 6),
        index_source_layer_ids=(2, 6, 8),
        candidate_source_layer_id=6,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
    )
    made = plan_memory(
        device_bytes=int(139.8 * 2**30),
        weights={"stored": 91_354_395_680},
        reserves=step_reserves(sliced.text, StepShape(16384, 256, 40)),
        sizes=cache_sizes(sliced, "faithful"),
        num_slots=308,
        max_num_seqs=256,
        max_model_len=40_960,
        fraction=0.9,
    )
    assert made.num_blocks == made.num_wanted == 256 * 320 + 1
    assert made.unused_bytes > 10 * GB
