"""Tool calls and reasoning in a text: one parse however the text is cut, nothing lost, nothing raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.parts import Items, Parser, Verbatim
from deployments.ingress.reasoning import ThinkParser
from deployments.ingress.tools.hermes import HermesParser
from deployments.ingress.tools.llama3 import Llama3Parser
from deployments.ingress.tools.mistral import MistralParser
from deployments.ingress.tools.pythonic import PythonicParser
from deployments.ingress.tools.qwen_coder import QwenCoderParser

F: dict[str, Any] = {
    "$defs": {"color": {"enum": ["red", "5"]}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "b": {"type": ["boolean", "null"]},
        "o": {"type": "object"},
        "any": {},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "some": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "integer"}]},
        "color": {"allOf": [{"$ref": "#/$defs/color"}]},
        "loop": {"$ref": "#/$defs/loop"},
        "broken": {"type": {"a": 1}, "anyOf": 5, "enum": None},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"f": F, "g": {}}
New = Callable[[Mapping[str, dict[str, Any]]], Parser]


def element(name: str, *arguments: tuple[str, str]) -> str:
    """A call as Qwen3-Coder writes it."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


VALUES = [
    # as Qwen3-Coder writes it, as which parameter; what it is in JSON
    ("s", "Paris", '"Paris"'),
    ("s", "", '""'),
    ("s", '  two\n\n"lines"\n', '"  two\\n\\n\\"lines\\"\\n"'),
    ("s", "5", '"5"'),
    ("s", "a < b </param", '"a < b </param"'),
    ("n", "5", "5"),
    ("n", "5.5", '"5.5"'),
    ("n", "five", '"five"'),
    ("b", "True", "true"),
    ("b", "false", "false"),
    ("b", "None", "null"),
    ("o", '{"a": [1, "é"]}', '{"a": [1, "é"]}'),
    ("o", '{"a": NaN', '"{\\"a\\": NaN"'),
    ("any", "[1]", "[1]"),
    ("any", "NaN", '"NaN"'),
    ("any", "one", '"one"'),
    ("maybe", "null", "null"),
    ("maybe", "5", '"5"'),
    ("some", "[1]", "[1]"),
    ("some", "5.5", '"5.5"'),
    ("color", "5", '"5"'),
    ("loop", "5", "5"),
    ("broken", "x", '"x"'),
    ("not there", "5", "5"),
]

