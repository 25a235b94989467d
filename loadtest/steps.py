"""Where a decode step's time goes, on a GPU: wall time, the GPU's kernels, and the host.

    python -m loadtest.steps MODEL                       # batches of 1, 64, 256 and 1,024, contexts of 600
    python -m loadtest.steps MODEL --batches 8,32 --context 4000
    python -m loadtest.steps MODEL --set deterministic=true
    python -m loadtest.steps MODEL --batches 512 --context 128 --shared 2048 --groups 16

Wall time is taken without the profiler. Kernels overlap where one may start while another ends, so their times can add
up to more. "host" is what the engine's loop computes in a step, without waiting for the GPU: it is hidden as long as it
is less than the step.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from nanoengine import EngineConfig, SamplingParams
from nanoengine.engine import Engine

STEPS = 40


class Batch:
    """A number of requests that decode, until the end of the block; ``shared`` tokens of each are its group's."""

    def __init__(self, engine: Engine, size: int, context: int, shared: int, groups: int) -> None:
        self._engine, self._size, self._context, self._shared, self._groups = engine, size, context, shared, groups

    def __enter__(self) -> Batch:
        rng, engine = np.random.default_rng(0), self._engine
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4 * STEPS)
        prefixes = rng.integers(0, 10_000, (self._groups, self._shared))
        for key in range(self._size):
            own = rng.integers(0, 10_000, self._context)
            engine.add(key, np.concatenate((prefixes[key % self._groups], own)).astype(np.int32), params)
        engine.step()
        while engine.load().waiting or engine.load().prefill_tokens:
            engine.step()
        self.run(5)
        return self

    def __exit__(self, *_: object) -> None:
        for key in range(self._size):
            self._engine.abort(key)
        while self._engine.has_work:
            self._engine.step()
        self._engine.reset_prefix_cache()

    def run(self, steps: int) -> float:
        """Seconds of that many steps."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self._engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def report(batch: Batch, name: str, size: int, lines: int) -> None:
    waited = 0.0
    synchronize = torch.cuda.Event.synchronize

    def timed(event: torch.cuda.Event) -> None:
        nonlocal waited
        begin = time.perf_counter()
        synchronize(event)
        waited += time.perf_counter() - begin

    with batch:
        torch.cuda.Event.synchronize = timed  # type: ignore[method-assign, assignment]
        try:
            wall = batch.run(STEPS) / STEPS
        finally:
            torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
        host = wall - waited / STEPS
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            batch.run(8)
    events = [event for event in found.key_averages() if event.device_time_total > 0]
    total = sum(event.device_time_total for event in events) / 8
    print(f"\n{name}: {wall * 1e3:.3f} ms a step, {size / wall:,.0f} tok/s; "
          f"kernels {total / 1e3:.3f} ms, host {host * 1e3:.3f} ms")  # fmt: skip
    for event in sorted(events, key=lambda event: -event.device_time_total)[:lines]:
        us, count = event.device_time_total / 8, event.count / 8
        print(f"  {us:9.1f} us  {count:5.1f} x {us / count:7.2f}  {event.key[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local folder or anything else that EngineConfig.model takes")
    parser.add_argument("--batches", default="1,64,256,1024")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--shared", type=int, default=0, help="tokens before that which a group of requests shares")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of EngineConfig")
    parser.add_argument("--lines", type=int, default=12)
    args = parser.parse_args()
    settings = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in args.set)}
    longest = max(2048, args.shared + args.context + 8 * STEPS)
    engine = Engine(EngineConfig.model_validate({"model": args.model, "max_model_len": longest} | settings))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; seconds to ready: {engine.info.load_seconds}")
    print(engine.memory_summary())
    for size in map(int, args.batches.split(",")):
        batch = Batch(engine, size, args.context, args.shared, args.groups)
        name = f"batch {size}, context {args.context}" + (f" after {args.shared} shared" if args.shared else "")
        report(batch, name, size, args.lines)


if __name__ == "__main__":
    main()
