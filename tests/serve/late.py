"""The service, but that its engines load for as long as a test wants: a large model takes minutes."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.app import Ingress
from deployments.config import AppArgs
from deployments.replica import EngineReplica


class LateArgs(AppArgs):
    """``tickets``: a folder, of which each engine takes a file before it loads."""

    tickets: str


class LateReplica(EngineReplica):
    async def __init__(self, tickets: str, *args: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        while not await asyncio.to_thread(_taken, Path(tickets)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await super().__init__(*args)  # type: ignore[misc]


def _taken(tickets: Path) -> bool:
    for ticket in tickets.iterdir():
        with suppress(FileNotFoundError):  # another took it
            ticket.unlink()
            return True
    return False


def build(args: LateArgs) -> Application:
    """As ``deployments.app.build``, for one model."""
    (model,) = args.served
    engine = serve.deployment(LateReplica, name=model.deployment).bind(
        args.tickets, model.engine, model.model_names[0], args.engine_stall_s
    )
    return serve.deployment(Ingress, name="Ingress").bind(args, engine)
