"""What bodies are made of: lists and objects of which a wrong one costs one error, however large it is.

pydantic collects every error of a list or an object. Of two million wrong items, which fit into a body of 4 MB, that is
seconds of the event loop and gigabytes, for an answer that names the first.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_UNKNOWN = 64  # fields that an object may have beyond those it knows, before it is refused without looking at them

T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list, read up to its first wrong item."""


class Strict(BaseModel):
    """An object with these fields and no others, each of just its type."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _is_not_full_of_others(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > len(cls.model_fields) + MAX_UNKNOWN:
            known = ", ".join(field.alias or name for name, field in cls.model_fields.items())
            raise ValueError(f"has {len(data)} fields; those that are known are {known}")
        return data
