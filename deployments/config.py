"""AppArgs: the ``args`` of an application in serve_config.yaml, checked once at the edge."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nanoengine.config import EngineConfig

ToolParserName = Literal["auto", "hermes", "llama3", "mistral", "pythonic", "qwen_coder", "none"]
ReasoningParserName = Literal["auto", "think", "none"]


class IngressConfig(BaseModel):
    """Limits of one ingress replica. They bound memory and queueing before any engine sees a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_inflight_requests: int = Field(
        512,
        ge=1,
        description="HTTP requests that one ingress replica holds at once; the next one gets 429 with Retry-After.",
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Longest request body; a longer one gets 413.")
    max_choices: int = Field(32, ge=1, description="Most completions of one request: prompts times n.")
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Chat's max_tokens where a request sets none, cut to what fits; None is the rest of the context.",
    )
    retry_after_s: int = Field(1, ge=1, description="Retry-After of 429 and 503 answers, in seconds.")
    replica_wait_s: float = Field(
        2.0,
        ge=0,
        description="How long a request waits where no engine replica is up, before its 503.",
    )
    start_wait_s: float | None = Field(
        None,
        gt=0,
        description="For min_replicas 0, and in place of replica_wait_s: how long a request may wait for the first "
        "engine to start. More than that takes.",
    )
    resume_wait_s: float = Field(
        30.0,
        ge=0,
        description="How long a request that has lost its replica waits for another one, before its error.",
    )
    tokenizer_threads: int = Field(2, ge=1, description="Threads that render chat templates and tokenise.")


class ModelArgs(BaseModel):
    """One model, under one name or several, and the deployment of its engines."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    served_model_names: tuple[str, ...] = Field(
        (), description="Names that clients may give as `model`; empty takes engine.model's."
    )
    engine: EngineConfig = EngineConfig()
    deployment: str = Field(
        "EngineReplica",
        min_length=1,
        description="Name of its engines' deployment, under which the file configures it.",
    )
    tool_parser: ToolParserName = Field(
        "auto", description="How the model writes tool calls; auto knows it by the model's chat template."
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="Whether reasoning is told from the answer; auto does it where the chat template knows <think>. "
        "none leaves it in the text.",
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that the API answers to, the first of them as the model's id."""
        return self.served_model_names or (self.engine.model,)


class AppArgs(ModelArgs):
    """What ``deployments.app:build`` takes: one model, or several in ``models``, each with a deployment of its own."""

    models: tuple[ModelArgs, ...] = Field(
        (), description="Several models in place of the one that the keys beside it describe."
    )
    engine_stall_s: float = Field(
        60, gt=0, description="An engine that is busy with one step for so long is ended, and its replica replaced."
    )
    ingress: IngressConfig = IngressConfig()

    @model_validator(mode="before")
    @classmethod
    def _name_the_nearest_key(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (complaints := list(unknown_keys(cls, data))):
            raise ValueError("; ".join(complaints))
        return data

    @model_validator(mode="after")
    def _every_model_is_told_from_the_others(self) -> AppArgs:
        beside = sorted(self.model_fields_set & ModelArgs.model_fields.keys())
        if self.models and beside:
            raise ValueError(f"with models, {', '.join(beside)} must be said of each of them, in its entry there")
        for what, given in (
            ("deployment", [model.deployment for model in self.served]),
            ("name", [name for model in self.served for name in model.model_names]),
        ):
            if twice := sorted({each for each in given if given.count(each) > 1}):
                raise ValueError(f"two models have the {what} {twice[0]!r}: each needs its own")
        return self

    @property
    def served(self) -> tuple[ModelArgs, ...]:
        """Every model of the application."""
        return self.models or (self,)


def unknown_keys(model: type[BaseModel], data: Any, path: str = "") -> Iterator[str]:
    """A complaint for each key of ``data``, at any depth, that ``model`` doesn't have, naming the nearest that it has.

    Values are not checked, that is pydantic's work; this finds what pydantic ignores or reports without a hint.
    """
    if not isinstance(data, Mapping):
        return
    names = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, value in data.items():
        where = f"{path}{key}"
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(names))}"
            yield f"unknown key {where!r}: {hint}"
            continue
        inner = _model_in(names[key])
        if inner is None:
            continue
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from unknown_keys(inner, item, f"{where}[{index}].")
        else:
            yield from unknown_keys(inner, value, f"{where}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model that values of this annotation are made of, through Optional, Union and list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, tuple):
        return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
    return None
