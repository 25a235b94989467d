"""Say when the service answers: ``python -m deployments.ready serve_config.yaml PID``, run by `make serve` beside it.

`serve run` says that it has submitted the configuration, and nothing when the service is up. A token that came back is
proof that ingress, router and engine all are.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import httpx
import yaml

_PATIENCE = 120.0  # seconds without an answer after which it says so, once


def url_of(config: Path) -> str:
    """Where this machine reaches the service that ``config`` describes."""
    options = yaml.safe_load(config.read_text()).get("http_options") or {}
    host = options.get("host") or "127.0.0.1"
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"


def answers(client: httpx.Client) -> str | None:
    """The model's name once it has answered with a token, else None."""
    try:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        client.post("/v1/chat/completions", json=body).raise_for_status()
    except (httpx.HTTPError, ValueError):
        return None
    return str(model)


def main() -> int:
    """Wait for the first answer and print how to ask for more; end with the parent, PID, which is the service."""
    config, parent = sys.argv[1:]
    started, url, warned = time.monotonic(), url_of(Path(config)), False
    with httpx.Client(base_url=url, timeout=_PATIENCE, trust_env=False) as client:
        while (model := answers(client)) is None:
            if os.getppid() != int(parent):
                return 1
            if not warned and time.monotonic() - started > _PATIENCE:
                warned = True
                print(f"no answer from {url} for {_PATIENCE:.0f} s: the lines above say what it waits for", flush=True)
            time.sleep(0.25)
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    print(f"\nReady after {time.monotonic() - started:.0f} s, Ctrl-C stops it. Try:\n")
    print(f"    curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n      -d '{body}'\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
