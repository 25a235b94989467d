"""What structured output costs: a decode step with and without it, and compiling a grammar.

    python -m loadtest.structured                            # SmolLM2-135M, 8 sequences
    python -m loadtest.structured --model FOLDER --batch 64

Each round times a block of steps of both kinds, one after the other, so that a machine whose speed drifts says the same
of both; what is printed is the median of the rounds' ratios. Both kinds are sampled at temperature 1 and decode in
contexts of equal length.
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

STEPS = 20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "notes": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z ]{100,}$"}, "minItems": 100},
    },
    "required": ["name", "age", "notes"],
    "additionalProperties": False,
}
LARGE = {
    "type": "object",
    "properties": {f"field{i}": {"type": "string", "maxLength": i + 1} for i in range(500)},
    "additionalProperties": False,
}


def block(engine: Engine, size: int, params: SamplingParams) -> float:
    """Seconds a step, of ``size`` requests that all decode."""
    for key in range(size):
        engine.add(key, np.arange(100 + key, 164 + key, dtype=np.int32), params)
    while (load := engine.load()).waiting or load.prefill_tokens or not load.running:
        engine.step()
    for _ in range(3):
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
        ("small, the tokenizer's table included", PERSON),
        ("small", PERSON | {"title": "x"}),
        ("500 fields", LARGE),
    ):
        grammar = Grammar("json_schema", json.dumps(schema))
        begin = time.perf_counter()
        engine.check_grammar(SamplingParams(structured=grammar))
        print(f"compile, {name}: {1e3 * (time.perf_counter() - begin):.1f} ms")
    free = SamplingParams(temperature=1, ignore_eos=True, max_tokens=None)
    kept = SamplingParams(temperature=1, structured=Grammar("json_schema", json.dumps(PERSON)), max_tokens=None)
    rounds = [(block(engine, args.batch, free), block(engine, args.batch, kept)) for _ in range(args.rounds)]
    plain, structured = (1e3 * statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(with_it / without for without, with_it in rounds)
    print(f"{args.batch} sequences: {plain:.2f} ms a step, structured {structured:.2f} ms: {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main()
