"""Calls of Qwen3-Coder and Qwen3.5: ``<tool_call>`` as Hermes has it, and in it each argument as it is::

    <function=name>
    <parameter=city>
    Paris
    </parameter>
    </function>

What is no string is JSON there, or a word of Python (their templates print ``True``); which of the two an argument is,
the tool's schema has to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import NoneType
from typing import Any

from deployments.ingress.parts import Arguments, Call, Part, Until
from deployments.ingress.tools.format import Function, ToolFormat, call_id
from deployments.ingress.tools.grammar import Parameter, SchemaError, Terminal, json_rule, parameters
from deployments.ingress.tools.hermes import CLOSE, OPEN, HermesParser

_FUNCTION, _PARAMETER, _END_VALUE, _END = "<function=", "<parameter=", "</parameter>", "</function>"
_MAX_HEAD = 512  # characters of a mark with a name in it, and of layout before it
_NOT_IN_NAME = re.compile(r"[<>\n]")

_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null", list: "array", dict: "object",
}  # fmt: skip
_ANY = frozenset(_TYPES.values())
_STRING = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}


class CallElement:
    """The state machine of one call: a ``parser.OpenCall``. It begins with its function's name.

    Strings go out as they come. Others go out whole, as it takes the whole to know whether they are JSON.
    """

    def __init__(self, number: int, id: str, tools: Mapping[str, dict[str, Any]]) -> None:
        self._number, self._id, self._tools = number, id, tools
        self._head = ""  # a mark that is not whole yet, and before the call begins all there is
        self._schema: dict[str, Any] = {}
        self._seen: dict[str, frozenset[str]] = {}
        self._parameters = 0
        self._until: Until | None = None  # of the value that has begun
        self._kinds = _ANY  # of it
        self._pieces: list[str] = []  # of it, where it goes out whole
        self._starts = False  # the line break before it is still to come
        self.begun = False
        self.rest: str | None = None

    @property
    def raw(self) -> str:
        return self._head

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        following: str | None = text
        while following and self.rest is None:
            following = self._mark(following, parts) if self._until is None else self._value(following, parts)
        return parts

    def _mark(self, text: str, parts: list[Part]) -> str | None:
        """Read the next mark, and give what follows it: None while it is not whole."""
        head = self._head + text
        solid = head.lstrip()
        mark = _PARAMETER if self.begun else _FUNCTION
        found = _NOT_IN_NAME.search(solid, len(mark)) if solid.startswith(mark) else None
        if found is not None and found[0] == ">" and found.start() > len(mark):
            name, self._head = solid[len(mark) : found.start()], ""
            (self._begin_value if self.begun else self._begin)(name, parts)
            return solid[found.end() :]
        if self.begun and solid.startswith(_END):
            self._end(solid[len(_END) :], parts)
        elif (
            found is None
            and len(head) <= _MAX_HEAD
            and (solid.startswith(mark) or mark.startswith(solid) or (self.begun and _END.startswith(solid)))
        ):
            self._head = head
        elif self.begun:
            self._end(solid, parts)
        else:
            self._head, self.rest = "", head
        return None

    def _begin(self, name: str, parts: list[Part]) -> None:
        self.begun = True
        self._schema = self._tools.get(name, {})
        parts += [Call(self._number, self._id, name), Arguments(self._number, "{")]

    def _end(self, rest: str, parts: list[Part]) -> None:
        parts.append(Arguments(self._number, "}"))
        self._head, self.rest = "", rest

    def _begin_value(self, name: str, parts: list[Part]) -> None:
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        self._kinds = _kinds(schema, self._schema, self._seen)
        self._until, self._starts = Until(_END_VALUE, "\n"), True
        key = f"{', ' if self._parameters else ''}{json.dumps(name, ensure_ascii=False)}: "
        parts.append(Arguments(self._number, key + ('"' if self._kinds <= _STRING else "")))
        self._parameters += 1

    def _value(self, text: str, parts: list[Part]) -> str | None:
        """More of the value; gives what follows it."""
        assert self._until is not None
        if self._starts:
            text, self._starts = text.removeprefix("\n"), False
        words, following = self._until.push(text)
        if following is not None:
            words += self._until.dropped.removesuffix("\n")
            self._until = None
        if self._kinds <= _STRING:
            words = _quoted(words)[1:-1] + ("" if following is None else '"')
        else:
            self._pieces.append(words)
            words = "" if following is None else _argument("".join(self._pieces), self._kinds)
        if words:
            parts.append(Arguments(self._number, words))
        if following is not None:
            self._pieces = []
        return following


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _argument(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a value that may be no string."""
    word = _WORDS.get(text.strip(), text)
    try:
        value = json.loads(word, parse_constant=lambda constant: "")  # NaN is no JSON
        if not isinstance(value, str) and _TYPES[type(value)] in kinds:
            return word
    except (ValueError, RecursionError):
        pass
    return _quoted(text)


def _kinds(schema: Any, root: dict[str, Any], seen: dict[str, frozenset[str]]) -> frozenset[str]:
    """The types that a schema admits, as far as that is easily seen. It may be no valid schema."""
    if not isinstance(schema, dict):
        return _ANY
    kinds = _ANY
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in seen:
            seen[ref] = _ANY  # to itself it says nothing
            seen[ref] = _kinds(_resolved(ref, root), root, seen)
        kinds &= seen[ref]
    if "const" in schema:
        kinds &= {_TYPES[type(schema["const"])]}
    if isinstance(values := schema.get("enum"), list):
        kinds &= {_TYPES[type(value)] for value in values}
    if types := schema.get("type"):
        names = {name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str)}
        kinds &= names | ({"integer"} if "number" in names else set())
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list):
            kinds &= frozenset().union(*(_kinds(branch, root, seen) for branch in branches))
    for part in every if isinstance(every := schema.get("allOf"), list) else ():
        kinds &= _kinds(part, root, seen)
    return kinds