CASES: list[tuple[New, str, list[tuple[str, str]]]] = [
    (HermesParser, "  hi \n", [("", "  hi \n")]),
    (
        HermesParser,
        'Let me.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": [1, {"c": 2}]}, "name": "g"}</tool_call>\n',
        [("", "Let me."), ("f", '{"a": "}</tool_call>\\""}'), ("g", '{"b": [1, {"c": 2}]}')],
    ),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    (HermesParser, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', [("unknown", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}} so</tool_call>', [("f", "{}"), ("", " so</tool_call>")]),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool',
        [("f", "{}"), ("g", "{}")],
    ),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "cut', [("f", '{"a": "cut')]),
    (HermesParser, "a <tool", [("", "a <tool")]),
    # malformed before it is a call: text
    (HermesParser, 'a <tool_call>{"na', [("", 'a <tool_call>{"na')]),
    *[
        (HermesParser, f"<tool_call>{bad}</tool_call>", [("", f"<tool_call>{bad}</tool_call>")])
        for bad in (
            *("f(1)", "[]", '{"name": 3}', '{"name": ""}', '{"arguments": {}}', '{"name": "f", "arguments": [1]}'),
            *('{"name": "f", "arguments": 5}', '{"name": "f", "arguments": "x"}', '{"nme": "f"}', '{"name" "f"}'),
            '{"name": "\\ud800", "arguments": {}}',
        )
    ],
    (
        HermesParser,
        '<tool_call>oops</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nand',
        [("", "<tool_call>oops</tool_call>"), ("f", "{}"), ("", "\nand")],
    ),
    (
        Llama3Parser,
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}} ',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (Llama3Parser, '{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
    (Llama3Parser, '<|python_tag|>{"name": "unknown", "parameters": {}}', [("unknown", "{}")]),
    (Llama3Parser, '{"name": "Ada", "parameters": {}}', [("", '{"name": "Ada", "parameters": {}}')]),
    (Llama3Parser, '{"answer": 3}', [("", '{"answer": 3}')]),
    (
        Llama3Parser,
        'I say {"name": "f", "parameters": {}}',
        [("", 'I say {"name": "f", "parameters": {}}')],
    ),
    (Llama3Parser, "<|python_tag|>print(1)", [("", "print(1)")]),
    (Llama3Parser, '{"name": "f", "parameters": {}} ; so', [("f", "{}"), ("", " ; so")]),
    (
        MistralParser,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        MistralParser,
        'So.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        [("", "So."), ("f", '{"a": 1}'), ("g", "{}")],
    ),
    (MistralParser, '[TOOL_CALLS]f{"a": {}} x', [("f", '{"a": {}}'), ("", " x")]),
    (MistralParser, "[TOOL_CALLS]hello, world", [("", "hello, world")]),
    (MistralParser, "[TOOL_CALLS]foo bar[TOOL_CALLS]g[ARGS]{}", [("", "foo bar"), ("g", "{}")]),
    (MistralParser, '[TOOL_CALLS][{"x": 1}]', [("", '[{"x": 1}]')]),
    (MistralParser, "[TOOL_CALLS][5]", [("", "[5]")]),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a', [("f", '{"a')]),
    (MistralParser, "[TOOL_CALLS]f[AR", [("", "f[AR")]),
    *[
        (QwenCoderParser, element("f", (key, written)), [("f", f'{{"{key}": {value}}}')])
        for key, written, value in VALUES
    ],
    (
        QwenCoderParser,
        "Let me.\n" + element("f", ("s", "x"), ("n", "1")) + "\n" + element("g") + "\n",
        [("", "Let me."), ("f", '{"s": "x", "n": 1}'), ("g", "{}")],
    ),
    (QwenCoderParser, element("unknown", ("a", "b")), [("unknown", '{"a": "b"}')]),
    # marks and line breaks that are missing
    (QwenCoderParser, "<tool_call><function=f><parameter=s>x</parameter></function>", [("f", '{"s": "x"}')]),
    (QwenCoderParser, "<tool_call><function=g></tool_call> so", [("g", "{}"), ("", " so")]),
    (QwenCoderParser, "<tool_call><function=g>so</tool_call>", [("g", "{}"), ("", "so</tool_call>")]),
    (QwenCoderParser, "<tool_call><function=g><parameter=>", [("g", "{}"), ("", "<parameter=>")]),
    (QwenCoderParser, "<tool_call>\n<function=f>\n<parameter=s>\ncut\n<", [("f", '{"s": "cut')]),
    (QwenCoderParser, "<tool_call>\n<function=f>\n<parameter=n>\n5", [("f", '{"n": ')]),
    *[
        (QwenCoderParser, f"a <tool_call>{bad}", [("", f"a <tool_call>{bad}")])
        for bad in ("", "\n<func", "<function=", "<function=>", "<function=a\nb>", '{"name": "f"}', "<parameter=a>")
    ],
    (QwenCoderParser, "<tool_call>oops" + element("g"), [("", "<tool_call>oops"), ("g", "{}")]),
    (
        PythonicParser,
        " [f(s='it\\'s', n=-1.5, b=True, o={'a': None, \"b\": [1, false]}) , g()]\n",
        [("f", '{"s": "it\'s", "n": -1.5, "b": true, "o": {"a": null, "b": [1, false]}}'), ("g", "{}")],
    ),
    *[
        (PythonicParser, f"[f(x={written})]", [("f", f'{{"x": {value}}}')])
        for written, value in (
            ("'a, b) ]'", '"a, b) ]"'),
            (r"'\x41\u00e9\d\n\ud83d\ude00\ud83d'", '"A\u00e9\\\\d\\n\U0001f600\ufffd"'),
            ("'two\nlines'", '"two\\nlines"'),
            ("Paris", '"Paris"'),
            ("g(1, [2])", '"g(1, [2])"'),
            ("NaN", '"NaN"'),
            ("", '""'),
            ("null", "null"),
            ("[1, 'a']", '[1, "a"]'),
        )
    ],
    (PythonicParser, "<|python_start|>[unknown(a=1)]", [("unknown", '{"a": 1}')]),
    (PythonicParser, "So. <|python_start|>[g()]", [("", "So."), ("g", "{}")]),
    (PythonicParser, "[f(s='cut", [("f", '{"s": ')]),
    (PythonicParser, "[f(s=1 so)] so", [("f", '{"s": "1 so"}'), ("", " so")]),
    (PythonicParser, "[f(s=1,)]", [("f", '{"s": 1}')]),
    (PythonicParser, "[f(s=1, 2)]", [("f", '{"s": 1}'), ("", ", 2)]")]),
    (PythonicParser, "[g() g()]", [("g", "{}"), ("", " g()]")]),
    *[
        (PythonicParser, text, [("", text)])
        for text in (
            "[sic] so",
            "[1, 2]",
            "[unknown(a=1)]",
            "[f('Paris')]",
            "f(s=1)",
            "I say [f(s=1)]",
            "[]",
            "[f(s",
            " [",
        )
    ],
]


def parse(parser: Parser, pieces: Iterable[str]) -> list[tuple[str, str, str]]:
    """(kind, name, text) of each item."""
    items = Items()
    for piece in pieces:
        for part in parser.push(piece):
            items.add(part)
    for part in parser.end():
        items.add(part)
    numbers = [item.call.number for item in items.items if item.call]
    assert numbers == list(range(len(numbers)))
    return [(item.kind.__name__, item.call.name if item.call else "", item.text) for item in items.items]


def cuts(text: str) -> Iterable[list[str]]:
    yield list(text)
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]


