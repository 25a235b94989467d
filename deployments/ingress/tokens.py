"""POST /tokenize and /detokenize, with vLLM's requests and answers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.ingress.bodies import Many
from deployments.ingress.errors import bad_request
from deployments.ingress.protocol import MAX_TOOLS, ChatRequest, Message, Tool


class TokenizeRequest(BaseModel):
    """Either ``prompt`` or ``messages``. ``model`` may be left out, as with vLLM: it is the first then."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None  # of a prompt: true if absent; a rendered template has them already
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS)
    return_token_strs: bool | None = None

    def conversation(self, model: str) -> ChatRequest | None:
        """The chat request whose prompt is asked for; None: a prompt is given. Raises ``ApiError`` (400)."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("send either prompt or messages", "prompt")
        if self.messages is None:
            return None
        return ChatRequest(
            model=model,
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _ids(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return value
    raise ValueError("must be a list of token ids (integers)")


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: Annotated[list[int], BeforeValidator(_ids)]


def spelled(pieces: list[bytes]) -> list[str]:
    """Each token's bytes as text; what is no text of its own is U+FFFD."""
    return [piece.decode("utf-8", "replace") for piece in pieces]
