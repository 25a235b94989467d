"""Serve a configuration until told to stop, and then stop in order: ``python -m deployments.run serve_config.yaml``.

It is ``serve run`` but for its end. That closes the sockets first and waits for what runs behind them then, so that
Ctrl-C cuts every stream. Here health goes red and new requests are told to come back (503), open ones end, or are ended
by an error when their time is over, and only then Serve is shut down. A second signal does not wait.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.scripts import cli

LOOK_S = 0.2
END_S = 2.0  # for a request that is ended to tell its client
CALL_S = 10.0  # an ingress that does not answer for so long is not waited for
SERVE_S = 20.0  # Serve's own default for graceful_shutdown_timeout_s


def patience_s(config: dict[str, Any], app: str) -> float:
    """How long open requests of an application may take to end: as long as where its ingress is replaced."""
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            if (application["name"], deployment["name"]) == (app, "Ingress"):
                return float(deployment.get("graceful_shutdown_timeout_s", SERVE_S))
    return SERVE_S


def drain(app: str, seconds: float, hurry: threading.Event) -> int:
    """Let an application's ingresses refuse what is new and finish what they have, and end what they have not finished
    after so long, or when there is ``hurry``. Returns how many requests those were."""
    ingress = serve.get_deployment_handle("Ingress", app)
    if not ingress.is_initialized:  # its router on a loop of its own, whatever the service's are on: here is none
        ingress._init(_run_router_in_separate_loop=True)

    def open_requests(end: bool = False) -> int:  # told each time: an ingress may have started meanwhile
        return sum(ingress.broadcast("drain", end).results(timeout_s=CALL_S))

    if left := open_requests():
        print(f"stopping: {left} requests have {seconds:g} s to end; a second signal does not wait", flush=True)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline and not hurry.wait(LOOK_S):
        left = open_requests()
    ended, deadline = left, time.monotonic() + END_S
    while left and time.monotonic() < deadline:
        left = open_requests(end=True)
        time.sleep(LOOK_S)
    return ended


def main() -> None:
    (file,) = sys.argv[1:]
    config = yaml.safe_load(Path(file).read_text())
    ray.init(namespace="serve")  # where RAY_ADDRESS says, as `serve run` does
    stopping, hurry = threading.Event(), threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():  # the first signal is being seen to, below
            hurry.set()
            return
        stopping.set()
        for application in config["applications"]:
            with suppress(Exception):  # one that never came up has nothing to wait for
                drain(application["name"], patience_s(config, application["name"]), hurry)
        raise KeyboardInterrupt  # upon which `serve run` shuts Serve down

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)  # after Ray, which takes the second for itself
    cli.main(["run", file, "--address", ray.get_runtime_context().gcs_address], standalone_mode=False)


if __name__ == "__main__":
    main()