def _resolved(ref: Any, root: dict[str, Any]) -> Any:
    for word in _DEFINITIONS:
        if isinstance(ref, str) and ref.startswith(f"#/{word}/") and isinstance(named := root.get(word), dict):
            return named.get(ref.removeprefix(f"#/{word}/"))
    return None


class QwenCoderParser(HermesParser):
    """Between the marks any name is a call."""

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(tools)
        self._tools = tools

    def _new_call(self) -> CallElement:
        return CallElement(self._calls, call_id(), self._tools)


# -- the grammar of a forced call --------------------------------------------------------------------------------------

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_DEFINITIONS = ("$defs", "definitions")
_MAX_DEPTH = 8  # of alternatives in alternatives and references to references
_MAX_BRANCHES = 256
_TAIL = json.dumps(f"\n{_END_VALUE}\n")


def _grammar(functions: Sequence[Function], many: bool, terminal: Terminal) -> str:
    rules = ['calls: call ("\\n" call)*\n' if many else "calls: call\n"]
    rules.append(f'call: {terminal(OPEN)} "\\n" function "\\n" {terminal(CLOSE)}\n')
    rules.append(f"function: {' | '.join(f'function_{i}' for i in range(len(functions)))}\n")
    for i, function in enumerate(functions):
        values = parameters(function.schema)
        elements = [f"element_{i}_{j}{'' if value.required else '?'}" for j, value in enumerate(values)]
        head = json.dumps(f"{_FUNCTION}{function.name}>\n")
        rules.append(f"function_{i}: {' '.join([head, *elements, json.dumps(_END)])}\n")
        rules += [_element(f"element_{i}_{j}", value, function.schema) for j, value in enumerate(values)]
    return "".join(rules)


def _element(rule: str, value: Parameter, root: dict[str, Any]) -> str:
    """``rule``: one argument in its marks. Raises ``SchemaError`` for what its plain text cannot be held to."""
    if _NOT_IN_NAME.search(value.name):
        raise SchemaError(f"has a parameter {value.name!r}, which cannot be written as this model writes calls")
    branches = list(islice(_branches(value.schema, root), _MAX_BRANCHES + 1))
    if len(branches) > _MAX_BRANCHES:
        raise SchemaError(f"has a parameter {value.name!r} with more than {_MAX_BRANCHES} alternatives")
    ways: list[str] = []
    rules: list[str] = []
    free: set[str] = set()  # what is asked of ways that any text would pass for, if that may come too
    seen: dict[str, frozenset[str]] = {}
    for i, branch in enumerate(branches):
        others = branch.keys() - _NOTES - {*_DEFINITIONS} - {"type"}
        kinds, name = _kinds(branch, root, seen), f"{rule}_{i}"
        values = branch.get("enum", [branch.get("const")])
        if others and others <= {"const", "enum"} and isinstance(values, list):
            possible = (each for each in values if _TYPES[type(each)] in kinds)
            texts = (each if isinstance(each, str) else json.dumps(each) for each in possible)
            ways += [f"{_quoted(text)} {_TAIL}" for text in texts]
        elif "string" not in kinds:
            ways.append(f"{name} {_TAIL}")
            rules.append(json_rule(name, branch))
            free |= others
        elif others <= {"minLength", "maxLength"} and all(type(branch[word]) is int for word in others):
            # With its tail it is one terminal, as the text may be anything but that.
            lengths = f"{branch.get('minLength', 0)},{branch.get('maxLength', '')}"
            ways.append(name.upper())
            rules.append(f"{name.upper()}: (/(?s:.{{{lengths}}})/ & ~/(?s:.*)<\\/parameter>(?s:.*)/) {_TAIL}\n")
            free.add("string")
        else:
            raise _cannot(value.name, others)
    if "string" in free and len(free) > 1:
        raise _cannot(value.name, free - _STRING)
    if not ways:
        raise SchemaError(f"has a parameter {value.name!r} that no value is valid for")
    head = json.dumps(f"{_PARAMETER}{value.name}>\n", ensure_ascii=False)
    return f"{rule}: {head} ({' | '.join(ways)})\n{''.join(rules)}"


def _cannot(name: str, words: set[str]) -> SchemaError:
    return SchemaError(
        f"has a parameter {name!r} that may be a string, and {' and '.join(sorted(words))}: this model writes strings "
        "without quotes, where that cannot be kept"
    )


def _branches(schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The alternatives that a schema consists of, each with the definitions that its references need."""
    words = schema.keys() - _NOTES - {*_DEFINITIONS}
    (word,) = words if len(words) == 1 and depth < _MAX_DEPTH else ("",)
    parts = [_resolved(schema[word], root)] if word == "$ref" else schema.get(word)
    if (
        parts
        and isinstance(parts, list)
        and (word in ("$ref", "anyOf", "oneOf") or (word == "allOf" and len(parts) == 1))
    ):
        for part in parts:
            yield from _branches(part if isinstance(part, dict) else {"allOf": [part]}, root, depth + 1)
    else:
        yield {word: root[word] for word in _DEFINITIONS if word in root} | schema


QWEN_CODER = ToolFormat("qwen_coder", (OPEN, CLOSE), QwenCoderParser, _grammar)
