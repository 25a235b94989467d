"""Tool calls and reasoning over /v1/chat/completions: the streamed answer is the whole one, and clients find it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from deployments.ingress.dialect import Dialect
from deployments.ingress.tools.select import select
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.detokenizer import Detokenizer
from nanoengine.text.tokenizer import Tokenizer
from tests.serve.conversations import ARGUMENTS, CALLS, SPECIAL, TOOLS, Conversation, put_together, tokenizer

USER = {"role": "user", "content": "Paris?"}
ASKED: dict[str, Any] = {"messages": [USER], "tools": TOOLS}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 1}])
async def test_streamed_equals_whole_at_every_cut(kind: str, extra: dict[str, Any]) -> None:
    service = Conversation(kind)
    text = CALLS[kind]
    service.says(text, [])
    whole = (await service.whole(**ASKED, **extra))["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert whole["message"]["content"] is None
    assert whole["message"].get("reasoning_content") == ("Where?" if kind in ("think", "opened") else None)
    assert whole["finish_reason"] == "tool_calls"
    for cut in [None, *([at] for at in range(1, len(text)))]:
        service.says(text, cut)
        events = await service.stream(**ASKED, **extra)
        streamed = put_together(events)
        assert without_ids(streamed["message"]) == without_ids(whole["message"])
        assert streamed["finish_reason"] == whole["finish_reason"]
        if extra:
            entries = [e["choices"][0]["logprobs"] for e in events]
            assert [x for entry in entries if entry for x in entry["content"]] == whole["logprobs"]["content"]


async def test_arguments_come_as_they_are_written() -> None:
    service = Conversation("hermes")
    service.says(CALLS["hermes"])
    events = await service.stream(**ASKED)
    fragments = [e["choices"][0]["delta"]["tool_calls"][0] for e in events if "tool_calls" in e["choices"][0]["delta"]]
    assert fragments[0]["function"] == {"name": "weather", "arguments": ""}
    assert fragments[0]["id"].startswith("call_")
    assert len(fragments) == 1 + len('{"city": "Paris"}')
    assert events[-1]["choices"][0]["delta"] == {}


async def test_several_choices_have_parsers_of_their_own() -> None:
    service = Conversation("think")
    service.says(CALLS["think"])
    events = await service.stream(**ASKED, n=3, stream_options={"include_usage": True})
    whole = await service.whole(**ASKED, n=3)
    for choice in whole["choices"]:
        assert without_ids(put_together(events, choice["index"])["message"]) == without_ids(choice["message"])
    assert events[-1]["usage"] == whole["usage"]
    thought = len("<think>\nWhere?\n</think")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * thought}
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]]
    assert len(set(ids)) == 3


async def test_words_stay_words() -> None:
    service = Conversation("hermes")
    for text in ("Sunny.", "", "<tool_call>oops</tool_call>", "a <tool"):
        service.says(text) if text else setattr(service.engines, "pieces", [""])
        choice = (await service.whole(**ASKED))["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"
        streamed = put_together(await service.stream(**ASKED))
        assert streamed["message"] | {"content": streamed["message"]["content"] or ""} == choice["message"]


async def test_parallel_calls() -> None:
    service = Conversation("hermes")
    service.says(CALLS["hermes"] + "\n" + CALLS["hermes"])
    for parallel, calls in ((None, 2), (True, 2), (False, 1)):
        message = (await service.whole(**ASKED, parallel_tool_calls=parallel))["choices"][0]["message"]
        assert len(message["tool_calls"]) == calls
        streamed = put_together(await service.stream(**ASKED, parallel_tool_calls=parallel))["message"]
        assert without_ids(streamed) == without_ids(message)


async def test_tools_reach_the_template_whole() -> None:
    """What a definition says beyond OpenAI's fields, and a null within a schema, is there for the model to read."""
    service = Conversation("hermes")
    service.says("ok")
    parameters = {"type": "object", "properties": {"a": {"default": None, "enum": [None, 1]}}}
    function = {"name": "f", "parameters": parameters, "return": {"type": "string"}}
    seen: list[Any] = []
    render = service.text._template.render
    service.text._template.render = lambda *messages, **options: (
        seen.append(options["tools"]) or render(*messages, **options)
    )
    await service.whole(messages=[USER], tools=[{"type": "function", "function": function}])
    assert seen == [[{"type": "function", "function": function}]]


async def test_ids_are_what_the_models_templates_take() -> None:
    for kind in CALLS:
        service = Conversation(kind)
        service.says(CALLS[kind])
        (call,) = (await service.whole(**ASKED))["choices"][0]["message"]["tool_calls"]
        if kind == "mistral":  # whose templates refuse any other
            assert len(call["id"]) == 9
            assert call["id"].isalnum()
        else:
            assert call["id"].startswith("call_")


