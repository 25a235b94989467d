"""Chat templates: text equal to transformers' apply_chat_template, and clear refusals."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest

from nanoengine.errors import InvalidRequestError, ModelLoadError
from nanoengine.text.chat import ChatTemplate
from nanoengine.text.tokenizer import Tokenizer
from tests.engine.trained_tokenizers import byte_level_backend

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Indented as Qwen's are: what trim_blocks and lstrip_blocks do to it shows.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- set ns.last = loop.index0 %}
    {%- if message.role == 'system' and tools %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today Date: {{ date_string }}

{% if tools is not none %}
    {% for t in tools %}
        {{ t | tojson(indent=4) }}
    {% endfor %}
{% endif %}
{{ system }}<|eot_id|>
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}<|eot_id|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token }}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% for document in documents or [] %}{{ document.title }}{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{% endfor %}
"""

TEMPLATES = {"smollm2": SMOLLM2, "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}

USER = {"role": "user", "content": "What is 2 < 3 & 'x'?\n  <b>é🙂</b>  "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "three": [USER, {"role": "assistant", "content": " It is.\n"}, USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "empty": [{"role": "user", "content": ""}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <&>", "parameters": {"type": "object"}}}]
DOCUMENTS = [{"title": str(i), "text": "t"} for i in range(5)]


def theirs(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="</s>", chat_template=template
    )


def ours(template: str, **more: Any) -> ChatTemplate:
    return ChatTemplate(template, bos_token="<s>", eos_token="</s>", **more)


@pytest.mark.parametrize(
    ("name", "conversation"),
    [(t, c) for t in TEMPLATES for c in CONVERSATIONS if (t, c) != ("mistral", "system")],  # which that one refuses
)
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"documents": DOCUMENTS}], ids=["plain", "tools", "documents"])
def test_text_equals_transformers(name, conversation, generation_prompt, more):
    messages = CONVERSATIONS[conversation]
    want = theirs(TEMPLATES[name]).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt, **more
    )
    got = ours(TEMPLATES[name]).render(messages, add_generation_prompt=generation_prompt, **more)
    assert got == want


def test_options_equal_transformers():
    for template, options in ((CHATML, {"enable_thinking": False}), (LLAMA3, {"date_string": "1 Jan"})):
        want = theirs(template).apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **options)
        assert ours(template).render([USER], **options) == want
        assert ours(template).render([USER]) != want


