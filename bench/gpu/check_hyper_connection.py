"""Hyper-connection kernels on a GPU: errors against float64, then times over floor.

    python bench/gpu/check_hyper_connection.py [--json FILE] [--only check,write,finish,head]

Times are medians of 5 replays of a CUDA graph whose launches rotate over more data than L2 holds, per launch: of a
kernel alone (each launch waits for the one before), and of both kernels as they follow one another in a layer (launches
overlap). A profile's times are no substitute: there a kernel that begins early includes its wait for the one before.
Floor: bytes at 4.2 TB/s. Kernels are compiled by several threads first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from deepinfer.kernels import nvrtc
from deepinfer.kernels.hyper_connection import stages
from deepinfer.kernels.hyper_connection.finish import collapse_head, hc_finish
from deepinfer.kernels.hyper_connection.launches_cuda import (
    FinishShape,
    Shape,
    choose_finish_shape,
    choose_shape,
)
from deepinfer.kernels.hyper_connection.parts import ExpertOutputs, Mixes, SplitSums, Update, new_mixes
from deepinfer.kernels.hyper_connection.write_read import hc_write_read
from deepinfer.ops import number_formats as nf
from deepinfer.ops.hyper_connection import hc_mixes, hc_read, hc_write
from deepinfer.ops.norm import rms_norm

HIDDEN, STREAMS, SELECTED, SPLITS = 5120, 4, 6, 3
NORM_EPS, HC_EPS, ITERATIONS = 1e-20, 1e-6, 20
BYTES_PER_S, ROTATION_BYTES = 4.2e12, 240e6
CUDA = torch.device("cuda")
WORKERS = 12
results: list[dict] = []


def guarded(name: str, action: Callable[[], None]) -> None:
    try:
        action()
        torch.cuda.synchronize()
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        print(f"FAIL {name}: raised\n    " + "\n    ".join(lines[-6:]), flush=True)
        results.append({"case": name, "error": lines[-1]})


def report(name: str, ok: bool, detail: str) -> None:
    print(f"{'PASS' if ok else 'FAIL'} {name} {detail}", flush=True)
    results.append({"case": name, "pass": ok, "detail": detail})


def measure(launches: list[Callable[[], object]]) -> float:
    """Microseconds per launch."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def timed(name: str, num_bytes: float, launches: list[Callable[[], object]]) -> None:
    us, floor = measure(launches), num_bytes / BYTES_PER_S * 1e6
    print(f"{name:64s} {us:8.2f} us  floor {floor:7.2f}  x{us / floor:.2f}", flush=True)
    results.append({"case": name, "us": us, "floor_us": floor})


def copies(num_bytes: float) -> int:
    return max(4, min(120, int(ROTATION_BYTES / num_bytes) + 1))


def mixes_of(rows: int) -> Mixes:
    packed, mixes = new_mixes(torch.empty(0, device=CUDA), rows, STREAMS)
    packed.copy_(torch.rand(packed.shape, device=CUDA))
    return mixes


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def share(found: Tensor, expected: Tensor) -> float:
    return float((found != expected).double().mean())


UPDATES = {
    "none": (stages.NO_UPDATE, 1),
    "plain": (stages.PLAIN_UPDATE, 1),
    "experts": (stages.EXPERT_UPDATE, SELECTED),
    "splits": (stages.SPLIT_UPDATE, SPLITS),
}


def chosen_shape(rows: int, form: str) -> Shape:
    return choose_shape(rows, HIDDEN, *UPDATES[form])


def fits(shape: Shape, form: str) -> bool:
    return shape.shared_bytes(*UPDATES[form]) <= nvrtc.MAX_SHARED_BYTES


