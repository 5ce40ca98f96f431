"""Cases of the dense-product benchmarks: shapes of the model, inputs, exact results, weights and time of a launch.

Times are medians of 5 replays of a CUDA graph whose launches rotate over more weights than L2 holds, per launch.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.kernels import nvrtc
from deepinfer.kernels.dense import packing, plans
from deepinfer.kernels.dense.linear import Fp8Linear

BYTES_PER_S, BF16_FLOPS = 4.2e12, 770e12
ROTATION_BYTES = 240e6
# name -> (N, K, groups); the cold read of a buffer of that size, measured with a plain kernel
SHAPES = {
    "wq_a+wkv": (1792, 5120, 1),
    "wq_b": (32768, 1280, 1),
    "wq_b+index": (36864, 1280, 1),
    "wo_a": (8192, 4096, 8),
    "wo_b": (5120, 8192, 1),
    "gate_up": (4608, 5120, 1),
    "down": (5120, 2304, 1),
    "main_proj": (5120, 15360, 1),
    "engram": (25600, 6144, 1),
}
LAYER = ("wq_a+wkv", "wq_b", "wo_a", "wo_b", "gate_up", "down")
COLD_US = {
    "wq_a+wkv": 4.0,
    "wq_b": 11.3,
    "wq_b+index": 12.6,
    "wo_a": 9.4,
    "wo_b": 11.3,
    "gate_up": 7.1,
    "down": 4.5,
}
BF16_SHAPES = {"compressor": (1024, 5120), "router": (384, 5120), "weights_proj": (32, 5120), "index wk": (128, 512)}
Job = tuple[str, dict[str, int]]
"""A source and its compile-time constants."""
results: list[dict] = []


def guarded(name: str, action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        print(f"FAIL {name}: raised\n    " + "\n    ".join(lines[-6:]), flush=True)
        results.append({"case": name, "error": lines[-1]})


def random_fp8(n: int, k: int, integers: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)
    if integers:
        values = torch.randint(-8, 9, (n, k), generator=g, device="cuda").float()
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.randint(126, 129, (-(-n // 32), -(-k // 32)), generator=g, device="cuda").to(torch.uint8)
        return codes, scales
    codes = torch.randint(0, 254, (n, k), generator=g, device="cuda", dtype=torch.int16)
    codes = (codes + (codes >= 0x7F)).to(torch.uint8)
    return codes, torch.randint(114, 124, (-(-n // 32), -(-k // 32)), generator=g, device="cuda").to(torch.uint8)


def random_x(rows: int, k: int, integers: bool, seed: int = 1) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    if integers:
        return torch.randint(-2, 3, (rows, k), generator=g, device="cuda").bfloat16()
    from deepinfer.ops.number_formats import q8_round

    return q8_round(torch.randn(rows, k, generator=g, device="cuda").bfloat16()).bfloat16()


def exact_wide(codes: Tensor, scales: Tensor) -> Tensor:
    n, k = codes.shape
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
    return codes.view(torch.float8_e4m3fn).float().double() * factors


def exact_product(x: Tensor, wide: Tensor, groups: int) -> Tensor:
    rows, n = x.shape[0], wide.shape[0]
    parts = wide.view(groups, n // groups, -1)
    return torch.einsum("rgk,gnk->rgn", x.double().view(rows, groups, -1), parts).flatten(1)


def report(name: str, ok: bool, detail: str = "") -> None:
    print(f"{'PASS' if ok else 'FAIL'} {name} {detail}", flush=True)
    results.append({"case": name, "pass": ok, "detail": detail})


def time_us(launch: Callable[[int], None], num: int) -> float:
    """Microseconds per launch; ``launch(i)`` queues number ``i`` of ``num``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(num):
                launch(i)
        graph.replay()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / num)
    return statistics.median(times)


def packed_copies(n: int, k: int, fp8: bool = True) -> list[tuple[Tensor, Tensor | None]]:
    """Random packed weights, more than L2 holds."""
    count = max(2, -(-int(ROTATION_BYTES) // (n * k * (1 if fp8 else 2))))
    count = min(count, 96)
    blocks, chunks = -(-n // 32), -(-k // (64 if fp8 else 32))
    copies: list[tuple[Tensor, Tensor | None]] = []
    for _ in range(count):
        if fp8:
            packed = torch.randint(0, 256, (blocks, chunks, 2048), device="cuda", dtype=torch.uint8)
            scales = packing.pack_scales(
                torch.randint(114, 124, (blocks, 2 * chunks), device="cuda", dtype=torch.uint8)
            )
            copies.append((packed, scales))
        else:
            copies.append((torch.randn(blocks, chunks, 1024, device="cuda").bfloat16(), None))
    return copies


def floor_us(n: int, k: int, groups: int, rows: int, weight_bytes: float = 1.001) -> float:
    moved = n * k * weight_bytes + rows * (groups * k + n) * 2
    return max(moved / BYTES_PER_S, 2 * n * k * rows / BF16_FLOPS) * 1e6


def linear_of(packed: tuple, n: int, k: int, groups: int, plan: tuple[plans.Step, ...]) -> Fp8Linear:
    """An operator over weights that are packed already."""
    linear = Fp8Linear.__new__(Fp8Linear)
    linear.num_outputs, linear.num_inputs, linear.groups, linear._stored = n, k, groups, None
    linear._use_packed(*packed, plan)
    return linear


def compile_one(job: Job) -> str:
    """The failure as text, or nothing."""
    try:
        nvrtc.compile_cubin(job[0] + ".cu", job[1], "sm_90a")
        return ""
    except Exception as error:
        return str(error)[:400]
