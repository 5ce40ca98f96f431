"""FP8 products with scales of rows (numerics ``fast``) on a GPU: bits of operands, errors against float64, times.

    python bench/gpu/check_row_scaled.py [--json FILE] [--rows 600,1000,2048,8192]

``bf16`` is what ``faithful`` does. The forms of the product in FP8: scales of rows with and without fast accumulation,
and one scale for everything (without what would have to scale its result). Errors are those of float32 results, the
largest and the root mean square, over the sum of magnitudes. Times are as in check_dense.py, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.dense_cases import (
    LAYER,
    SHAPES,
    exact_product,
    exact_wide,
    guarded,
    linear_of,
    packed_copies,
    random_fp8,
    random_x,
    report,
    results,
    time_us,
)
from deepinfer.kernels.dense import plans, row_scaled
from deepinfer.kernels.dense.linear import Fp8Linear, _cublas
from deepinfer.kernels.dense.linear_triton import q8_round_
from deepinfer.ops.number_formats import q8_round

FLOAT32_OUT, ROUNDED_INPUT = ("gate_up",), ("wo_b",)
"""Products whose result is float32, and those that round their input on the way."""
FORMS = {"rows": False, "rows, fast": True}
"""With scales of rows; whether accumulation is fast."""


def spread_x(rows: int, k: int) -> Tensor:
    """Rounded rows whose groups have magnitudes over many binades."""
    g = torch.Generator(device="cuda").manual_seed(5)
    sizes = torch.exp2(torch.randint(-24, 8, (rows, -(-k // 32)), generator=g, device="cuda").float())
    x = torch.randn(rows, k, generator=g, device="cuda") * sizes.repeat_interleave(32, 1)[:, :k]
    return q8_round(x.bfloat16()).bfloat16()


def check_operands(name: str, n: int, k: int, groups: int) -> None:
    """Codes of weights and activations against plain torch."""
    codes, scales = random_fp8(n, k, integers=False)
    scales[1, 1] = 134
    codes[32:64, 32:64] = 0
    linear = Fp8Linear(codes, scales, groups=groups, is_fast=True)
    made = linear._row_scaled
    assert isinstance(made, row_scaled.RowScaledWeight), f"{name} is not multiplied in FP8"
    stored = row_scaled.StoredRowScaledWeight(codes, scales)
    same = torch.equal(made.codes().view(torch.uint8), stored.codes().view(torch.uint8))
    report(f"{name} codes of the weight", same and torch.equal(made.row_scales, stored.row_scales))
    report(f"{name} widened weight", torch.equal(linear.widen().double(), exact_wide(codes, scales)))
    for rows in (1, 777):
        for x in (random_x(rows, k, False), spread_x(rows, k)):
            found, row_scales = row_scaled.row_codes(x)
            expected = (x.float() / row_scales[:, None]).to(torch.float8_e4m3fn)
            largest = x.float().abs().amax(1)
            tight = ((largest <= 448 * row_scales) & ((largest > 224 * row_scales) | (largest < 1e-4))).all()
            same = torch.equal(found.float(), expected.float())
            raw = (x.float() * 1.37).bfloat16()
            both = row_scaled.row_codes(raw, quantize=True), row_scaled.row_codes(q8_round_(raw.clone()))
            rounds = all(torch.equal(a.float(), b.float()) for a, b in zip(*both, strict=True))
            report(f"{name} codes of {rows} rows", bool(same and tight and rounds), f"{same} {bool(tight)} {rounds}")


def check_product(name: str, n: int, k: int, groups: int, all_rows: tuple[int, ...]) -> None:
    """Whole products, with results that are poisoned before, against float64."""
    codes, scales = random_fp8(n, k, integers=False)
    linear, wide = Fp8Linear(codes, scales, groups=groups, is_fast=True), exact_wide(codes, scales)
    integers = random_fp8(n, k, integers=True)
    whole, whole_wide = Fp8Linear(*integers, groups=groups, is_fast=True), exact_wide(*integers)
    for rows in all_rows:
        x = random_x(rows, groups * k, False)
        expected, magnitude = exact_product(x, wide, groups), exact_product(x.abs(), wide.abs(), groups)
        errors = {}
        for form, fast_accumulation in {**FORMS, "bf16": None}.items():
            if fast_accumulation is not None:
                row_scaled.FAST_ACCUMULATION = fast_accumulation
            linear.use_fast(fast_accumulation is not None)
            out = torch.full((rows, n), torch.nan, dtype=torch.float32, device="cuda")
            error = (linear(x, out).double() - expected) / magnitude
            short = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")
            short_error = ((linear(x, short).double() - expected).abs() / magnitude).max().item()
            errors[form] = error.abs().max().item(), error.square().mean().sqrt().item(), short_error
            ok = errors[form][0] < 2**-8 and errors[form][2] < 2**-7
            if form != "bf16":
                ok = ok and linear.takes_codes(rows)
                exact_x = random_x(rows, groups * k, True)  # sums are exact wherever 14 bits hold them
                found = whole(exact_x, dtype=torch.float32).double()
                target = exact_product(exact_x, whole_wide, groups)
                ok = ok and ((found - target).abs() <= 2.0**-10 * target.abs().amax()).all().item()
            shown = "max {:.1e} rms {:.1e} bf16 result {:.1e}".format(*errors[form])
            report(f"{name} rows {rows} {form}", bool(ok), shown)
        results.append({"shape": name, "rows": rows, "errors": errors})
        linear.use_fast(True)
        row_scaled.FAST_ACCUMULATION = True
        spoilt = x.clone()
        spoilt[rows // 2, 3] = torch.nan
        same = linear(x, dtype=torch.float32), linear(spoilt, dtype=torch.float32)
        others = torch.arange(rows, device="cuda") != rows // 2
        fine = torch.equal(same[0][others], same[1][others]) and same[1][rows // 2, : n // groups].isnan().all().item()
        report(f"{name} rows {rows} NaN stays in its row", fine)
        if name in ROUNDED_INPUT:
            raw = torch.randn(rows, k, device="cuda").bfloat16()
            rounded = linear(q8_round(raw).bfloat16())
            report(f"{name} rows {rows} rounds its input", torch.equal(linear(raw, quantize_input=True), rounded))


def times(name: str, n: int, k: int, groups: int, rows: int) -> dict[str, float]:
    """Microseconds of the parts and of the whole product."""
    copies = packed_copies(n, k)[:4]
    plain = [linear_of(copy, n, k, groups, plans.plan(n, k, groups)) for copy in copies]
    fast = [linear_of(copy, n, k, groups, plans.plan(n, k, groups)) for copy in copies]
    for linear in fast:
        linear.use_fast(True)
    dtype = torch.float32 if name in FLOAT32_OUT else torch.bfloat16
    xs = [random_x(rows, groups * k, False, seed) for seed in range(3)]
    outs = [torch.empty(rows, n, dtype=dtype, device="cuda") for _ in range(2)]
    weight, row_scales = fast[0]._row_scaled.codes(), fast[0]._row_scaled.row_scales  # type: ignore[union-attr]
    wide = plain[0].widen()
    converted = [[row_scaled.row_codes(x[:, g * k : (g + 1) * k]) for g in range(groups)] for x in xs]
    one = torch.ones((), device="cuda")
    parts = [slice(g * (n // groups), (g + 1) * (n // groups)) for g in range(groups)]

    def convert(i: int, num_warps: int | None = None) -> None:
        for group in range(groups):
            row_scaled.row_codes(xs[i % 3][:, group * k : (group + 1) * k], name in ROUNDED_INPUT, num_warps)

    def multiply(i: int) -> None:
        for part, x in zip(parts, converted[i % 3], strict=True):
            row_scaled.product(x, (weight[part], row_scales[part]), outs[i % 2][:, part])

    def multiply_scalar(i: int, fast_accumulation: bool) -> None:
        for part, (x, _) in zip(parts, converted[i % 3], strict=True):
            torch._scaled_mm(
                x, weight[part].t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=fast_accumulation,
                out=outs[i % 2][:, part],
            )  # fmt: skip

    def multiply_bf16(i: int) -> None:
        for group, part in enumerate(parts):
            _cublas(xs[i % 3][:, group * k : (group + 1) * k], wide[part], outs[i % 2][:, part])

    def forward(linears: list[Fp8Linear], i: int, is_fast: bool) -> None:
        linears[i % len(linears)](
            xs[i % 3], outs[i % 2],
            quantize_input=is_fast and name in ROUNDED_INPUT, quantize_output=not is_fast and groups > 1,
        )  # fmt: skip

    paths: dict[str, Callable[[int], object]] = {
        "unpack bf16": lambda i: plain[i % len(plain)].widen(),
        "unpack": lambda i: fast[i % len(fast)]._row_scaled.codes(),  # type: ignore[union-attr]
        "convert": convert,
        "convert, half the warps": lambda i: convert(i, max(1, k // 2048)),
        "convert, twice the warps": lambda i: convert(i, min(16, max(2, k // 512))),
        "bf16": multiply_bf16,
        "scalar": lambda i: multiply_scalar(i, False),
        "scalar, fast": lambda i: multiply_scalar(i, True),
        "whole bf16": lambda i: forward(plain, i, False),
    }
    row: dict[str, float] = {}

    def measure(label: str, path: Callable[[int], object]) -> None:
        try:
            row[label] = time_us(lambda i: path(i), 6)  # type: ignore[func-returns-value]
        except Exception as error:
            print(f"FAIL {name} rows {rows} {label}: {str(error)[:300]}", flush=True)
            results.append({"case": f"{name} rows {rows} {label}", "error": str(error)[:300]})

    for label, path in paths.items():
        if not label.startswith("convert,"):
            measure(label, path)
        elif not any(warps & (warps - 1) for warps in (max(1, k // 2048), min(16, max(2, k // 512)))):
            measure(label, path)  # a power of two
    for form, fast_accumulation in FORMS.items():
        row_scaled.FAST_ACCUMULATION = fast_accumulation
        measure(form, multiply)
        measure(f"whole {form}", lambda i: forward(fast, i, True))
    row_scaled.FAST_ACCUMULATION = True
    flops = 2.0 * n * k * rows
    rates = "  ".join(f"{form} {flops / row[form] / 1e6:.0f}" for form in ("bf16", *FORMS, "scalar") if form in row)
    print(f"{name:11} rows {rows:5} | " + "  ".join(f"{key} {value:.0f}" for key, value in row.items()), flush=True)
    print(f"{'':22} | TFLOP/s: {rates}", flush=True)
    results.append({"shape": name, "rows": rows, "us": row})
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", default="600,1000,2048,8192")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    shapes = {name: SHAPES[name] for name in (*LAYER, "wq_b+index")}
    try:
        for name, shape in shapes.items():
            guarded(f"{name} operands", lambda: check_operands(name, *shape))  # noqa: B023
            guarded(f"{name} product", lambda: check_product(name, *shape, (513, 777, 8192)))  # noqa: B023
        layers: dict[int, dict[str, float]] = {}
        for rows in map(int, arguments.rows.split(",")):
            for name, shape in shapes.items():
                row = times(name, *shape, rows)
                if name in LAYER:
                    entry = layers.setdefault(rows, {})
                    best = min(row.get("whole bf16", torch.inf), row.get("whole rows", torch.inf))
                    for key, value in {**row, "best of both": best}.items():
                        entry[key] = entry.get(key, 0.0) + value
        failed = [result for result in results if result.get("pass") is False or "error" in result]
        print(f"{len(failed)} failed: {[result['case'] for result in failed][:8]}")
        shown = ("whole bf16", "whole rows", "whole rows, fast", "best of both", "unpack bf16", "unpack", "convert")
        for rows, entry in layers.items():
            print(f"layer rows {rows:5} | " + "  ".join(f"{key} {entry.get(key, 0):.0f}" for key in shown) + " us")
        results.append({"layer": layers})
    finally:
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