class Sublayer:
    """One sublayer's weights and, for some rows, the trunk and the update before it."""

    def __init__(self, rows: int, form: str) -> None:
        self.rows, self.form = rows, form
        self.trunk, self.mixes, self.read = bf16(rows, STREAMS, HIDDEN), mixes_of(rows), mixes_of(rows).read
        self.fn = torch.randn((2 + STREAMS) * STREAMS, STREAMS * HIDDEN, device=CUDA) * 0.01
        self.norm = (torch.rand(HIDDEN, device=CUDA) + 0.5).bfloat16()
        self.scale, self.base = torch.tensor([1.0, 0.5, 2.0], device=CUDA), torch.randn(24, device=CUDA)
        self.out = torch.empty_like(self.trunk)
        self.update: Update | None = None
        self.value = None
        if form == "plain":
            self.update = self.value = bf16(rows, HIDDEN)
        elif form == "experts":
            experts = torch.randint(0, 384, (rows, SELECTED), device=CUDA, dtype=torch.int32)
            self.update = ExpertOutputs(bf16(rows, SELECTED, HIDDEN), bf16(rows, HIDDEN), experts)
            self.value = (self.update.routed.double().sum(1) + self.update.shared.double()).bfloat16()
        elif form == "splits":
            self.update = SplitSums(torch.randn(SPLITS, rows, HIDDEN, device=CUDA))
            self.value = self.update.sums.double().sum(0).bfloat16()

    def write_read(self, shape: Shape | None = None, **wants):
        mixes = None if self.update is None else self.mixes
        return hc_write_read(
            self.trunk, self.read, self.fn, self.update, mixes, out=self.out, shape=shape, **wants
        )  # fmt: skip

    def write(self):
        return hc_write_read(self.trunk, None, None, self.update, self.mixes, out=self.out)

    def finish(self, partial, h, **how):
        return hc_finish(
            partial, h, self.norm, self.scale, self.base, NORM_EPS, HC_EPS, ITERATIONS, **how
        )  # fmt: skip

    def enter(self, overlap: bool = True, shape: Shape | None = None, finish: FinishShape | None = None, **how):
        done = self.write_read(shape, overlap=overlap)
        return done, self.finish(done.partial, done.h, shape=finish, overlap=overlap, **how)

    @property
    def num_bytes(self) -> float:
        written = 0 if self.update is None else STREAMS * HIDDEN * 2
        update = {"none": 0, "plain": 2, "experts": 2 * (SELECTED + 1), "splits": 4 * SPLITS}[self.form] * HIDDEN
        return self.rows * (STREAMS * HIDDEN * 2 + written + update + HIDDEN * 2) + self.fn.numel() * 4

    @property
    def finish_bytes(self) -> float:
        slices = chosen_shape(self.rows, "plain").grid(self.rows, HIDDEN)[0]
        return self.rows * (3 * HIDDEN * 2 + slices * 34 * 4)


# ---- checks


def check_sublayer(rows: int, form: str) -> None:
    one = Sublayer(rows, form)
    done = one.write_read(wants_feature=True)
    trunk = one.trunk
    wrong = []
    if one.value is not None:
        trunk = hc_write(one.trunk, one.value, one.mixes.write.double(), one.mixes.stream.double())
        wrong.append(share(done.trunk, trunk))
    found = one.finish(done.partial, done.h, wants_codes=True)
    wrong += [share(done.h, hc_read(done.trunk, one.read.double()))]
    wrong += [share(done.feature, done.trunk.double().mean(1).bfloat16())]
    wrong += [share(found.x, rms_norm(done.h, one.norm.double(), NORM_EPS))]
    codes, scales = nf.q8(found.x)
    exact = torch.equal(found.codes, codes) and torch.equal(found.scales, scales)
    exact = exact and torch.equal(found.xq.float(), nf.q8_round(found.x))
    wide = (one.fn.double(), one.scale.double(), one.base.double(), NORM_EPS, HC_EPS, ITERATIONS)
    expected = hc_mixes(done.trunk, *wide)
    errors = [float((a.double() - b).abs().div(b.abs()).max()) for a, b in zip(found.mixes, expected, strict=True)]
    ok = exact and max(wrong) < 2e-3 and max(errors) < 2e-5
    text = " ".join(f"{value:.1e}" for value in wrong)
    report(
        f"sublayer {form} rows={rows}", ok, f"share (trunk, h, feature, x) {text}; mixes {max(errors):.1e}; {exact=}"
    )