@pytest.mark.parametrize(("new", "text", "expected"), CASES)
def test_formats_at_every_cut(new: New, text: str, expected: list[tuple[str, str]]) -> None:
    whole = parse(new(TOOLS), [text])
    assert [(name, text) for _, name, text in whole] == expected
    for pieces in cuts(text):
        assert parse(new(TOOLS), pieces) == whole


THOUGHTS = [
    # text, opened in the prompt, reasoning, answer
    ("<think>\nhm </thi\n</think>\n\nyes", False, "hm </thi", "yes"),
    ("\n<think></think>yes", False, None, "yes"),
    ("hm\n</think>\n\n  yes", True, "hm", "  yes"),
    ("hm", True, "hm", None),
    ("<think>\nhm\n", False, "hm\n", None),
    ("yes <think>no</think>", False, None, "yes <think>no</think>"),
    (" <thin", False, None, " <thin"),
    ("yes</think>", False, None, "yes</think>"),
]


@pytest.mark.parametrize(("text", "opened", "thought", "answer"), THOUGHTS)
def test_reasoning_at_every_cut(text: str, opened: bool, thought: str | None, answer: str | None) -> None:
    expected = [("Reasoning", "", thought)] * (thought is not None) + [("Text", "", answer)] * (answer is not None)
    for pieces in cuts(text):
        assert parse(ThinkParser(Verbatim(), opened=opened), pieces) == expected


