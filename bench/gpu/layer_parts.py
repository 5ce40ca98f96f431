"""What each part of a decoding step costs on its critical path: the step's time with and without it.

    python bench/gpu/layer_parts.py --json bench/results/h200_layer_parts.json

Kernels overlap (a launch begins while the one before it ends), so times from a profile add up to more than the step.
Here a part is left out of the graph: its calls return what they returned in an earlier step, and the step's time falls
by what the part really costs. Runs on the slice of ``layer_slice.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from layer_slice import Slice, decode_table, numbers, timed

from deepinfer.checkpoint.released_slice import NUM_LAYERS, released_slice
from deepinfer.kernels.dense.linear import Fp8Linear
from deepinfer.kernels.moe import experts_hopper, experts_humming
from deepinfer.kernels.moe.grouped_skinny import GroupedSkinny
from deepinfer.kernels.moe.router import Router
from deepinfer.layers.fused import attention, residual
from deepinfer.layers.fused.compressor import Compressor

Part = tuple[Any, str, Callable[..., bool]]
"""(owner, attribute, which calls)"""


def _shape(*wanted: tuple[int, int]) -> Callable[..., bool]:
    return lambda layer, *_, **__: (layer.num_outputs, layer.num_inputs) in wanted


def _always(*_: Any, **__: Any) -> bool:
    return True


DENSE = {
    "wq_a + wkv": [(1792, 5120)],
    "wq_b": [(32768, 1280), (36864, 1280)],
    "wo_a": [(8192, 4096)],
    "wo_b": [(5120, 8192)],
    "shared gate_up": [(4608, 5120)],
    "shared down": [(5120, 2304)],
}
PARTS: dict[str, list[Part]] = {
    **{name: [(Fp8Linear, "forward", _shape(*shapes))] for name, shapes in DENSE.items()},
    "all dense": [(Fp8Linear, "forward", _always)],
    "hc write, read": [(residual, "hc_write_read", _always)],
    "hc finish": [(residual, "hc_finish", _always)],
    "both hc": [(residual, "hc_write_read", _always), (residual, "hc_finish", _always)],
    "query and key": [(attention, "query_key", _always)],
    "sparse attention": [(attention, "sparse_attention", _always)],
    "index, compressor": [(attention.Attention, "_selection", _always), (Compressor, "publish", _always)],
    "router": [(Router, "forward", _always)],
    "routed experts, swiglu": [
        (experts_humming.HummingExperts, "forward", _always),
        (experts_hopper.HopperExperts, "forward", _always),
    ],
}


class Recorder:
    """Stands in for the calls of a part: keeps their results, or returns those kept."""

    def __init__(self, original: Callable[..., Any], which: Callable[..., bool]) -> None:
        self.original, self.which = original, which
        self.kept: list[Any] = []
        self.place: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.which(*args, **kwargs):
            return self.original(*args, **kwargs)
        if self.place is None:
            self.kept.append(self.original(*args, **kwargs))
            return self.kept[-1]
        self.place += 1
        return self.kept[(self.place - 1) % len(self.kept)]


@contextmanager
def stand_in(parts: list[Part]) -> Iterator[list[Recorder]]:
    """Recorders in the place of the parts' functions."""
    recorders = []
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
    try:
        for owner, name, which in parts:
            recorder = Recorder(getattr(owner, name), which)
            is_method = isinstance(owner, type)
            # A plain function, so that it binds to its object like the method it stands for.
            setattr(owner, name, (lambda *a, _r=recorder, **k: _r(*a, **k)) if is_method else recorder)
            recorders.append(recorder)
        yield recorders
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def wait_for_order() -> None:
    """Let the experts' products wait before they read the order of the pairs: what they rely on may be left out."""
    original = GroupedSkinny.__call__

    def late(self: GroupedSkinny, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | {"early": False}))

    GroupedSkinny.__call__ = late  # type: ignore[method-assign]


@torch.inference_mode()
def measure(subject: Slice, batch: int, context: int) -> dict[str, Any]:
    """Microseconds per layer of the whole step, and by how much it falls without each part."""
    table, tables = subject.inputs(decode_table(batch, context, subject.runner.caches.geometry.num_blocks))

    def run() -> None:
        subject.forward(table, tables, keys_first=True)

    def layer_us() -> float:
        graph = subject.capture(run)
        return 1e3 * statistics.median(timed(graph.replay, 7, warm_up=2)) / NUM_LAYERS

    whole = layer_us()
    saved = {}
    for name, parts in PARTS.items():
        with stand_in(parts) as recorders:
            run()
            for recorder in recorders:
                recorder.place = 0
            saved[name] = whole - layer_us()
    again = layer_us()
    print(f"B={batch}: {whole:.1f}, {again:.1f} us; without " + ", ".join(f"{n} {us:.1f}" for n, us in saved.items()))
    return {"batch": batch, "context": context, "layer_us": whole, "again_us": again, "saved_us": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--num-blocks", type=int, default=8000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wait_for_order()
    subject = Slice(released_slice(), "faithful", args.num_blocks, max(args.batches) + 2)
    results = [measure(subject, batch, args.context) for batch in args.batches]
    print(f"{'us per layer':24s}" + "".join(f"{result['batch']:10d}" for result in results))
    print(f"{'whole':24s}" + "".join(f"{result['layer_us']:10.1f}" for result in results))
    for name in PARTS:
        print(f"{name:24s}" + "".join(f"{result['saved_us'][name]:10.1f}" for result in results))
    if args.json is not None:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__},
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