def results_of(read, finished) -> list[Tensor]:
    return [read.trunk, *(part for part in finished[:4] if part is not None), *finished.mixes]


def check_invariance(form: str) -> None:
    """Rows alone, among few and among many, in every shape: the same bits."""
    whole = Sublayer(1100, form)
    among = [part.clone() for part in results_of(*whole.enter())]
    wrong: dict[str, int] = {}

    def compare(name: str, found: list[Tensor], part: slice = slice(None)) -> None:
        differ = sum(not torch.equal(a, b[part]) for a, b in zip(found, among, strict=True))
        wrong.update({name: wrong.get(name, 0) + differ} if differ else {})

    for row, rows in ((0, 1), (37, 1), (255, 1), (249, 7), (300, 33), (500, 130), (7, 513)):
        part, one = slice(row, row + rows), Sublayer(rows, "none")
        one.fn, one.norm, one.scale, one.base = whole.fn, whole.norm, whole.scale, whole.base
        one.trunk, one.read, one.mixes = whole.trunk[part], whole.read[part], Mixes(*(m[part] for m in whole.mixes))
        one.update = whole.update
        if isinstance(whole.update, Tensor):
            one.update = whole.update[part]
        elif isinstance(whole.update, ExpertOutputs):
            update = whole.update
            one.update = ExpertOutputs(update.routed[part], update.shared[part], update.experts[part])
        for overlap in (False, True):
            compare(f"{rows} rows {overlap=}", results_of(*one.enter(overlap)), part)
    for shape in SHAPES:
        if fits(shape, form):
            compare(f"{shape}", results_of(*whole.enter(shape=shape)))
    for finish in FINISH_SHAPES:
        compare(f"{finish}", results_of(*whole.enter(finish=finish)))
    report(f"batch invariance {form}", not wrong, f"tensors that differ: {wrong}")


def check_graph(rows: int, form: str) -> None:
    """Launches that overlap within a graph, against the same one by one."""
    one = Sublayer(rows, form)
    expected = [part.clone() for part in results_of(*one.enter(False, wants_codes=True))]
    graph = torch.cuda.CUDAGraph()
    one.enter(wants_codes=True)
    with torch.cuda.graph(graph):
        kept = [results_of(*one.enter(wants_codes=True)) for _ in range(20)]
    for _ in range(10):
        graph.replay()
    same = all(torch.equal(a, b) for each in kept for a, b in zip(each, expected, strict=True))
    report(f"overlapped graph {form} rows={rows}", same, "")


def check_head() -> None:
    rows = 33
    one = Sublayer(rows, "none")
    picked = torch.tensor([5, 0, 32], dtype=torch.int32, device=CUDA)
    h = bf16(3, HIDDEN)
    x = collapse_head(one.trunk, one.read, one.norm, NORM_EPS, picked, h=h)
    wrong = share(h, hc_read(one.trunk[picked.long()], one.read[picked.long()].double()))
    wrong = max(wrong, share(x, rms_norm(h, one.norm.double(), NORM_EPS)))
    report("collapse_head", wrong < 2e-3, f"share {wrong:.1e}")


def checks() -> None:
    for form in ("plain", "experts", "splits", "none"):
        guarded(f"sublayer {form}", lambda form=form: [check_sublayer(rows, form) for rows in (1, 7, 33)])
    for form in ("plain", "experts"):
        guarded(f"invariance {form}", lambda form=form: check_invariance(form))
        guarded(f"graph {form}", lambda form=form: [check_graph(rows, form) for rows in (1, 48, 300)])
    guarded("head", check_head)


# ---- times


