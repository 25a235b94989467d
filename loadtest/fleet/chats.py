"""Chats over shared system prompts: what is asked, the asking, and how much of it one endless cache would hold."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadtest.records import Record, read_chat
from loadtest.sse import events
from loadtest.workload import text

Message = dict[str, str]
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation to be held."""

    start: float  # seconds from the beginning of the run
    system: str
    turns: tuple[tuple[float, str], ...]  # seconds of thinking before each, and what the user says


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and its answer."""

    turn: tuple[int, int]  # number of the chat, number in the chat
    messages: tuple[Message, ...]
    answer: str
    record: Record


@dataclass(frozen=True, slots=True)
class Workload:
    """Chats that begin at random instants. Each opens with one of the system prompts; the k-th is taken in proportion
    to 1/k, as popular things are. Equal workloads make equal chats."""

    requests: int = 480
    rate: float = 8.0  # requests a second
    turns: int = 4  # requests of one chat
    groups: int = 32  # system prompts
    system_words: int = 400  # of each; a word is about one token, and five or six of the stand-in's
    user_words: int = 25
    think_s: float = 1.0  # mean pause between an answer and the next question
    max_tokens: int = 24
    seed: int = 0

    def chats(self) -> list[Chat]:
        rng = random.Random(self.seed)
        systems = [text(rng, self.system_words) for _ in range(self.groups)]
        weights = [1 / (k + 1) for k in range(self.groups)]

        def turn(number: int) -> tuple[float, str]:
            return rng.expovariate(1 / self.think_s) if number else 0.0, text(rng, self.user_words)

        gaps = [rng.expovariate(self.rate / self.turns) for _ in range(-(-self.requests // self.turns))]
        return [
            Chat(start, rng.choices(systems, weights)[0], tuple(turn(number) for number in range(self.turns)))
            for start in itertools.accumulate(gaps)
        ]

    def hold(self, url: str, model: str, users: int | None = None) -> list[Asked]:
        """Hold the chats, each on a thread and a connection of its own; what was asked, in order of sending.

        With ``users`` so many are held at a time, one after the other (closed loop); else when they start, come what
        may.
        """
        begin = time.perf_counter()
        chats = self.chats()

        def one(number: int) -> list[Asked]:
            due = time.perf_counter() if users else begin + chats[number].start
            return list(_talk(number, chats[number], due, url, model, self.max_tokens))

        with ThreadPoolExecutor(users or len(chats)) as pool:
            held = [asked for chat in pool.map(one, range(len(chats))) for asked in chat]
        return sorted(held, key=lambda asked: asked.record.sent)


def _talk(number: int, chat: Chat, due: float, url: str, model: str, max_tokens: int) -> Iterator[Asked]:
    messages = [{"role": "system", "content": chat.system}]
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    for turn, (pause, said) in enumerate(chat.turns):
        due += pause
        time.sleep(max(0.0, due - time.perf_counter()))
        messages.append({"role": "user", "content": said})
        record = Record(scheduled=due, sent=time.perf_counter(), ended=0.0, outcome="ok")
        answer = _ask(connection, record, messages, model, max_tokens)
        record.ended = due = time.perf_counter()
        record.outcome = "failed" if record.error else "ok"
        yield Asked((number, turn), tuple(messages), answer, record)
        if record.error:
            break
        messages.append({"role": "assistant", "content": answer})
    connection.close()


def _ask(
    connection: http.client.HTTPConnection, record: Record, messages: list[Message], model: str, max_tokens: int
) -> str:
    """Ask once, and fill ``record``. The answer has exactly ``max_tokens`` tokens, or it failed."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    pieces: list[str] = []
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        record.status = response.status
        if response.status != 200:
            record.error = f"HTTP {response.status}: {response.read()[:300]!r}"
            return ""
        record.error = read_chat(record, events(response), pieces)
        response.read()  # to its end: the connection is used again
    except (OSError, ValueError, http.client.HTTPException) as error:
        record.error = f"{type(error).__name__}: {error}"
    if not record.error and record.output_tokens != max_tokens:
        record.error = f"{record.output_tokens} tokens where {max_tokens} were asked for"
    return "".join(pieces)


def ideal_cached(requests: Iterable[tuple[Sequence[int], Sequence[int]]], block: int) -> int:
    """Prompt tokens that one endless cache finds, of (prompt, answer) in order of sending: whole blocks, and never the
    last token, as an engine does."""
    seen: set[int] = set()
    found = 0
    for prompt, answer in requests:
        usable = itertools.islice(_chain(prompt, block), (len(prompt) - 1) // block)
        found += block * sum(1 for _ in itertools.takewhile(seen.__contains__, usable))
        seen.update(_chain([*prompt, *answer], block))
    return found


def _chain(tokens: Sequence[int], block: int) -> Iterator[int]:
    """A key for each whole block, that stands for all before it too."""
    key = 0
    for at in range(0, len(tokens) - block + 1, block):
        key = hash((key, *tokens[at : at + block]))
        yield key
