"""Gate: where a request waits for its grammar to be compiled, before it is queued. Others are served meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from nanoengine.errors import EngineOverloadedError, InvalidRequestError, Refusal
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray
from nanoengine.structured.compiler import Compiled, Compiler
from nanoengine.structured.matcher import GrammarError

_POLL = 0.005  # seconds between looks, where nothing else is to be done
TURN_SECONDS = 20.0  # that a request waits for its turn to be compiled: behind grammars that take all they may


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it was added."""

    key: int
    tokens: IntArray  # [length] of the prompt, and of what there is of the answer
    params: SamplingParams
    priority: int
    cache_salt: str
    generated: int  # tokens of the answer

    @property
    def answer(self) -> IntArray:
        return self.tokens[len(self.tokens) - self.generated :]


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    compiled: Future[Compiled]
    deadline: float  # for its turn


class Gate:
    """Called by the engine's one thread."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request) -> None:
        """Begin to compile what the request asks for."""
        deadline = time.monotonic() + TURN_SECONDS
        self._waiting[request.key] = _Waiting(request, self._compiler(request.params), deadline)

    def leave(self, key: int) -> bool:
        """Whether the request waited here; it does not any more.

        A grammar that nobody else waits for is not begun: who sends many and leaves would keep others waiting.
        """
        if (left := self._waiting.pop(key, None)) is None:
            return False
        if all(one.compiled is not left.compiled for one in self._waiting.values()):
            left.compiled.cancel()
        return True

    def opened(self) -> Iterator[tuple[Request, Compiled | Refusal]]:
        """Those whose grammar is ready, or at fault, or has not got its turn: they wait no longer."""
        now = time.monotonic()
        for key, one in list(self._waiting.items()):
            if one.compiled.done():
                del self._waiting[key]
                try:
                    yield one.request, _result(one.compiled, one.request.params)
                except InvalidRequestError as error:
                    yield one.request, error
            elif now > one.deadline and not one.compiled.running():
                self.leave(key)
                yield one.request, EngineOverloadedError("too many grammars wait to be compiled; try again later")

    def wait(self) -> None:
        """Wait a little for the next to be ready, where nothing else is to be done."""
        wait([one.compiled for one in self._waiting.values()], _POLL, FIRST_COMPLETED)

    def check(self, params: SamplingParams) -> None:
        """Compile what ``params`` ask for, and wait for it. Raises ``InvalidRequestError``."""
        _result(self._compiler(params), params)


def _result(compiled: Future[Compiled], params: SamplingParams) -> Compiled:
    """Waits for it. Raises ``InvalidRequestError``."""
    try:
        return compiled.result()
    except GrammarError as error:
        if params.structured is not None:
            raise params.structured.refused(str(error)) from None
        raise InvalidRequestError(f"bad_words: {error}", param="bad_words") from None