async def test_no_tools_are_no_tools() -> None:
    """Neither an empty list nor "none" is tool mode, and answers have no empty list of calls."""
    service = Conversation("hermes")
    service.says(CALLS["hermes"])
    for extra in ({}, {"tools": []}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        answer = await service.whole(messages=[USER], **extra)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALLS["hermes"], "refusal": None}
        assert answer["usage"]["prompt_tokens"] == len("<user>Paris?<assistant>")
        assert service.engines.calls[-1][1].structured is None
    echoed = [USER, {"role": "assistant", "content": "b", "tool_calls": []}, USER]
    assert (await service.post(messages=echoed)).status_code == 200


async def test_a_call_without_content_renders_no_null() -> None:
    service = Conversation("hermes")
    call = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": "{}"}}
    prompts = set()
    for content in ({"content": None}, {}, {"content": ""}):
        turns = [USER, {"role": "assistant", "tool_calls": [call], **content}]
        await service.whole(messages=[*turns, {"role": "tool", "tool_call_id": "c1", "content": "17"}])
        prompts.add(service.prompt)
    assert prompts == {"<user>Paris?<assistant>[c1:pick:{}]<tool>17<assistant>"}


async def test_reasoning_on_request() -> None:
    service = Conversation("think")
    service.says("<think>\nhm\n</think>\n\nyes")
    asked: dict[str, Any] = {"messages": [USER]}
    message = (await service.whole(**asked))["choices"][0]["message"]
    assert message == {
        "role": "assistant", "content": "yes", "refusal": None, "reasoning_content": "hm", "reasoning": "hm",
    }  # fmt: skip
    assert put_together(await service.stream(**asked))["message"] == message
    asked["include_reasoning"] = False
    message = (await service.whole(**asked))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None}
    assert put_together(await service.stream(**asked))["message"] == message
    for name in ("reasoning", "reasoning_content"):
        await service.whole(messages=[USER, {"role": "assistant", "content": "yes", name: "hm"}, USER])
        assert "<assistant>(think:hm)yes<user>" in service.prompt
    # A prompt that has closed the reasoning is followed by an answer and nothing else.
    service.says("<think>is text</think>")
    off = await service.whole(messages=[USER], chat_template_kwargs={"enable_thinking": False})
    assert off["choices"][0]["message"]["content"] == "<think>is text</think>"


async def test_cut_reasoning_has_no_content() -> None:
    service = Conversation("opened")
    service.says("hm, so")
    message = (await service.whole(messages=[USER]))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm, so")


BAD = [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
    ({"tools": TOOLS * 2}, "tools", "different names"),
    ({"tools": TOOLS * 129}, "tools", "128"),
    ({"tools": 5}, "tools", "list"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '"required"'),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", '"required"'),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": "auto"}, "function_call", "use tool_choice"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD)
