"""Every error that the engine raises on purpose, as a named class.

A front end maps them to answers: ``InvalidRequestError`` is the caller's to mend (HTTP 400), ``EngineOverloadedError``
is "try again later" (429), ``EngineDeadError`` is "not your fault, retry elsewhere" (503).
"""

from __future__ import annotations


class NanoEngineError(Exception):
    """Base of all errors below."""


class InvalidRequestError(NanoEngineError, ValueError):
    """A request that can never be served as it is; the message says what to change.

    ``param`` names the field at fault, ``code`` is a short machine-readable reason: both as in OpenAI's error envelope.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus requested output, is longer than this engine can hold."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelLoadError(NanoEngineError):
    """The model cannot be found, read, or is of an architecture or format that is not supported."""


class EngineOverloadedError(NanoEngineError):
    """The engine's queue is full; ``retry_after`` is the suggested wait in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


Refusal = InvalidRequestError | EngineOverloadedError
"""Of one request, which ends; others go on."""


class EngineDeadError(NanoEngineError):
    """The engine process ended; every open stream gets this."""
