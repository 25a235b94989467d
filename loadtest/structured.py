"""What structured output costs: a decode step with and without it, and compiling a grammar.

    python -m loadtest.structured                            # SmolLM2-135M, 8 sequences
    python -m loadtest.structured --model FOLDER --batch 64

Two schemas: a list of records of two texts and a number, as answers are made of, and one whose strings follow a pattern
that counts characters, so that hardly two masks are alike: the dearest there is. Steps are timed once the sequences,
which begin alike, are at different places of their answers.

Each round times a block of steps of all kinds, one after the other, so that a machine whose speed drifts says the same
of all; what is printed is the median of the rounds' ratios. All are sampled at temperature 1 and decode in contexts of
equal length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from nanoengine import EngineConfig, SamplingParams
from nanoengine.engine import Engine
from nanoengine.structured.grammar import Grammar
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model

STEPS = 40
BEFORE = 60  # steps that are not timed
RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["name", "age", "note"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
COUNTED = {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z ]{100,120}$"}, "minItems": 100}
LARGE = {
    "type": "object",
    "properties": {f"field{i}": {"type": "string", "maxLength": i + 1} for i in range(500)},
    "additionalProperties": False,
}


def kept(schema: dict[str, object]) -> SamplingParams:
    return SamplingParams(temperature=1, structured=Grammar("json_schema", json.dumps(schema)), max_tokens=None)


def block(engine: Engine, size: int, params: SamplingParams) -> float:
    """Seconds a step, of ``size`` requests that all decode."""
    for key in range(size):
        engine.add(key, np.arange(100 + key, 164 + key, dtype=np.int32), params)
    while (load := engine.load()).waiting or load.prefill_tokens or not load.running:
        engine.step()
    for _ in range(BEFORE):
        engine.step()
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = (time.perf_counter() - begin) / STEPS
    assert engine.load().running == size, "a request has ended: the steps were not all of one size"
    for key in range(size):
        engine.abort(key)
    while engine.has_work:
        engine.step()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(args.model))
    config = EngineConfig(model=args.model, max_num_seqs=args.batch, enable_prefix_caching=False)
    engine = Engine(config, tokenizer.eos_token_ids, tokenizer.vocab_size)
    for name, schema in (
        ("records, the tokenizer's table included", RECORDS),
        ("records", RECORDS | {"title": "x"}),
        ("500 fields", LARGE),
    ):
        begin = time.perf_counter()
        engine.check_grammar(kept(schema))
        print(f"compile, {name}: {1e3 * (time.perf_counter() - begin):.1f} ms")
    kinds = {"free": SamplingParams(temperature=1, ignore_eos=True, max_tokens=None)}
    kinds |= {"records": kept(RECORDS), "a pattern that counts": kept(COUNTED)}
    rounds = [{name: block(engine, args.batch, params) for name, params in kinds.items()} for _ in range(args.rounds)]
    for name in kinds:
        seconds = statistics.median(times[name] for times in rounds)
        ratio = statistics.median(times[name] / times["free"] for times in rounds)
        print(f"{args.batch} sequences, {name:22} {1e3 * seconds:.2f} ms a step, {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main()