async def test_bad_tools(body: dict[str, Any], param: str, says: str) -> None:
    response = await Conversation("hermes").post(messages=[USER], **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("wrong", [5, ["a"], {"a": "b"}, True])
async def test_fields_of_a_message_that_are_no_text(wrong: Any) -> None:
    service = Conversation("hermes")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for role, field in (
        *(("user", "name"), ("tool", "tool_call_id")),
        *(("assistant", name) for name in ("name", "refusal", "reasoning", "reasoning_content")),
    ):
        bad = await service.post(messages=[USER, {"role": role, "content": "a", field: wrong}])
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")
        assert f"messages[1].{field}" in bad.json()["error"]["message"]
    for broken in (call | {"id": wrong}, call | {"function": {"name": wrong, "arguments": "{}"}}):
        bad = await service.post(messages=[USER, {"role": "assistant", "tool_calls": [broken]}])
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")


async def test_a_model_without_tools_says_so() -> None:
    response = await Conversation("plain").post(**ASKED)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("kind", CALLS)
async def test_forced_call_is_a_grammar_that_admits_the_models_own_form(kind: str) -> None:
    service = Conversation(kind)
    service.says(CALLS[kind])
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        await service.whole(messages=[USER], tools=[*TOOLS, other], tool_choice=choice)
        structured = service.engines.calls[-1][1].structured
        assert structured is not None
        assert accepts(service.tokenizer, structured.text, CALLS[kind])
        assert not accepts(service.tokenizer, structured.text, CALLS[kind].replace("city", "town"))
        assert not accepts(service.tokenizer, structured.text, "Sunny.")
        without = CALLS[kind].replace("weather", "other").replace(*ARGUMENTS[kind])
        assert accepts(service.tokenizer, structured.text, without) == (choice == "required")
    await service.whole(messages=[USER], tools=TOOLS, tool_choice="auto")
    assert service.engines.calls[-1][1].structured is None


SCHEMA = {
    "$defs": {"Color": {"enum": ["red", "5"]}},
    "type": "object",
    "properties": {
        "color": {"allOf": [{"$ref": "#/$defs/Color"}], "description": "which"},
        "some": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "count": {"type": "integer", "maximum": 9},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
        "free": {},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}
# Arguments, and whether they match.
WRITTEN: list[tuple[dict[str, str], bool]] = [
    ({"color": "red", "count": "9"}, True),
    ({"color": "5", "some": "abc", "count": "0", "list": '["red"]', "free": "a\n{"}, True),
    ({"color": "5", "some": "null", "count": "0", "free": ""}, True),
    ({"color": "blue", "count": "9"}, False),
    ({"color": "red", "count": "10"}, False),
    ({"color": "red", "count": "nine"}, False),
    ({"color": "red"}, False),
    ({"count": "9"}, False),
    ({"count": "9", "color": "red"}, False),  # in the order of the schema
    ({"color": "red", "some": "abcd", "count": "9"}, False),
    ({"color": "red", "count": "9", "list": '["blue"]'}, False),
    ({"color": "red", "count": "9", "more": "1"}, False),
]


@pytest.mark.parametrize(("arguments", "match"), WRITTEN)
async def test_arguments_without_quotes_keep_to_their_schema(arguments: dict[str, str], match: bool) -> None:
    """Qwen3-Coder writes strings bare; what is read of them is what the schema says."""
    service = Conversation("qwen_coder")
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    call = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    service.says(call)
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    answer = await service.whole(messages=[USER], tools=tools, tool_choice="required")
    structured = service.engines.calls[-1][1].structured
    assert structured is not None
    assert accepts(service.tokenizer, structured.text, call) is match
    read = json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(read) is (match or [*arguments] == ["count", "color"])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("color='red', count=9", False),
        ('color="red", count=9', True),
        ('color="red", some=null, count=9, free={"a": 1}', True),
        ('color="red"', False),
        ('count=9, color="red"', False),
        ('color="red", count=9,', False),
    ],
)
async def test_arguments_of_python_keep_to_their_schema(arguments: str, match: bool) -> None:
    service = Conversation("pythonic")
    service.says("[f(a=1)]")
    for required in (["color", "count"], []):
        tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA | {"required": required}}}]
        await service.whole(messages=[USER], tools=tools, tool_choice="required")
        structured = service.engines.calls[-1][1].structured
        assert structured is not None
        fits = match or (not required and arguments == 'color="red"')
        assert accepts(service.tokenizer, structured.text, f"[f({arguments})]") is fits
    for call in ("[f()]", "[f(list=[])]", '[f(some="a", free=1), f(count=1)]'):
        assert accepts(service.tokenizer, structured.text, call)


BARE = [
    # what arguments without quotes, or written one by one, cannot be held to
    ({"type": "string", "pattern": "a"}, "pattern"),
    ({"type": "string", "minLength": "1} | /x/"}, "minLength"),
    ({"type": ["string", "array"], "items": {"type": "integer"}}, "items"),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 3}]}, "maximum"),
    ({"enum": 5}, "enum"),
    ({"type": "string", "enum": [5]}, "no value"),
    ({"anyOf": [{"$ref": "#/$defs/a0"}]}, "alternatives"),
]


@pytest.mark.parametrize(("schema", "says"), BARE)
async def test_what_bare_arguments_cannot_be_held_to_is_a_400(schema: dict[str, Any], says: str) -> None:
    many = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 100} for i in range(9)}
    parameters = {"properties": {"x": schema}, "$defs": many}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response = await Conversation("qwen_coder").post(messages=[USER], tools=tools, tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["qwen_coder", "pythonic"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"}, {"anyOf": [{"required": ["a"]}]}, {"required": ["a"]}, {"properties": [1]},
        {"properties": {"a\nb": {}}}, {"minProperties": 1}, {"properties": {"a": False}, "required": ["a"]},
    ],
)  # fmt: skip
async def test_what_is_not_written_argument_by_argument_is_a_400(kind: str, parameters: dict[str, Any]) -> None:
    service = Conversation(kind)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response = await service.post(messages=[USER], tools=tools, tool_choice="required")
    if response.status_code == 200:  # the engine finds that one
        assert parameters.get("properties") == {"a": False}
    else:
        assert response.json()["error"]["param"] == "tools"
    service.says("hi")
    assert (await service.whole(messages=[USER], tools=tools))["choices"][0]["message"]["content"] == "hi"


