"""build: what serve_config.yaml names as ``import_path``.

No ``from __future__ import annotations`` here: Serve finds the type of ``build``'s argument in its signature, and would
take a string there for no type at all.
"""

import asyncio

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.config import AppArgs
from deployments.ingress.api import Api
from deployments.ingress.engines import EngineClient
from deployments.ingress.text import TextFrontend
from deployments.metrics import RequestMetrics
from deployments.replica import EngineReplica
from nanoengine.sampling.defaults import sampling_defaults
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model


@serve.ingress()
class Ingress:
    """The HTTP API in a Serve replica."""

    def __init__(self, engine: DeploymentHandle, args: AppArgs) -> None:
        # Asks no engine for anything: an ingress starts, and answers /health, whether or not an engine does.
        files = resolve_model(args.engine.model, args.engine.revision)
        text = TextFrontend(
            load_tokenizer(files),
            args.ingress.tokenizer_threads,
            args.tool_parser,
            args.reasoning_parser,
            sampling_defaults(args.engine, files),
        )
        self._engines = EngineClient(engine, args.ingress)
        self._api = Api(args, self._engines, text, RequestMetrics(args.model_names[0]))

    async def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve awaits this on the event loop that requests will run on.
        self._background = asyncio.create_task(self._engines.run())
        return self._api.app()


def build(args: AppArgs) -> Application:
    """The application: an ingress that calls engine replicas by handle.

    Replicas, resources, router and autoscaling are not set here but in serve_config.yaml, all of them: Serve replaces
    such blocks of code by those of the file, and never merges them.
    """
    engine = serve.deployment(EngineReplica, name="EngineReplica").bind(
        args.engine, args.model_names[0], args.engine_stall_s
    )
    return serve.deployment(Ingress, name="Ingress").bind(engine, args)
