"""How long an engine takes to start where no kernel is compiled yet, and how long its first prompts take.

    python bench/gpu/first_start.py [--max-num-seqs 64] [--drafts 5] [--json FILE]

The layer slice of true width with dummy weights (``engine_steps.py``). Kernels are compiled into empty folders;
``compiled`` counts those that a prompt had to wait for, by name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # read when triton is imported
sys.path.insert(0, str(Path(__file__).parent))

import torch
from engine_steps import make_engine

from deepinfer.kernels import nvrtc
from deepinfer.sampling.params import SamplingParams


def count_compilations() -> Counter[str]:
    """Counts every compilation from now on, by the kernel's name or file."""
    from triton.runtime.jit import JITFunction

    found: Counter[str] = Counter()
    of_triton, of_cuda = JITFunction._do_compile, nvrtc._compile

    def triton_noted(self: Any, *arguments: Any) -> Any:
        found[self.fn.__name__] += 1
        return of_triton(self, *arguments)

    def cuda_noted(*arguments: Any) -> Any:
        found[arguments[2]] += 1
        return of_cuda(*arguments)

    JITFunction._do_compile = triton_noted
    nvrtc._compile = cuda_noted
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--prompts", default="1024,300,37,2501,700,129,1873")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    nvrtc.set_cache_directory(Path(tempfile.mkdtemp()))
    begin = time.perf_counter()
    engine = make_engine(args.drafts, args.max_num_seqs, 5000, 14 * args.max_num_seqs + 164, "faithful")
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__,
            "processors": os.cpu_count(),
        },
        "engine_s": time.perf_counter() - begin,
        "prompts": [],
    }  # fmt: skip
    print(f"the engine took {record['engine_s']:.1f} s", flush=True)
    compiled, rng = count_compilations(), random.Random(0)
    for length in (int(part) for part in args.prompts.split(",")):
        compiled.clear()
        begin = time.perf_counter()
        ids = [rng.randrange(100, 100_000) for _ in range(length)]
        name = engine.add_request(ids, SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True))
        while not engine.is_finished(name):
            engine.run_step()
        ms = 1e3 * (time.perf_counter() - begin)
        record["prompts"].append({"tokens": length, "ms_with_4_tokens": ms, "compiled": dict(compiled)})
        print(f"prompt of {length} and 4 tokens: {ms:.0f} ms, compiled meanwhile: {dict(compiled)}", flush=True)
    engine.close()
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