async def test_a_schema_that_is_nested_too_deep_is_a_400() -> None:
    service = Conversation("hermes")
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    response = await service.post(messages=[USER], tools=tools, tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


async def test_words_with_a_schema_beside_tools_and_after_reasoning() -> None:
    """One grammar admits either: the words that match the schema, or a call."""
    schema = {"type": "object", "properties": {"z": {"type": "string"}}, "required": ["z"]}
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    service = Conversation("think")
    service.says("<think>hm</think>")
    for tools in (None, TOOLS):
        await service.whole(messages=[USER], tools=tools, **asked)
        structured = service.engines.calls[-1][1].structured
        assert structured is not None
        for words in ('{"z": "a"}', '<think>\nhm\n</think>\n\n{"z": "a"}'):
            assert accepts(service.tokenizer, structured.text, words)
        assert accepts(service.tokenizer, structured.text, CALLS["think"]) == (tools is not None)
        assert not accepts(service.tokenizer, structured.text, '{"z": 5}')
    words = ["é\n", 'a "b"', "\\d"]
    await service.whole(messages=[USER], structured_outputs={"choice": words})
    structured = service.engines.calls[-1][1].structured
    assert structured is not None
    assert [accepts(service.tokenizer, structured.text, word) for word in [*words, "5"]] == [True, True, True, False]
    bad = await service.post(messages=[USER], tools=TOOLS, structured_outputs={"regex": "a"})
    assert bad.json()["error"]["param"] == "structured_outputs"
    bad = await service.post(messages=[USER], tools=TOOLS, tool_choice="required", **asked)
    assert bad.json()["error"]["param"] == "tool_choice"


def accepts(tokenizer: Tokenizer, lark: str, text: str) -> bool:
    class Tokens:
        bos_token_id = None
        eos_token_id = 256 + SPECIAL.index("<|eos|>")
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]  # noqa: RUF012
        special_token_ids = sorted(tokenizer.special_ids)

        def __call__(self, text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Tokens())), llguidance.grammar_from("lark", lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def test_marks_survive_detokenisation_and_other_special_tokens_do_not() -> None:
    service = Conversation("mistral")
    service.says(CALLS["mistral"])
    await service.whole(**ASKED)
    params = service.engines.calls[-1][1]
    ids = service.tokenizer.encode("<|bos|>" + CALLS["mistral"] + "<|python_tag|>", add_special_tokens=False)
    assert Detokenizer(service.tokenizer, params).push(ids, True).text == CALLS["mistral"]
    await service.whole(messages=[USER])
    params = service.engines.calls[-1][1]
    assert "[TOOL_CALLS]" not in Detokenizer(service.tokenizer, params).push(ids, True).text


@pytest.mark.parametrize(
    ("configured", "kind", "expected"),
    [
        *[("auto", name, name) for name in ("hermes", "llama3", "mistral", "pythonic", "qwen_coder")],
        ("auto", "think", "hermes"),
        ("auto", "plain", None),
        *[(name, "plain", name) for name in ("llama3", "mistral", "pythonic", "qwen_coder")],
        ("none", "hermes", None),
        ("hermes", "plain", "hermes"),
    ],
)
def test_format_is_chosen_by_the_template_and_the_setting(configured: Any, kind: str, expected: str | None) -> None:
    found = select(configured, tokenizer(kind))
    assert (found and found.name) == expected


@pytest.mark.parametrize(("setting", "thinks"), [("auto", True), ("think", True), ("none", False)])
def test_reasoning_setting(setting: Any, thinks: bool) -> None:
    model = tokenizer("think")
    dialect = Dialect.of(model, ChatTemplate.of(model), "auto", setting)
    assert dialect.thinks is thinks
    assert dialect.switches_thinking


@pytest.mark.parametrize("stream", [False, True])
async def test_two_turns_with_the_official_client(stream: bool) -> None:
    service = Conversation("think")
    client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=service.http)
    service.says(CALLS["think"])
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS}
    if stream:
        async with client.chat.completions.stream(**asked) as events:
            seen = [event async for event in events]
            message = (await events.get_final_completion()).choices[0].message
        assert any(event.type == "tool_calls.function.arguments.done" for event in seen)
    else:
        message = (await client.chat.completions.create(**asked)).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    service.says("Sunny.")
    turns = [USER, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    answer = await client.chat.completions.create(model="m", messages=turns, tools=TOOLS)
    assert answer.choices[0].message.content == "Sunny."
    assert service.prompt == (
        f'<user>Paris?<assistant>(think:Where?)[{call.id}:weather:{{"city": "Paris"}}]<tool>sunweather<assistant>'
    )