CANDIDATES = {
    1: (Shape(1, 1), Shape(2, 1), Shape(4, 1), Shape(8, 1)),
    8: (Shape(1, 1), Shape(2, 1), Shape(4, 1), Shape(8, 1)),
    32: (Shape(1, 1), Shape(1, 2), Shape(2, 1), Shape(2, 2), Shape(4, 2)),
    64: (Shape(1, 2), Shape(1, 4, resident=2), Shape(2, 2), Shape(2, 4, resident=2), Shape(4, 2)),
    128: (
        *(Shape(1, 2), Shape(1, 4, resident=3), Shape(2, 2, resident=3), Shape(4, 2, resident=2)),
        *(Shape(1, 4, 3, serial=4, depth=2), Shape(1, 4, 1, resident=2, depth=2)),
    ),
    256: (
        *(Shape(1, 4, resident=5), Shape(1, 4, 4, serial=2, resident=3), Shape(1, 4, 3, serial=4, depth=2)),
        *(Shape(1, 6, 3, serial=4, depth=2), Shape(1, 4, 3, serial=2, resident=2, depth=2)),
    ),
    384: (
        *(Shape(1, 4, 4, resident=5), Shape(1, 4, 3, serial=4, depth=2), Shape(1, 8, 3, serial=4, depth=2)),
        *(Shape(1, 4, 3, serial=2, resident=2, depth=2), Shape(1, 4, 3, serial=4, depth=3)),
    ),
    512: (
        *(Shape(1, 4, 4, resident=5), Shape(1, 8, 6, serial=4, resident=2), Shape(1, 4, 3, serial=4, depth=2)),
        *(Shape(1, 6, 3, serial=4, depth=2), Shape(1, 12, 3, serial=4, depth=2)),
    ),
    8192: (
        *(Shape(1, 12, 3, serial=4), Shape(1, 4, 6, serial=4, resident=2), Shape(1, 4, 3, serial=4, depth=2)),
        *(Shape(1, 8, 3, serial=4, depth=2), Shape(1, 8, 3, serial=4, depth=3), Shape(1, 12, 3, serial=4, depth=2)),
    ),
}
FINISH_SHAPES = (
    *(FinishShape(1, False), FinishShape(2, False), FinishShape(4, False)),
    *(FinishShape(1, True), FinishShape(2, True), FinishShape(4, True)),
)
FORMS = ("plain", "experts", "splits")
CHOSEN = (chosen_shape(rows, form) for rows in CANDIDATES for form in FORMS)
SHAPES = tuple(dict.fromkeys((*(shape for shapes in CANDIDATES.values() for shape in shapes), *CHOSEN)))


def subjects(rows: int, form: str) -> list[Sublayer]:
    first = Sublayer(rows, form)
    return [first, *(Sublayer(rows, form) for _ in range(copies(first.num_bytes) - 1))]


def brief(shape: Shape | FinishShape) -> str:
    if isinstance(shape, FinishShape):
        return f"vectors={shape.vectors} {'shared' if shape.shares_block else 'own'}"
    parts = (f"{shape.warps}x{shape.serial}", f"tiles={shape.tiles}", f"groups={shape.row_groups}")
    return " ".join((*parts, f"resident={shape.resident}", f"depth={shape.depth}"))


def compare(title: str, floor: float, chosen: object, rivals: dict, is_alone: Callable, is_pair: Callable) -> None:
    """One line per shape: alone, and as a pair; * marks the best."""
    found = {}
    for shape in rivals:
        guarded(f"{title} {shape}", lambda: found.update({shape: (is_alone(shape), is_pair(shape))}))  # noqa: B023
    print(f"{title}  floor {floor:.2f} us", flush=True)
    best = [min(times[i] for times in found.values()) for i in (0, 1)] if found else []
    for shape, (alone, pair) in found.items():
        marks = ["*" if value == least else " " for value, least in zip((alone, pair), best, strict=True)]
        note = "  <- chosen" if shape == chosen else ""
        print(f"    {brief(shape):36s} alone {alone:8.2f}{marks[0]} pair {pair:8.2f}{marks[1]}{note}", flush=True)
        results.append({"case": title, "shape": brief(shape), "alone_us": alone, "pair_us": pair, "floor_us": floor})


