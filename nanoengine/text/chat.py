"""ChatTemplate: messages -> prompt text, by the Jinja template that came with the model.

The environment is the one that transformers renders templates in (``apply_chat_template``), so a template gives the
same text here: sandboxed, ``trim_blocks`` and ``lstrip_blocks``, ``break`` and ``continue``, ``tojson`` without HTML
escapes, ``raise_exception``, ``strftime_now`` and ``{% generation %}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from nanoengine.errors import InvalidRequestError, ModelLoadError
from nanoengine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat templates, compiled once. Rendering is safe in several threads at once.

    A message goes into the text as it is. So a special token that a user writes out ("<|im_end|>") is one to the
    tokenizer, as with transformers and vLLM: the roles in a prompt are a convention between model and caller, not a
    boundary that keeps an untrusted user from speaking as another.
    """

    def __init__(
        self,
        template: str | None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """``tool_template`` is used for requests with tools, where a model brings one apart.

        Raises ``ModelLoadError`` if a template is not valid Jinja.
        """
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._template = None if template is None else _Template(template)
        self._tool_template = self._template if tool_template is None else _Template(tool_template)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The templates that came with a tokenizer."""
        return cls(
            tokenizer.chat_template,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            tool_template=tokenizer.chat_templates.get("tool_use"),
        )

    @property
    def takes_tools(self) -> bool:
        """Whether the tools of a request get into its prompt."""
        return self._tool_template is not None and self._tool_template.reads("tools")

    def has_option(self, name: str) -> bool:
        """Whether ``render`` takes ``name`` among its ``options``, with tools and without."""
        templates = (self._template, self._tool_template)
        return all(template is not None and name in template.options for template in templates)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt of a conversation. It holds its special tokens: encode it with ``add_special_tokens=False``.

        ``options`` are variables that this template knows, such as ``enable_thinking``. With
        ``continue_final_message`` the prompt ends where the content of the last message ends, so that the answer goes
        on with it; ``add_generation_prompt`` has to be off then.

        Raises ``InvalidRequestError``: the model has no template, a message is not usable, the template refuses the
        messages (roles out of order, mostly), or it knows no such option.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template: send a prompt to the completions endpoint instead, or put a "
                "chat_template.jinja beside the model's tokenizer",
                param="messages",
                code="no_chat_template",
            )
        template.check_options(options)
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None and not _is_list_of_objects(value):
                raise InvalidRequestError(f"{name} must be a list of objects", param=name, code="invalid_type")
        turns = _normalise(messages)
        if continue_final_message:
            _mark_end(turns)
        text = template.render(
            messages=turns,
            tools=list(tools) if tools else None,
            documents=list(documents) if documents else None,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
            **options,
        )
        return _up_to_mark(text) if continue_final_message else text


_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}


class _Template:
    """One compiled template and the names of the options that it reads."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is not valid: {error}") from error
        self._variables = jinja2.meta.find_undeclared_variables(tree)
        self.options = self._variables - _GIVEN

    def reads(self, variable: str) -> bool:
        return variable in self._variables

    def check_options(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(options.keys() - self.options)
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise InvalidRequestError(
                f"this model's chat template has no option {unknown[0]!r}; it has: {known}",
                param="chat_template_kwargs",
                code="unknown_option",
            )

    def render(self, **variables: Any) -> str:
        try:
            return self._template.render(variables)
        except Exception as error:  # model-supplied code on user-supplied data can raise anything
            raise InvalidRequestError(
                f"the model's chat template does not accept these messages: {error}",
                param="messages",
                code="chat_template_error",
            ) from error


# -- messages ---------------------------------------------------------------------------------------------------------


def _normalise(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, parsed tool arguments."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message", param="messages", code="invalid_value")
    return [_normalise_one(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise_one(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role", param="messages", code="invalid_value")
    result = {**message, "content": _text(message.get("content"), where)}
    calls = result.pop("tool_calls", None)
    if calls:  # clients echo back the empty list; templates ask only whether it is there
        if not _is_list_of_objects(calls):
            raise InvalidRequestError(
                f"{where}.tool_calls must be a list, each tool call in it an object",
                param="messages",
                code="invalid_type",
            )
        result["tool_calls"] = [_tool_call(call, where) for call in calls]
    return result


_END = "\ue000end of the message\ue001"  # of private use: no template has a meaning for it


def _mark_end(turns: list[dict[str, Any]]) -> None:
    """Mark where the last message's content ends: its text alone may stand in the prompt more than once."""
    last = turns[-1]
    if last["role"] != "assistant" or "tool_calls" in last:
        raise InvalidRequestError(
            "continue_final_message needs a last message of role assistant, without tool calls",
            param="continue_final_message",
            code="invalid_value",
        )
    last["content"] += _END + " "  # the space tells whether the template strips what it is given


def _up_to_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template leaves the last message out of the prompt",
            param="continue_final_message",
            code="chat_template_error",
        )
    return before if after.startswith(" ") else before.rstrip()


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value)


def _text(content: Any, where: str) -> str:
    """Content as one string. None, which goes with tool calls, is "": templates would print the word None."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, Sequence) else [content]:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(
                f"{where}: this model reads text only, and content has a part of type {kind!r}: "
                'send a string, or parts {"type": "text", "text": "..."}',
                param="messages",
                code="unsupported_content",
            )
    # vLLM's joiner for templates that want a string, so that a request gives the same prompt here. With "" the words
    # at the border would grow together.
    return "\n".join(parts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: the API has them as JSON text, most templates apply ``tojson``."""
    try:
        function = dict(call["function"])
        if not isinstance(function["name"], str) or not isinstance(call.get("id") or "", str):
            raise TypeError("name and id are strings")
        arguments = function.get("arguments") or {}
        function["arguments"] = arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(arguments, dict):
            function["arguments"] = _Arguments(arguments)
        return {**call, "function": function}
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{where}: a tool call must have a function with a name and arguments that are valid JSON ({error})",
            param="messages",
            code="invalid_value",
        ) from error


class _Arguments(dict[str, Any]):
    """A call's arguments: an object to a template that walks or dumps it, JSON text to one that prints or joins it.

    Templates were written for the one or for the other, and there is no telling them apart but by their output.
    """

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


# -- the environment --------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks an assistant's words for training; in a prompt it only groups."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace`` without underscore names: templates are code from a hub, and these lead out of it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: namespace(self=1) is allowed
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": _Namespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # the class itself would give dict.update and the like
    }
    environment.globals.update(functions)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
