"""Structured output as requests ask for it: OpenAI's ``response_format``, vLLM's ``structured_outputs``, and the older
``guided_*`` names of the same. All of them come to one ``Grammar``, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field, model_validator

from deployments.ingress.bodies import Many, Strict
from deployments.ingress.errors import bad_request
from nanoengine.structured.grammar import Grammar, Kind

Schema = dict[str, Any] | bool | str  # a string is a schema as JSON


class JsonSchemaFormat(Strict):
    """``strict`` changes nothing: a schema is kept to the letter, or refused."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs a json_schema, and no other type has one")
        return self


class StructuredOutputs(Strict):
    """vLLM's."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(BaseModel):
    """The fields of a request. At most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None

    def structured(self) -> Grammar | None:
        """What the answer has to match. Raises ``ApiError`` or ``InvalidRequestError`` that names the field."""
        asked = list(self._asked())
        if len(asked) > 1:
            names = " and ".join(field for field, _, _ in asked)
            raise bad_request(
                f"{names} cannot both be given: an answer can match one of them", asked[1][0].split(".")[0]
            )
        for field, kind, value in asked:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            return Grammar(kind, text, field)
        return None

    def _asked(self) -> Iterator[tuple[str, Kind, Any]]:
        """(field, kind, what it has to match)."""
        if (form := self.response_format) is not None:
            if form.json_schema is not None:
                yield "response_format.json_schema.schema", "json_schema", form.json_schema.schema_
            elif form.type == "json_object":
                yield "response_format", "json_object", ""
        kinds: tuple[tuple[Kind, str], ...] = (
            ("json_schema", "json"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar"),
        )  # fmt: skip
        new = self.structured_outputs or StructuredOutputs()
        for kind, name in kinds:
            if (value := getattr(new, "json_" if name == "json" else name)) is not None:
                yield f"structured_outputs.{name}", kind, value
            if (value := getattr(self, f"guided_{name}")) is not None:
                yield f"guided_{name}", kind, value
        if new.json_object:
            yield "structured_outputs.json_object", "json_object", ""
