"""Engine benchmark: continuous batching against transformers, side by side in one run.

    python -m loadtest.engine                        # the default model, 8 requests at once
    python -m loadtest.engine --requests 192 --threads 2

Three ways to answer the same greedy requests of mixed length, with the same dtype and threads: transformers'
``generate`` one request at a time, the same in static batches (padded, each as long as its longest), and nanoengine.
There are so many requests that the last ones, which leave places empty, count for little; of those answered one at a
time the first are enough, as their rate is the same from first to last.
Only tokens that a request asked for count, so what a static batch makes beyond a request's length counts for nothing.
The answers are compared: the speed of an engine that says something else would be worth nothing.

It also replays a long mixed workload through the real scheduler and prints the KV memory that paging saves.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from random import Random
from typing import Any

import numpy as np
import torch
import transformers

from nanoengine import LLM, SamplingParams
from nanoengine.cache.blocks import BlockPool
from nanoengine.runner.synthetic import SyntheticRunner
from nanoengine.scheduling.policies import Fcfs
from nanoengine.scheduling.scheduler import Limits, Scheduler
from nanoengine.weights.sources import ModelFiles, resolve_model

WORDS = (  # noqa: SIM905
    "river mountain engine letter winter garden window market silver doctor orange planet simple harbour copper "
    "forest number kitchen morning village thunder picture library station history"
).split()


@dataclass(frozen=True)
class Requests:
    """Token ids of each prompt, and how many tokens each wants."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def mixed(cls, count: int, seed: int, encode: Callable[[str], list[int]]) -> Requests:
        """Prompts of 8 to 120 words with no common prefix, outputs of 16 to 128 tokens."""
        rng = Random(seed)
        texts = [f"{rng.random():.6f} " + " ".join(rng.choices(WORDS, k=rng.randint(8, 120))) for _ in range(count)]
        return cls([encode(text) for text in texts], [rng.randint(16, 128) for _ in range(count)])

    def first(self, count: int) -> Requests:
        return Requests(self.prompts[:count], self.lengths[:count])


def with_transformers(model: Any, requests: Requests, batch: int) -> list[list[int]]:
    """Answers by ``generate`` in static batches, padded on the left."""
    answers = []
    for first in range(0, len(requests.prompts), batch):
        prompts, lengths = requests.prompts[first : first + batch], requests.lengths[first : first + batch]
        width, longest = max(map(len, prompts)), max(lengths)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
        )
        answers += [row[width : width + n].tolist() for row, n in zip(out, lengths, strict=True)]
    return answers


def with_nanoengine(llm: LLM, requests: Requests) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, min_tokens=n) for n in requests.lengths]
    return [answer.token_ids for answer in llm.generate(requests.prompts, params, use_tqdm=False)]


def load_transformers(files: ModelFiles, dtype: torch.dtype) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    if files.format == "gguf":
        return load(files.root.parent, gguf_file=files.root.name, dtype=dtype).eval()
    return load(files.root, dtype=dtype).eval()


def compare_throughput(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=args.concurrency, num_threads=args.threads)
    dtype = getattr(torch, llm.engine.info.dtype)
    reference = load_transformers(resolve_model(args.model), dtype)
    warm_up = Requests.mixed(args.concurrency, 1, llm.tokenizer.encode)
    requests = Requests.mixed(args.requests, 2, llm.tokenizer.encode)
    ways: dict[str, Callable[[Requests], list[list[int]]]] = {
        "transformers, one at a time": lambda r: with_transformers(reference, r, 1),
        f"transformers, static batch of {args.concurrency}": lambda r: with_transformers(
            reference, r, args.concurrency
        ),
        f"nanoengine, {args.concurrency} at once": lambda r: with_nanoengine(llm, r),
    }
    print(
        f"{args.requests} requests, {sum(map(len, requests.prompts))} tokens in, {sum(requests.lengths)} out; "
        f"{llm.engine.info.dtype}, {args.threads} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {platform.machine()}, {date.today()}"
    )
    rates: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    for name, answer in ways.items():
        answer(Requests(warm_up.prompts, [8] * len(warm_up.lengths)))
        asked = requests.first(args.alone) if not answers else requests
        begin = time.perf_counter()
        answers[name] = answer(asked)
        seconds = time.perf_counter() - begin
        rates[name] = sum(asked.lengths) / seconds
        print(f"{name:34} {seconds:7.1f} s {rates[name]:7.1f} tok/s", flush=True)
    alone, static, ours = rates.values()
    by_alone, _, by_ours = answers.values()
    assert [len(a) for a in by_ours] == requests.lengths, "a request got too few or too many tokens"
    equal = sum(a == b for a, b in zip(by_alone, by_ours, strict=False))
    print(f"equal answers: {equal} of {len(by_alone)}")
    print(f"nanoengine against one at a time: {ours / alone:.2f}x; against the static batch: {ours / static:.2f}x")


def compare_memory(seed: int = 0, max_model_len: int = 8192, max_num_seqs: int = 64, block_size: int = 16) -> None:
    """Mean KV memory of running requests, in tokens: paged, against two ways to reserve it contiguously."""
    rng = np.random.default_rng(seed)
    count = 400
    prompts = np.clip(rng.lognormal(6.5, 0.9, count), 16, 6000).astype(int)  # median 665 tokens
    outputs = np.clip(rng.lognormal(5.5, 0.8, count), 8, 2000).astype(int)  # median 245
    limits = Limits(max_num_seqs, 8192, 8192, max_model_len, block_size, 256)
    pool = BlockPool(max_num_seqs * max_model_len // block_size)
    scheduler = Scheduler(limits, pool, Fcfs())
    runner = SyntheticRunner(num_slots=max_num_seqs, num_blocks=pool.num_blocks, block_size=block_size)
    reserved = {}
    for key, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        tokens = rng.integers(0, 256, prompt).astype(np.int32)
        scheduler.add(key, tokens, SamplingParams(max_tokens=output, ignore_eos=True))
        reserved[key] = prompt + output
    paged = full = exact = steps = 0
    while scheduler.has_work:
        step = scheduler.plan()
        assert step is not None
        paged += pool.used * block_size
        full += len(step.keys) * max_model_len
        exact += sum(reserved[key] for key in step.keys.tolist())
        steps += 1
        scheduler.retire(step, runner.launch(step).result().tokens)
    print(
        f"KV memory over {count} requests (prompts {prompts.min()}-{prompts.max()}, outputs {outputs.min()}-"
        f"{outputs.max()} tokens, {max_num_seqs} at once, mean over {steps} steps): paged {paged / steps:,.0f} tokens; "
        f"{1 - paged / full:.1%} less than reserving max_model_len ({max_model_len}) for each, "
        f"{1 - paged / exact:.1%} less than reserving prompt + max_tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--alone", type=int, default=24, help="requests that are answered one at a time")
    args = parser.parse_args()
    compare_memory()
    compare_throughput(args)


if __name__ == "__main__":
    main()
