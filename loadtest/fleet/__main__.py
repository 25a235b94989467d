"""Compare routers on a real Ray Serve cluster.

    python -m loadtest.fleet                                # 4 engines with a clock for a model, behind 2 ingresses
    python -m loadtest.fleet --model FOLDER --replicas 2 --gpus 0.5 --routers prefix,serve,ray --system-words 3000
    python -m loadtest.fleet --url http://127.0.0.1:8000 --model FOLDER --served-name NAME    # of a service that runs

Each router gets a fresh cluster, with empty caches, and the same chats. Ideal is the hit rate of one endless cache. The
answers' lengths are checked; and those of the stand-in model, which depend on all content of the cache that they read,
have to be the same whichever router chose.
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from loadtest.fleet.chats import Asked, Workload, ideal_cached
from loadtest.fleet.cluster import MODEL, ROUTERS, config, loads, served
from loadtest.records import summarise
from nanoengine.config import EngineConfig
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.tokenizer import Tokenizer, load_tokenizer
from nanoengine.weights.sources import resolve_model

CONFIG = Path(__file__).parents[2] / "serve_config.yaml"
SYNTHETIC = {
    "num_blocks": 2048,
    "max_num_batched_tokens": 1024,
    "synthetic": {"step_seconds": 0.02, "prefill_tokens_per_second": 3000, "max_model_len": 8192},
}
"""The stand-in: so slow that two cores feed four of it, and with room for not half of the system prompts."""


def engine(model: str, settings: list[str]) -> dict[str, Any]:
    """``engine`` of the configuration; each setting is ``key=value``, with dots in the keys of what lies deeper."""
    made: dict[str, Any] = {"model": model, **(copy.deepcopy(SYNTHETIC) if model == "synthetic" else {})}
    for setting in settings:
        path, _, value = setting.partition("=")
        *parents, last = path.split(".")
        node = made
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = yaml.safe_load(value)
    return made


def cells(asked: list[Asked], tokenizer: Tokenizer, block: int) -> list[str]:
    """A row's figures, as text."""
    template = ChatTemplate.of(tokenizer)

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ideal = ideal_cached([(tokens(template.render(one.messages)), tokens(one.answer)) for one in asked], block)
    summary = summarise([one.record for one in asked])
    if (ttft := summary.ttft) is None:
        return []
    return [
        *(f"{1000 * seconds:.0f}" for seconds in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
        f"{summary.cached_tokens / summary.prompt_tokens:.3f}",
        f"{summary.cached_tokens / max(1, ideal):.3f}",
        f"{summary.requests_per_second:.1f}",
    ]


def line(first: str, rest: list[str]) -> str:
    return f"{first:32s}" + "".join(f"{text:>10s}" for text in rest)


def main() -> int:
    """Print a table with a row for each router; status 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fleet", description=main.__doc__)
    add = parser.add_argument
    add("--routers", default="prefix,serve,ray,ray10", help=f"separated by commas, of {', '.join(ROUTERS)}")
    add("--config", type=Path, default=CONFIG, help="what the configurations are made of")
    add("--model", default="synthetic", help="as engine.model: a folder, .gguf file, known name")
    add("--engine", action="append", default=[], metavar="KEY=VALUE", help="of the engine; may be given several times")
    add("--replicas", type=int, default=4)
    add("--ingresses", type=int, default=2)
    add("--gpus", type=float, default=0, help="of each replica: 0.5 puts two on one")
    add("--port", type=int, default=8000)
    add("--url", default="", help="ask the service there, and start none")
    add("--served-name", default="", help="the model's name there")
    add("--users", type=int, default=None, help="closed loop: so many chats at a time, whatever --rate says")
    shape = parser.add_argument_group("chats", "see loadtest/fleet/chats.py")
    for option in fields(Workload):
        shape.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default)
    args = parser.parse_args()
    if strangers := set(args.routers.split(",")) - set(ROUTERS):
        parser.error(f"no such router: {', '.join(strangers)}")

    settings = engine(args.model, args.engine)
    block = EngineConfig.model_validate(settings).block_size
    tokenizer = load_tokenizer(resolve_model(args.model))
    workload = Workload(**{option.name: getattr(args, option.name) for option in fields(Workload)})
    print(line("router, requests by replica", ["mean", "p50", "p90", "p99 [ms]", "hit rate", "of ideal", "req/s"]))
    base = yaml.safe_load(args.config.read_text())
    first: dict[tuple[int, int], str] = {}
    wrong = 0
    for router in args.routers.split(",") if not args.url else [""]:
        if args.url:
            name, asked = args.url, workload.hold(args.url, args.served_name, args.users)
        else:
            data = config(base, router, settings, args.replicas, args.ingresses, args.gpus, args.port)
            with served(data):
                asked = workload.hold(f"http://127.0.0.1:{args.port}", MODEL, args.users)
                name = f"{router:12s} " + " ".join(str(sum(load.finished.values())) for load in loads())
        print(line(name, cells(asked, tokenizer, block)), flush=True)
        errors = [one.record.error for one in asked if one.record.error]
        first = first or {one.turn: one.answer for one in asked}
        if args.model == "synthetic":
            errors += ["not the first router's answer" for one in asked if first.get(one.turn) != one.answer]
        for error in errors[:3]:
            print(f"  {len(errors)} went wrong: {error}")
        wrong += len(errors)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
