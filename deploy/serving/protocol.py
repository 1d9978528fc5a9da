"""The part of OpenAI's chat completions that gateway and engine speak, and how both refuse the rest.

Takes: request bodies (untrusted). Gives: `ChatRequest`, error bodies in OpenAI's shape. Leaves out: HTTP, tokens, policy.
Source: OpenAI API reference, "Create chat completion"; vLLM, "OpenAI-compatible server" (`return_token_ids`, `top_k`).
"""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipelines.errors import TerminalError


class RequestRefused(TerminalError):
    """A request that is answered with an error body instead of a completion."""

    def __init__(self, status: int, sentence: str, *, code: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.code = code


class Message(BaseModel):
    """One message of the conversation."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        """Accept OpenAI's list of text parts."""
        if not isinstance(value, list):
            return value
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in value):
            raise ValueError("only text parts are served")
        return "".join(part["text"] for part in value)


class ChatRequest(BaseModel):
    """A chat completion request; unknown fields are ignored, known ones that are not served are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    model: str = ""
    temperature: float | None = Field(default=None, ge=0, le=5)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """-1 and 0: the whole vocabulary."""
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    user: str | None = None
    n: int | None = None
    stream: bool | None = None
    stop: Any = None
    response_format: Any = None
    logit_bias: Any = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def limit(self) -> int | None:
        """The client's bound on response tokens."""
        return self.max_completion_tokens or self.max_tokens

    def rendered(self) -> list[dict[str, Any]]:
        """Return the messages as the chat template takes them (`developer` is OpenAI's newer word for `system`)."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


class ScoreRow(BaseModel):
    """A response to be scored after its prompt."""

    prompt_ids: list[int] = Field(min_length=1)
    response_ids: list[int] = Field(min_length=1)
    temperature: float = Field(default=1.0, gt=0)


class ScoreRequest(BaseModel):
    """Rows to be scored."""

    rows: list[ScoreRow]


def parse_chat(body: bytes) -> ChatRequest:
    """Parse a request body.

    Raises:
        RequestRefused: 400: not JSON, not a chat request, or it asks for something that is not served.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise RequestRefused(400, f"{where}: {first['msg']}", code="invalid_request") from error
    refusals = {
        "stream=true is not served yet; send the request without it": request.stream,
        "n > 1 is not served; send the request several times": (request.n or 1) != 1,
        "stop sequences are not served; the model's own end token stops it": bool(request.stop),
        "logit_bias and penalties are not served: they would change the sampled policy": bool(
            request.logit_bias or request.presence_penalty or request.frequency_penalty
        ),
        "response_format other than text is not served": bool(request.response_format)
        and (not isinstance(request.response_format, dict) or request.response_format.get("type") != "text"),
    }
    for sentence, asked in refusals.items():
        if asked:
            raise RequestRefused(400, sentence, code="unsupported")
    return request


def error_body(status: int, sentence: str, *, code: str) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": sentence, "type": kind, "code": code, "param": None}}