@pytest.mark.parametrize(("new", "text", "expected"), CASES)
def test_calls_after_reasoning(new: New, text: str, expected: list[tuple[str, str]]) -> None:
    """A mark within the reasoning is none."""
    thought = f"I could write {text.strip()}"
    for pieces in ([f"<think>{thought}</think>", text], list(f"<think>{thought}</think>{text}")):
        first, *others = parse(ThinkParser(new(TOOLS), opened=False), pieces)
        assert first == ("Reasoning", "", thought)
        assert [(name, text) for _, name, text in others] == expected


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', "{}", "}", "{", "[", "]", '"', "\\", ",", ";"),
    *(":", " ", "\n", "f", "null", "é", "hello ", "<", '{"name": "f", "arguments": {"x": [1, "}"]}}', "\\ud800"),
    *("<function=f>", "<function=", "</function>", "<parameter=s>", "<parameter=n>", "</parameter>", "</", ">", "'"),
    *("f(", "g()", "s=", "(", ")", "True", "<|python_start|>"),
]
PARSERS: dict[str, Callable[[], Parser]] = {
    "hermes": lambda: HermesParser(TOOLS),
    "llama3": lambda: Llama3Parser(TOOLS),
    "mistral": lambda: MistralParser(TOOLS),
    "qwen_coder": lambda: QwenCoderParser(TOOLS),
    "pythonic": lambda: PythonicParser(TOOLS),
    "think": lambda: ThinkParser(Verbatim(), opened=False),
    "opened": lambda: ThinkParser(HermesParser(TOOLS), opened=True),
    "think+mistral": lambda: ThinkParser(MistralParser(TOOLS), opened=False),
}


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.data())
def test_any_text_cut_anywhere(name: str, fragments: list[str], data: Any) -> None:
    text = "".join(fragments)
    whole = parse(PARSERS[name](), [text])
    assert parse(PARSERS[name](), list(text)) == whole
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parse(PARSERS[name](), pieces) == whole
    # Nothing is lost but marks, layout, and what a call's object is made of.
    if not any(kind == "Call" for kind, _, _ in whole):
        kept = "".join(text for _, _, text in whole)
        for mark in ("[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>", "<think>", "</think>", *"\n "):
            text, kept = text.replace(mark, ""), kept.replace(mark, "")
        assert kept == text


HOSTILE: dict[str, list[str]] = {
    "hermes": [
        "<" * 200_000,
        "<tool_call>" * 20_000,
        '<tool_call>{"' * 20_000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * 200_000,
        '<tool_call>{"name": "f", "id": "' + "x" * 200_000,
        '<tool_call>{"name": "f", "arguments": ' + "{" * 200_000,
    ],
    "llama3": ['{"name": "f", "parameters": {}}' + ";" * 200_000],
    "mistral": [
        "[TOOL_CALLS]" * 20_000,
        "[TOOL_CALLS]" + "a" * 200_000,
        "[TOOL_CALLS]" + " " * 200_000,
        "[TOOL_CALLS][" + "," * 200_000,
    ],
    "qwen_coder": [
        "<tool_call><function=f><parameter=s>" + "\n<" * 100_000,
        "<tool_call><function=f><parameter=n>" + "[" * 200_000 + "</parameter>",
        "<tool_call><function=f>" + "<parameter=s>x</parameter>" * 8_000,
        "<tool_call><function=" * 10_000,
        "<tool_call>" + " " * 200_000,
    ],
    "pythonic": [
        "[f(s=" + "[" * 200_000 + "'" * 3 + ",)",
        "[f(s='" + "\\'" * 100_000 + "')",
        "[f(" + ", " * 100_000 + "s=1)",
        "[" + " " * 200_000,
        "<|python_start|>" * 10_000,
    ],
    "think": ["<think>" + "\n" * 200_000, "<think>" + "</think" * 30_000],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_time_is_linear(name: str) -> None:
    """A character at a time, 200,000 of them: seconds if each were copied again with the next."""
    for text in (" " * 200_000, "\n" * 200_000 + "x", *HOSTILE[name]):
        start = time.process_time()
        parse(PARSERS[name](), text)
        assert time.process_time() - start < 2, text[:50]
