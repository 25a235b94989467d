"""Every answer that is not 2xx, in OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``; under
/v1/messages in Anthropic's: ``{"type": "error", "error": {"type", "message"}}``.

Status codes steer retrying clients (the OpenAI SDK retries 408, 409, 429 and 5xx): what the client has to mend is 400,
404, 405 or 413 and is seen once; what will pass is 408, or 429 or 503 with Retry-After.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from nanoengine.errors import InvalidRequestError

MAX_MESSAGE = 1000  # characters: a message may quote what the client sent, and that may be megabytes
MAX_PARAM = 100

ANTHROPIC = "/v1/messages"  # and what lies under it
_ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}  # any other status is the client's to mend: "invalid_request_error"


_TEXT = {"type": "string"}
_OPTIONAL = {"type": ["string", "null"]}
_OPENAI_ERROR = {
    "type": "object",
    "properties": {"message": _TEXT, "type": _TEXT, "param": _OPTIONAL, "code": _OPTIONAL},
    "required": ["message", "type", "param", "code"],
}
_ANTHROPIC_ERROR = {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}, "required": ["type", "message"]}


def described(path: str, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, for the OpenAPI document; ``streams``: it may answer with events."""
    answer: dict[str, Any] = {"application/json": {}}
    if streams:
        answer["text/event-stream"] = {}
    error = _ANTHROPIC_ERROR if _speaks_anthropic(path) else _OPENAI_ERROR
    envelope = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    failure = {"content": {"application/json": {"schema": envelope}}}
    return {
        200: {"description": "The answer.", "content": answer},
        "4XX": {"description": "What the client has to mend; 408 and 429 pass by themselves.", **failure},
        "5XX": {"description": "No engine is up (503), or a fault of the server's.", **failure},
    }


def _speaks_anthropic(path: str) -> bool:
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")


class ApiError(Exception):
    """An error that the client is told of, with the status it is told with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    def body(self, path: str = "") -> bytes:
        """The envelope that clients of ``path`` read, as JSON."""
        if _speaks_anthropic(path):
            type = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            message = _shortened(self.message, MAX_MESSAGE)
            return msgspec.json.encode({"type": "error", "error": {"type": type, "message": message}})
        error = {
            "message": _shortened(self.message, MAX_MESSAGE),
            "type": self.type,
            "param": self.param and _shortened(self.param, MAX_PARAM),
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self, path: str = "") -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.allow is not None:
            headers["allow"] = self.allow
        return Response(self.body(path), self.status, headers, media_type="application/json")


def _shortened(text: str, limit: int) -> str:
    """``text`` without its middle where it is too long: how it begins and how it ends says what to change."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_invalid_request(error: InvalidRequestError) -> ApiError:
    return ApiError(400, error.message, param=error.param, code=error.code)


def overloaded(message: str, retry_after: float) -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code="server_overloaded", retry_after=retry_after)


def unavailable(message: str, retry_after: float) -> ApiError:
    return ApiError(503, message, type="server_error", code="engine_unavailable", retry_after=retry_after)


def internal() -> ApiError:
    """For what nobody foresaw. The traceback goes to the log under the request's id, never to the client."""
    return ApiError(
        500, "internal error; the server's log has it under this answer's x-request-id", type="server_error"
    )


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) in the envelope."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 404:
        return ApiError(404, f"no route {method} {path}", code="unknown_url").response(path)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow")
        error = ApiError(405, f"{method} is not allowed on {path}", code="method_not_allowed", allow=allow)
        return error.response(path)
    return ApiError(error.status_code, str(error.detail)).response(path)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


def install(app: FastAPI) -> None:
    """Make ``app`` answer every error in the envelope."""
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
