"""JSON Schema as the grammar library takes it: what it would get wrong, or never finish, is mended or refused here."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

MAX_MULTIPLE = 100_000  # states of an automaton that knows a remainder: 0.3 s

_DATA = frozenset({"const", "enum", "default", "example", "examples"})  # hold values, which are nobody's to change
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # hold schemas under names


class SchemaError(Exception):
    """What cannot be served, as the end of a sentence."""


def prepared(schema: Any) -> Any:
    """An equal schema that the library follows to the letter. Raises ``SchemaError``."""
    multiples: set[int] = set()
    schema = _prepared({"allOf": [schema]} if isinstance(schema, bool) else schema, multiples)
    # Where schemas are combined, the states for their remainders multiply: what counts is the product of all.
    product = 1
    for multiple in multiples:
        product *= multiple
        if product > MAX_MULTIPLE:
            raise SchemaError(
                "is too large: its values of multipleOf, without decimal points, multiply to more than "
                f"{MAX_MULTIPLE}, which takes too long to compile"
            )
    return schema


def _prepared(schema: Any, multiples: set[int]) -> Any:
    if isinstance(schema, list):
        return [_prepared(item, multiples) for item in schema]
    if not isinstance(schema, dict):
        return schema
    _check_bounds(schema)
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            mend = _pattern if key == "patternProperties" else str
            result[key] = {mend(name): _prepared(child, multiples) for name, child in value.items()}
        elif key == "pattern" and isinstance(value, str):
            result[key] = _pattern(value)
        elif key == "uniqueItems" and value is False:
            pass  # asks for nothing, and the library refuses the word
        else:
            if key == "multipleOf" and _is_number(value):
                if value <= 0:
                    raise SchemaError(f"has a multipleOf of {value}: it must be greater than 0")
                multiples.add(_numerator(value))
            result[key] = value if key in _DATA else _prepared(value, multiples)
    return result


def _check_bounds(schema: dict[str, Any]) -> None:
    """llguidance 1.9.1 lets an excluded bound through if it is whole and the other one is less than 1 away."""
    for name in ("exclusiveMinimum", "exclusiveMaximum"):  # the library would take no notice of it
        if isinstance(schema.get(name), bool):
            raise SchemaError(f"has true or false as {name}, which is of draft 4: write the number itself")
    names = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    low, above, high, below = (value if _is_number(value := schema.get(name)) else None for name in names)
    if schema.get("type") == "integer" or (low is None and above is None) or (high is None and below is None):
        return
    width = min(x for x in (high, below) if x is not None) - max(x for x in (low, above) if x is not None)
    whole = any(bound is not None and float(bound).is_integer() for bound in (above, below))
    if whole and width < 1:
        raise SchemaError(
            "has a number between bounds that are less than 1 apart, of which one is excluded and whole: include it"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numerator(value: float) -> int:
    """The value without its decimal point: 0.25 is 25, 1e6 is a million."""
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    zeros = min(max(exponent, 0), 9) if isinstance(exponent, int) else 0  # nine are too many as it is
    return int("".join(map(str, digits))) * 10**zeros or 1


def _pattern(pattern: str) -> str:
    r"""An equal pattern, but for U+0001, that is right inside of JSON.

    Where a class leaves out a quote or a backslash, [^"], but no control character, llguidance 1.9.1 lets the escaped
    one through: "\"". One control character left out of it, and it does not. Classes are also where the dialects
    differ: in Rust's a bracket opens another class, and && -- ~~ are operators.
    """
    out, inside, i = [], False, 0
    while i < len(pattern):
        two = pattern[i : i + 2]
        if two.startswith("\\"):
            out.append(two)
            i += 2
            continue
        if not inside and two.startswith("["):
            inside = True
            if two == "[^":
                out.append("[^\\x01")
                i += 2
            else:
                out.append("[")
                i += 1
            if pattern.startswith("]", i):
                raise SchemaError(f"has a pattern that is read in two ways, {pattern!r}: write \\] inside of a class")
            continue
        if inside and two in ("&&", "--", "~~"):
            raise SchemaError(f"has a pattern that is read in two ways, {pattern!r}: write {two[0]}\\{two[1]}")
        if inside and two.startswith("]"):
            inside = False
        out.append("\\[" if inside and two.startswith("[") else two[0])
        i += 1
    return "".join(out)
