"""Trial: a grammar is compiled in a process of its own before it is compiled here, where it could not be stopped.

The library bounds most of what grows with a grammar, not all: a regular expression of 40,000 times ``a?`` takes hours
and all memory there is, a chain of rules takes the stack, and nothing ends a thread. A process ends: here after
``SECONDS`` of its CPU, or at ``MEMORY``. What it survives, the engine does too, as it is the same work over again. That
costs a second compilation (a millisecond for an ordinary schema), a quarter of a second for the first, and some 100 MB
for the process, which only engines have that get grammars.

``python -m nanoengine.structured.trial FD`` is that process, FD one end of ``Trial``'s socket pair.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from nanoengine.protocol import decoder, frame, read_frame
from nanoengine.structured.grammar import Grammar
from nanoengine.structured.matcher import GrammarError, Tokens, matcher, source

SECONDS = 5.0
MEMORY = 1 << 30  # bytes, beside what the process begins with
STACK = 256 << 20  # bytes, of threads that compile; only what is touched takes memory


class _Vocabulary(msgspec.Struct, frozen=True):
    tokens: list[bytes]
    special: list[int]
    eos_token_ids: list[int]


class _Try(msgspec.Struct, frozen=True):
    kind: str
    text: str
    seconds: float


class _Verdict(msgspec.Struct, frozen=True):
    source: str
    error: str | None = None


class Trial:
    """One such process, started when it is needed and again when it has died. For one thread at a time."""

    def __init__(self, tokens: Tokens, eos_token_ids: list[int]) -> None:
        self._vocabulary = frame(_Vocabulary(tokens.tokens, tokens.special_token_ids, eos_token_ids))
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __call__(self, grammar: Grammar) -> str:
        """The grammar in the library's form, which compiles in time. Raises ``GrammarError``."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._socket is not None
            self._socket.sendall(frame(_Try(grammar.kind, grammar.text, SECONDS)))
            answer = read_frame(self._socket)
        except OSError:
            answer = None
        if answer is None:
            raise GrammarError(self._why())
        verdict: _Verdict = decoder(_Verdict).decode(answer)
        if verdict.error is not None:
            raise GrammarError(verdict.error)
        return verdict.source

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "nanoengine.structured.trial", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.DEVNULL,  # what the library says as it dies
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # numpy is imported, and asked for nothing
            )
        self._socket.sendall(self._vocabulary)

    def _why(self) -> str:
        """The process is gone: why, as an error."""
        assert self._process is not None
        self._process.wait()
        if self._process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
            return f"takes longer than {SECONDS:g} s to compile: simplify it"
        return "is too large: compiling it takes too much memory"


def main(fd: int) -> None:
    """Try what comes from ``fd`` until that closes."""
    begins_with = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (begins_with + MEMORY, begins_with + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sock = socket.socket(fileno=fd)
    first = read_frame(sock)
    if first is None:
        return
    vocabulary: _Vocabulary = decoder(_Vocabulary).decode(first)
    tokens = Tokens(vocabulary.tokens, vocabulary.special, vocabulary.eos_token_ids)
    decode = decoder(_Try).decode
    while (body := read_frame(sock)) is not None:
        attempt: _Try = decode(body)
        # The kernel ends the process when these run out, in whatever code it is: CPU time, as others may want the cores
        # too, and, should it ever wait for something, time.
        signal.setitimer(signal.ITIMER_PROF, attempt.seconds)
        signal.setitimer(signal.ITIMER_REAL, 10 * attempt.seconds)
        verdict = _tried(Grammar(attempt.kind, attempt.text), tokens)  # type: ignore[arg-type]  # it was one before
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sock.sendall(frame(verdict))


def _tried(grammar: Grammar, tokens: Tokens) -> _Verdict:
    try:
        text = source(grammar)
        matcher(text, tokens)
    except GrammarError as error:
        return _Verdict("", str(error))
    except BaseException:  # a panic in the library is no Exception
        return _Verdict("", "cannot be compiled")
    return _Verdict(text)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the engine ends, and then its socket
    threading.stack_size(STACK)
    thread = threading.Thread(target=main, args=(int(sys.argv[1]),))
    thread.start()
    thread.join()
    os._exit(0)  # nothing to tidy up
