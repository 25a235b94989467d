"""build: what serve_config.yaml names as ``import_path``.

No ``from __future__ import annotations`` here: Serve finds the type of ``build``'s argument in its signature, and would
take a string there for no type at all.
"""

import asyncio

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.config import AppArgs, ModelArgs
from deployments.ingress.api import Api
from deployments.ingress.engines import EngineClient
from deployments.ingress.served import ServedModel
from deployments.ingress.text import TextFrontend
from deployments.metrics import RequestMetrics
from deployments.replica import EngineReplica
from nanoengine.sampling.defaults import sampling_defaults
from nanoengine.text.tokenizer import load_tokenizer
from nanoengine.weights.sources import resolve_model


@serve.ingress()
class Ingress:
    """The HTTP API in a Serve replica."""

    def __init__(self, args: AppArgs, *engines: DeploymentHandle) -> None:
        """``engines``: of each model of ``args.served``."""
        # Asks no engine for anything: an ingress starts, and answers /health, whether or not an engine does.
        self._clients = []
        models = []
        for engine, model in zip(engines, args.served, strict=True):
            metrics = RequestMetrics(model.model_names[0])
            client = EngineClient(engine, args.ingress, model.engine.identity, metrics.continued)
            self._clients.append(client)
            models.append(ServedModel(model, args.ingress, client, _text(model, args), metrics))
        self._api = Api(args.ingress, models)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve awaits this on the event loop that requests will run on.
        self._background = [asyncio.create_task(client.run()) for client in self._clients]
        return self._api.app()

    async def drain(self, end: bool = False) -> int:
        """Refuse new requests from now on, and with ``end`` end those that are open, with an error; returns how many
        are. The service is about to be stopped."""
        if end:
            for client in self._clients:
                client.stop()
        return self._api.drain()


def _text(model: ModelArgs, args: AppArgs) -> TextFrontend:
    files = resolve_model(model.engine.model, model.engine.revision)
    return TextFrontend(
        load_tokenizer(files),
        args.ingress.tokenizer_threads,
        model.tool_parser,
        model.reasoning_parser,
        sampling_defaults(model.engine, files),
    )


def build(args: AppArgs) -> Application:
    """The application: an ingress that calls engine replicas by handle, those of each model in a deployment of its own.

    Replicas, resources, router and autoscaling are not set here but in serve_config.yaml, all of them: Serve replaces
    such blocks of code by those of the file, and never merges them.
    """
    engines = [
        serve.deployment(EngineReplica, name=model.deployment).bind(
            model.engine, model.model_names[0], args.engine_stall_s
        )
        for model in args.served
    ]
    return serve.deployment(Ingress, name="Ingress").bind(args, *engines)
