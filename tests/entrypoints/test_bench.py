"""``deepinfer bench``: what it measures adds up, and its record says where it comes from."""

from __future__ import annotations

import importlib.util
import json

import pytest

from deepinfer.checkpoint.tiny import tiny_config
from deepinfer.entrypoints.benchmark.measure import DecodeRecord, PrefillRecord, measure_decode, measure_prefill
from deepinfer.entrypoints.benchmark.operation_counts import prefill_work
from deepinfer.entrypoints.benchmark.record import decode_rows, prefill_rows
from deepinfer.entrypoints.cli import main


def test_a_record_holds_measurements_ratios_and_origins(model_path, tmp_path, capsys):
    file = tmp_path / "record.json"
    sizes = ["--lengths", "32,144,4096", "--batches", "1,3", "--steps", "2", "--max-model-len", "160"]
    assert main(["bench", "--model", str(model_path), *sizes, "--num-threads", "1", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "skipping prompts of 4096 tokens" in err
    assert "compare ratios" in out
    record = json.loads(file.read_text(encoding="utf-8"))
    assert [row["prompt_tokens"] for row in record["prefill"]] == [32, 144]
    assert [row["cached_share"] for row in record["prefix_cache"]] == [0, 128 / 144], "whole blocks are found again"
    assert [row["batch"] for row in record["decode"]] == [1, 3]
    for row in record["decode"]:
        assert {"schedule", "batch", "forward", "sample", "commit"} <= set(row["phase_shares"])
        assert row["num_tokens"] == row["batch"] * row["num_steps"]
        assert 0 < sum(row["phase_shares"].values()) <= 1
        assert 0 <= row["overhead_share"] < 1
        assert {"moe", "linear", "sparse_attention", "index_full"} <= set(row["op_seconds"])
    assert {"machine", "versions", "commit", "config", "seed", "command", "load_average", "memory"} <= set(record)
    assert record["config"]["scheduler"]["max_num_seqs"] == 3
    assert record["memory"]["peak_rss_bytes"] >= record["memory"]["peak_rss_after_load_bytes"] > 0


def test_measurements_leave_nothing_in_the_engine(llm):
    prefill = measure_prefill(llm.engine, 100, seed=0)
    assert prefill.num_steps == 1
    assert 0 < sum(prefill.op_seconds.values()) < prefill.seconds
    decode = measure_decode(llm.engine, 3, 2, seed=0)
    assert decode.batch == 3
    # The llm fixture checks that nothing is left; the operators have to be the plain ones again as well.
    assert not any(
        function.__name__ == "timed" for function in vars(llm.engine.runner.model.ops).values() if callable(function)
    )


def test_overhead_is_what_is_neither_forward_nor_sampler():
    phases = {"schedule": 0.5, "batch": 0.5, "forward": 6.0, "sample": 2.0, "commit": 0.5}
    record = DecodeRecord(4, 10, 40, 10.0, phases, {"moe": 1.0})
    (row,) = decode_rows([record])
    assert row["overhead_share"] == pytest.approx(0.2)
    assert row["tokens_per_s"] == pytest.approx(4.0)
    assert row["step_ms"] == pytest.approx(1000)


def test_required_cost_grows_with_the_scanned_entries_only():
    config = tiny_config()
    # 10 us per token outside the scan and 4 ns per scored entry, at every length
    records = []
    for length in (1024, 4096):
        scan_s = 4e-9 * prefill_work(config, length).scored_entries * length
        records.append(PrefillRecord(length, 1, 10e-6 * length + scan_s, {"index_full": scan_s, "moe": 1e-9}, 1))
    first, second = prefill_rows(records, config)
    assert first["growth"] == 1
    assert second["growth"] > 1.1
    assert second["measured_over_required"] == pytest.approx(1)
    assert second["scan_ns_per_entry"] == pytest.approx(4)
    assert second["us_per_token_outside_scan"] == pytest.approx(10)


def test_work_per_token_is_constant_but_for_the_scan():
    config = tiny_config()
    short, long = prefill_work(config, 4096), prefill_work(config, 16384)
    assert short.weights == long.weights
    assert short.attention == pytest.approx(long.attention, rel=0.02)
    assert long.scored_entries == pytest.approx(4 * short.scored_entries, rel=0.01)
    # Layer 2 (ratio 2) and layer 4 (ratio 1) score everything: n/4 + n/2 entries on average.
    assert short.scored_entries == pytest.approx(0.75 * 4096, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--steps", "500", "--max-model-len", "160", "--lengths", ""], "--steps is 500"),
        (["--json", "/nowhere/x.json"], "/nowhere"),
    ],
)
def test_bad_arguments_are_refused(model_path, capsys, arguments, said):
    assert main(["bench", "--model", str(model_path), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_says_what_to_install(model_path, capsys):
    assert main(["bench", "--model", str(model_path), "--plot", "x.png"]) == 2
    assert "deepinfer[plots]" in capsys.readouterr().err
