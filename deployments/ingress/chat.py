"""ChatPartsFormat: chat.completion and chat.completion.chunk with tool calls and reasoning.

Reasoning is sent as ``reasoning_content``, the name that DeepSeek gave it and most clients read, and again as
``reasoning``, vLLM's name since 0.12: a client of either finds it, for some more bytes. The first is the one that comes
back to templates.

A finish reason of "stop" becomes "tool_calls" where there is a call, forced or not; "length" stays, so that a client
knows that the arguments of the last call may be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from deployments.ingress.parts import Arguments, Call, Item, Part, Reasoning, Text
from deployments.ingress.reading import Reader, Reading
from deployments.ingress.streaming import ChatFormat, Choice, Extras, Usage, finished
from deployments.messages import Chunk

_json = msgspec.json.encode


class ChatPartsFormat(ChatFormat):
    """The plain format stays as fast as it is: this one is used only where there is something to look for."""

    def __init__(self, id: str, created: int, model: str, extras: Extras, reading: Reading) -> None:
        super().__init__(id, created, model, extras)
        self._reading = reading
        self._readers: dict[int, Reader] = {}
        self._opened: set[int] = set()  # choices whose role was sent

    def event(self, index: int, chunk: Chunk) -> bytes:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = Reader(self._reading)
        parts = reader.read(chunk.text, chunk.completion_tokens, last=chunk.finish_reason is not None)
        tokens, events = self._tokens(chunk), []
        for part, _ in parts:
            events.append(self._event(index, chunk, self._delta(index, part), tokens, b',"finish_reason":null}'))
            tokens = self._tokens(None)
        if not events and (chunk.logprobs or self._extras.token_ids):  # of tokens whose text is held back, or a mark
            events.append(self._event(index, chunk, b"", tokens, b',"finish_reason":null}'))
        if chunk.finish_reason is not None:
            finish = finished(_finish_reason(chunk.finish_reason, reader), chunk.stop_reason)
            events.append(self._event(index, chunk, self._delta(index, None), self._tokens(None), finish))
        return b"".join(events)

    def _delta(self, index: int, part: Part | None) -> bytes:
        begins = index not in self._opened
        self._opened.add(index)
        match part:
            case Text(text):
                delta = b'"content":' + _json(text)
            case Reasoning(text):
                words = _json(text)
                delta = b'"reasoning_content":%b,"reasoning":%b' % (words, words)
            case Call(number, id, name):
                function = {"name": name, "arguments": ""}
                delta = _calls({"index": number, "id": id, "type": "function", "function": function})
            case Arguments(number, text):
                delta = _calls({"index": number, "function": {"arguments": text}})
            case _:
                delta = b""
        if not begins:
            return delta
        role = b'"role":"assistant"' if isinstance(part, Text) else b'"role":"assistant","content":null'
        return role + b"," + delta if delta else role

    def end(self, usage: Usage) -> bytes:
        return super().end(self._with_reasoning(usage, self._readers.values()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        readers = [read(self._reading, choice) for choice in choices]
        found = [
            (_message(reader), _finish_reason(choice.finish_reason or "stop", reader))
            for choice, reader in zip(choices, readers, strict=True)
        ]
        return self._whole(choices, found, self._with_reasoning(usage, readers))

    def _with_reasoning(self, usage: Usage, readers: Any) -> Usage:
        if self._reading.opened is None:
            return usage
        return replace(usage, reasoning_tokens=sum(reader.reasoning_tokens for reader in readers))


def read(reading: Reading, choice: Choice) -> Reader:
    """A whole answer, read in the pieces in which it came."""
    reader = Reader(reading)
    for text, tokens in zip(choice.text, choice.tokens, strict=True):
        reader.read(text, tokens, last=False)
    reader.read("", choice.completion_tokens, last=True)
    return reader


def _calls(call: dict[str, Any]) -> bytes:
    return b'"tool_calls":[%b]' % _json(call)


def _message(reader: Reader) -> dict[str, Any]:
    """``content`` is null where there is something else; fields that have nothing are absent, never empty lists."""
    items = reader.items
    content, thought, calls = items.text(Text), items.text(Reasoning), items.calls()
    if content is None and thought is None and not calls:
        content = ""
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thought is not None:
        message |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        message["tool_calls"] = [_tool_call(item) for item in calls]
    return message


def _tool_call(item: Item) -> dict[str, Any]:
    assert item.call is not None
    return {"id": item.call.id, "type": "function", "function": {"name": item.call.name, "arguments": item.text}}


def _finish_reason(reason: str, reader: Reader) -> str:
    return "tool_calls" if reason == "stop" and reader.items.calls() else reason