def times_of_write() -> None:
    for form in FORMS:
        for rows, candidates in CANDIDATES.items():
            own, chosen = subjects(rows, form), chosen_shape(rows, form)
            compare(
                f"write_read {form} rows={rows}",
                own[0].num_bytes / BYTES_PER_S * 1e6,
                chosen,
                dict.fromkeys(shape for shape in (*candidates, chosen) if fits(shape, form)),
                lambda shape: measure([lambda one=one: one.write_read(shape, overlap=False) for one in own]),  # noqa: B023
                lambda shape: measure([lambda one=one: one.enter(shape=shape) for one in own]),  # noqa: B023
            )


def times_of_finish() -> None:
    for rows in CANDIDATES:
        own, chosen = subjects(rows, "plain"), choose_finish_shape(rows)
        done = [one.write_read() for one in own]

        def alone(how: dict) -> float:
            pairs = zip(own, done, strict=True)  # noqa: B023
            return measure([lambda one=one, d=d: one.finish(d.partial, d.h, **how) for one, d in pairs])

        compare(
            f"finish rows={rows} slices={done[0].partial.num_slices}",
            own[0].finish_bytes / BYTES_PER_S * 1e6,
            chosen,
            dict.fromkeys((*FINISH_SHAPES, chosen)),
            lambda shape: alone({"shape": shape, "overlap": False}),
            lambda shape: measure([lambda one=one: one.enter(finish=shape) for one in own]),  # noqa: B023
        )
        hows: list[dict] = [{"wants_mixes": False, "overlap": False}, {"wants_codes": True, "overlap": False}]
        if rows == 8192:
            hows.append({"columns": 512})
        texts = [f"{how} {alone(how):.2f}" for how in hows]
        chain = measure([lambda one=one: one.enter(overlap=False) for one in own])
        print(f"    {'; '.join(texts)}; pair without overlap {chain:.2f}", flush=True)


def times_of_head() -> None:
    for rows in (1, 64, 256):

        def run_head(rows: int = rows) -> None:
            own = [Sublayer(rows, "none") for _ in range(4)]
            timed(
                f"collapse_head rows={rows}",
                rows * HIDDEN * 10,
                [lambda one=one: collapse_head(one.trunk, one.read, one.norm, NORM_EPS) for one in own],
            )

        guarded(f"collapse_head {rows}", run_head)


PARTS = {"check": checks, "write": times_of_write, "finish": times_of_finish, "head": times_of_head}


def compile_ahead() -> None:
    """Compile the CUDA kernels side by side."""

    def write(form: str, shape: Shape | None, **wants: bool) -> None:
        guarded(f"compile {form} {shape}", lambda: Sublayer(3, form).write_read(shape, **wants))

    def finish(slices_of: Shape, shape: FinishShape, how: dict) -> None:
        def run() -> None:
            one = Sublayer(3, "none")
            done = one.write_read(slices_of)
            one.finish(done.partial, done.h, shape=shape, **how)

        guarded(f"compile finish {slices_of} {shape} {how}", run)

    # One of each that compiles to code of its own.
    shapes = {tuple(shape.defines().items()): shape for shape in SHAPES}.values()
    widths = {shape.warps * shape.serial: Shape(shape.warps * shape.serial, 1) for shape in SHAPES}.values()
    with ThreadPoolExecutor(WORKERS) as pool:
        for form in FORMS:
            for shape in shapes:
                if fits(shape, form):
                    pool.submit(write, form, shape)
            pool.submit(write, form, None, wants_feature=True)
        pool.submit(write, "none", None)
        pool.submit(write, "none", None, wants_feature=True)
        for width in widths:
            for finish_shape in FINISH_SHAPES:
                pool.submit(finish, width, finish_shape, {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--only", default=",".join(PARTS))
    arguments = parser.parse_args()
    begin = time.time()
    torch.manual_seed(0)
    torch.empty(1, device=CUDA)
    compile_ahead()
    print(f"compiled in {time.time() - begin:.1f} s", flush=True)
    for name in arguments.only.split(","):
        PARTS[name]()
        print(f"{name}: after {time.time() - begin:.1f} s", flush=True)
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(arguments.json).write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
