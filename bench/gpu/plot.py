"""Draw the layer slice's decode times beside the floor, the goal and the peer.

python bench/gpu/plot.py bench/results/h200_layer_slice.json bench/results/h200_layer_slice.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def decode_points(record: dict[str, Any], context: int) -> list[dict[str, Any]]:
    """Plain decode measurements at one context, by batch."""
    found = [
        result
        for result in record["results"]
        if result["name"] == f"decode B={result.get('batch')} context={context}" and "layer_us" in result
    ]
    return sorted(found, key=lambda result: result["batch"])


def draw(record: dict[str, Any], file: Path) -> None:
    """Microseconds per layer on the left, what is above the floor on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = decode_points(record, 1024)
    batches = [point["batch"] for point in points]
    series = {
        "floor": [point["floor_us"] for point in points],
        "this engine": [point["layer_us"] for point in points],
        "vLLM 0.33": [point["vllm_layer_us"] for point in points],
        "goal": [point["target_layer_us"] for point in points],
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    colours = {"floor": "C7", "this engine": "C0", "vLLM 0.33": "C1", "goal": "C2"}
    for name, values in series.items():
        style = "--" if name in ("floor", "goal") else "o-"
        left.plot(batches, values, style, label=name, color=colours[name])
        if name != "floor":
            above = [value - floor for value, floor in zip(values, series["floor"], strict=True)]
            right.plot(batches, above, style, label=name, color=colours[name])
    left.set(xscale="log", yscale="log", xlabel="sequences", ylabel="us per layer", title="decode, context 1,024")
    right.set(xscale="log", xlabel="sequences", ylabel="us per layer", title="above the floor")
    for axes in (left, right):
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{record['num_layers']} layers of true width, {record['machine']['gpu']}, {record['precision']}")
    figure.tight_layout()
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.json.read_text(encoding="utf-8")), args.image)


if __name__ == "__main__":
    main()
