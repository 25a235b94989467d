"""Gate: where a request waits for its grammar to be compiled, before it is queued. Others are served meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from nanoengine.errors import InvalidRequestError
from nanoengine.sampling.params import SamplingParams
from nanoengine.scheduling.step import IntArray
from nanoengine.structured.compiler import Compiled, Compiler
from nanoengine.structured.matcher import GrammarError

_POLL = 0.005  # seconds between looks, where nothing else is to be done


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request as it was added."""

    key: int
    prompt: IntArray
    params: SamplingParams
    priority: int
    cache_salt: str
    compiled: Future[Compiled]


class Gate:
    """Called by the engine's one thread."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._waiting: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, key: int, prompt: IntArray, params: SamplingParams, priority: int, cache_salt: str) -> None:
        """Begin to compile what the request asks for."""
        self._waiting[key] = Waiting(key, prompt, params, priority, cache_salt, self._compiler(params))

    def leave(self, key: int) -> bool:
        """Whether the request waited here; it does not any more.

        A grammar that nobody else waits for is not begun: who sends many and leaves would keep others waiting.
        """
        if (left := self._waiting.pop(key, None)) is None:
            return False
        if all(one.compiled is not left.compiled for one in self._waiting.values()):
            left.compiled.cancel()
        return True

    def opened(self) -> Iterator[tuple[Waiting, Compiled | InvalidRequestError]]:
        """Those whose grammar is ready, or found to be at fault: they wait no longer."""
        for key, one in list(self._waiting.items()):
            if not one.compiled.done():
                continue
            del self._waiting[key]
            try:
                yield one, _result(one.compiled, one.params)
            except InvalidRequestError as error:
                yield one, error

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
