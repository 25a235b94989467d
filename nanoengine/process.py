"""The engine's own process: ``python -m nanoengine.process FD``, where FD is one end of ``AsyncEngine``'s socket pair.

The pair has no name and no port, so engines on one host cannot collide, and either side's death is the other's
end-of-file: an engine never outlives its owner.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import socket
import sys
import threading
import time

import numpy as np

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine, StepOutput
from nanoengine.errors import InvalidRequestError, ModelLoadError
from nanoengine.protocol import (
    Abort,
    Add,
    Failed,
    Inspect,
    Memory,
    Ready,
    Refused,
    Start,
    ToEngine,
    Update,
    decoder,
    frame,
    read_frame,
)

BEAT_S = 1.0  # the owner hears at least as often, work or none: else this loop is stuck

log = logging.getLogger("nanoengine")


def main(fd: int) -> int:
    """Serve the owner at the other end of ``fd`` until it closes; returns the exit status."""
    sock = socket.socket(fileno=fd)
    # Room for the owner to be late by many steps before this loop has to wait for it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    first = read_frame(sock)
    if first is None:
        return 0
    try:
        try:
            start = decoder(Start).decode(first)
            config = EngineConfig.model_validate_json(start.config)
            engine = Engine(config, start.eos_token_ids, start.num_tokens, log_prefixes=start.log_prefixes)
        except (ModelLoadError, ValueError) as error:
            sock.sendall(frame(Failed(str(error), load_error=True)))
            return 1
        # What is there now stays: the collector need not look at it again and again while steps wait.
        gc.collect()
        gc.freeze()
        sock.sendall(frame(Ready(engine.info)))
        _serve(engine, sock)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the owner is gone, and with it everyone who waited
    except Exception as error:
        # A step that failed leaves device state unknown: better to end loudly and be restarted than to go on wrongly.
        log.exception("the engine failed")
        with contextlib.suppress(OSError):
            sock.sendall(frame(Failed(f"{type(error).__name__}: {error}", load_error=False)))
        return 1
    return 0


def _serve(engine: Engine, sock: socket.socket) -> None:
    inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sock, inbox), name="receive", daemon=True).start()
    told_at = time.monotonic()
    while True:
        messages = []
        if not engine.has_work:
            with contextlib.suppress(queue.Empty):
                messages.append(inbox.get(timeout=BEAT_S))
        while not inbox.empty():
            messages.append(inbox.get())
        for message in messages:
            if message is None:
                return
            _handle(engine, sock, message)
        began = time.monotonic()
        output = engine.step()
        for key, error in output.refused if output is not None else ():
            sock.sendall(frame(Refused.of(key, error)))
        if output is not None or messages or began - told_at >= BEAT_S:
            sock.sendall(frame(_update(engine, output, began)))
            told_at = began


def _receive(sock: socket.socket, inbox: queue.SimpleQueue[ToEngine | None]) -> None:
    """Decode frames as they come, so that the engine's loop never waits for the socket."""
    decode = decoder(ToEngine).decode
    with contextlib.suppress(OSError):
        while (body := read_frame(sock)) is not None:
            inbox.put(decode(body))
    inbox.put(None)


def _handle(engine: Engine, sock: socket.socket, message: ToEngine) -> None:
    if isinstance(message, Add):
        tokens = np.frombuffer(message.tokens, np.int32)
        try:
            engine.add(
                message.key,
                tokens,
                message.params,
                priority=message.priority,
                cache_salt=message.cache_salt,
                generated=message.generated,
            )
        except InvalidRequestError as error:
            sock.sendall(frame(Refused.of(message.key, error)))
    elif isinstance(message, Abort):
        engine.abort(message.key)
    elif isinstance(message, Inspect):
        sock.sendall(frame(Memory(message.number, engine.memory_summary())))


def _update(engine: Engine, output: StepOutput | None, began: float) -> Update:
    load, prefixes = engine.load(), engine.prefix_events()
    if output is None:
        return Update(b"", b"", [], [], {}, load, began, prefixes)
    return Update(
        output.keys.tobytes(),
        output.tokens.tobytes(),
        output.finished,
        output.started,
        output.logprobs,
        load,
        began,
        prefixes,
        output.scores,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s nanoengine %(message)s")
    sys.exit(main(int(sys.argv[1])))