def test_tool_calls():
    """Arguments come as JSON text, templates take objects; no content, null and "" are the same prompt."""

    def message(**content: Any) -> dict[str, Any]:
        function = {"name": "pick", "arguments": '{"é": [1, "<"]}'}
        return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]} | content

    result = {"role": "tool", "tool_call_id": "c1", "content": "17"}
    parsed = message(content="")
    parsed["tool_calls"] = [
        {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": {"é": [1, "<"]}}}
    ]
    want = theirs(CHATML).apply_chat_template([USER, parsed, result], tokenize=False, add_generation_prompt=True)
    for given in (message(), message(content=None), message(content="")):
        kept = repr(given)
        assert ours(CHATML).render([USER, given, result]) == want
        assert repr(given) == kept  # the caller's message is left alone
    assert "None" not in want
    assert '"arguments": {"é": [1, "<"]}' in want
    no_arguments = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert '"arguments": {}' in ours(CHATML).render([no_arguments])
    for bad in ("{", "}"):
        broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": bad}}]}
        with pytest.raises(InvalidRequestError, match=r"messages\[1\].*valid JSON"):
            ours(CHATML).render([USER, broken])
    for call in (
        "f",
        {"function": {"name": 5}},
        {"function": {}},
        {"function": "f"},
        {"id": 5, "function": {"name": "f"}},
    ):
        with pytest.raises(InvalidRequestError, match="tool call"):
            ours(CHATML).render([{"role": "assistant", "tool_calls": [call]}])


def test_empty_lists_are_none():
    messages = [USER, {"role": "assistant", "content": "b", "tool_calls": []}]
    template = "{% for m in messages %}{{ 'calls' if m.tool_calls is defined }}{% endfor %}{{ tools is none }}"
    assert ours(template).render(messages, tools=[], documents=[]) == "True"


def test_content_in_parts():
    render = ours(SMOLLM2).render

    def user(*parts: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}]

    alpha, beta = {"type": "text", "text": "ALPHA"}, {"type": "text", "text": "BETA"}
    assert render(user(alpha)) == render([{"role": "user", "content": "ALPHA"}])
    assert render(user(alpha, beta)) == render([{"role": "user", "content": "ALPHA\nBETA"}])
    assert render(user("ALPHA", beta)) == render(user(alpha, beta))
    for part, kind in (
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "'image_url'"),
        ({"type": "text", "text": None}, "'text'"),
        ({"text": "x"}, "None"),
        (5, "'int'"),
    ):
        with pytest.raises(InvalidRequestError, match=rf"messages\[0\].*type {kind}") as error:
            render(user(alpha, part))
        assert error.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="type 'int'"):
        render([{"role": "user", "content": 5}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        (["hi"], r"messages\[0\]"),
        ([USER, {"content": "x"}], r"messages\[1\]"),
        ([{"role": 5}], "role"),
    ],
)
def test_messages_that_are_none(messages, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        ours(SMOLLM2).render(messages)
    assert error.value.param == "messages"


def test_refusals_of_a_template_are_the_caller_s_to_mend():
    for messages, message in (([USER, USER], "roles must alternate"), ([{"role": "system", "content": "x"}], "roles")):
        with pytest.raises(InvalidRequestError, match=message) as error:
            ours(MISTRAL).render(messages)
        assert (error.value.param, error.value.code) == ("messages", "chat_template_error")
    for template in ("{{ messages[0].absent.absent }}", "{{ 1 + messages[0].role }}", "{{ messages[9].role.x }}"):
        with pytest.raises(InvalidRequestError, match="does not accept these messages"):
            ours(template).render([USER])


def test_unknown_options_are_named():
    with pytest.raises(InvalidRequestError, match=r"no option 'thinking'; it has: enable_thinking") as error:
        ours(CHATML).render([USER], thinking=True)
    assert error.value.param == "chat_template_kwargs"
    for name in ("messages", "bos_token", "self", "raise_exception", "namespace", "chat_template", "tokenize"):
        with pytest.raises(InvalidRequestError, match="no option"):
            ours(LLAMA3).render([USER], **{name: "x"})


def test_no_template_says_what_to_do():
    with pytest.raises(InvalidRequestError, match="completions endpoint") as error:
        ChatTemplate(None).render([USER])
    assert error.value.param == "messages"


def test_a_template_that_is_no_jinja():
    with pytest.raises(ModelLoadError, match="not valid"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ a | tojson }}", '{"city": "Zürich", "n": [1]}'),
        ("{{ a }}", '{"city": "Zürich", "n": [1]}'),
        ("{{ 'x' + a + 'y' }}", 'x{"city": "Zürich", "n": [1]}y'),
        ("{{ 'x' ~ a }}", 'x{"city": "Zürich", "n": [1]}'),
        ("{{ a if a is string else a | tojson }}", '{"city": "Zürich", "n": [1]}'),
        ("{% for k, v in a | items %}{{ k }}={{ v }};{% endfor %}", "city=Zürich;n=[1];"),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_wants(template, expected):
    call = {"function": {"name": "f", "arguments": '{"city": "Z\\u00fcrich", "n": [1]}'}}
    template = "{% set a = messages[0].tool_calls[0].function.arguments %}" + template
    assert ours(template).render([{"role": "assistant", "tool_calls": [call]}]) == expected


def test_what_a_template_takes():
    template = ours("{{ tools }}{{ enable_thinking }}", tool_template="{{ tools }}")
    assert template.takes_tools
    assert not template.has_option("enable_thinking"), "not with tools"
    assert ours("{{ enable_thinking }}").has_option("enable_thinking")
    assert not ours("{{ messages }}").takes_tools
    assert not ours(None).takes_tools


def test_a_template_of_its_own_for_tools():
    template = ours("plain", tool_template="tools")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=TOOLS) == "tools"
    assert ours("plain").render([USER], tools=TOOLS) == "plain"


def test_of_a_tokenizer():
    templates = {"default": "{{ bos_token }}{{ eos_token }}", "tool_use": "T"}
    tokenizer = Tokenizer(byte_level_backend(), bos_token="<s>", eos_token="</s>", chat_templates=templates)
    template = ChatTemplate.of(tokenizer)
    assert template.render([USER]) == "<s></s>"
    assert template.render([USER], tools=TOOLS) == "T"
    assert ChatTemplate.of(Tokenizer(byte_level_backend(), chat_templates=templates)).render([USER]) == ""


def test_strftime_now():
    assert ours("{{ strftime_now('%Y') }}").render([USER]) == str(datetime.now().year)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ dict.update(messages[0], {'a': 1}) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_the_sandbox_holds(template):
    try:
        text = ours(template).render([USER])
    except InvalidRequestError:
        return
    assert text == ""  # undefined: nothing was reached


def test_threads_may_share_a_template():
    template, wrong = ours(CHATML), []

    def work(name: str) -> None:
        messages = [{"role": "user", "content": name}]
        want = f"<|im_start|>user\n{name}<|im_end|>\n<|im_start|>assistant\n"
        wrong.extend(1 for _ in range(300) if template.render(messages) != want)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
