"""The harness's side of the gateway: one chat completion, with who asks and where in the session.

Takes: messages, sampling, a place (session, turn, step). Gives: `Reply`, with the policy that answered. Retries a request only
where it cannot have been answered (no connection, 429, 503), so that no step is sampled twice.
Leaves out: what to do with the reply (`agent.py`). The gateway emits the `completion` event.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from deploy.harness.tools import TOOLS, Call
from pipelines.errors import ConfigError, ContractViolation, EngineUnavailable
from pipelines.events import Consent, Origin

RETRY_STATUS: Final = (429, 503)
BACKOFF_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who a session is run for; sent with every request of it."""

    session_id: str
    user: str
    """Raw name; the gateway hashes it."""
    origin: Origin
    consent: Consent
    surface: str
    task_bucket: str | None = None
    api_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a session a completion stands."""

    turn_id: str
    turn_index: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled."""

    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy answered."""

    content: str
    """The raw text, to be sent back verbatim."""
    calls: tuple[Call, ...]
    tool_calls: list[dict[str, Any]]
    """The same calls as they arrived, to be sent back."""
    finish_reason: str
    completion_id: str
    policy_version: int | None
    arm: str
    prompt_tokens: int
    response_tokens: int


def _headers(caller: Caller, place: Place) -> dict[str, str]:
    headers = {
        "X-Session-Id": caller.session_id,
        "X-Turn-Id": place.turn_id,
        "X-Turn-Index": str(place.turn_index),
        "X-Step": str(place.step),
        "X-User": caller.user,
        "X-Consent": caller.consent,
        "X-Origin": caller.origin,
        "X-Surface": caller.surface,
        "X-Turn-Type": "main",
    }
    if caller.task_bucket is not None:
        headers["X-Task-Bucket"] = caller.task_bucket
    if caller.api_key:
        headers["Authorization"] = f"Bearer {caller.api_key}"
    return headers


def _parse(body: Mapping[str, Any], headers: httpx.Headers) -> Reply:
    message = body["choices"][0]["message"]
    raw: list[dict[str, Any]] = message.get("tool_calls") or []
    calls = tuple(
        Call(tool_call_id=item["id"], name=item["function"]["name"] or "", arguments=item["function"]["arguments"] or "") for item in raw
    )
    version = headers.get("X-Policy-Version", "")
    usage = body.get("usage") or {}
    return Reply(
        content=message.get("content") or "",
        calls=calls,
        tool_calls=raw,
        finish_reason=body["choices"][0].get("finish_reason") or "stop",
        completion_id=headers.get("X-Completion-Id") or body["id"],
        policy_version=int(version) if version.isdigit() else None,
        arm=headers.get("X-Arm") or "none",
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        response_tokens=int(usage.get("completion_tokens", 0)),
    )


CONTEXT_FULL: Final = "context_length_exceeded"
"""OpenAI's error code for it."""


class ContextFull(ContractViolation):
    """The conversation has outgrown what the model can read: the end of a turn, not of a run."""


class GatewayClient:
    """A pool of connections to one gateway; safe to share between threads."""

    def __init__(self, url: str, *, timeout_s: float, tries: int, connections: int = 64) -> None:
        """Make the pool; connects on first use.

        Args:
            url: Of the gateway, with or without /v1.
            timeout_s: For one completion.
            tries: Of one completion, while it cannot have been answered.
            connections: At once.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        self._tries = tries
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=5.0), limits=limits, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def complete(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, *, caller: Caller, place: Place) -> Reply:
        """Sample one completion.

        Raises:
            EngineUnavailable: The gateway cannot be reached, stays busy, failed, or took longer than the timeout.
            ConfigError: It wants another key.
            ContextFull: The conversation has outgrown what the model can read.
            ContractViolation: It refuses the request for another reason, or its answer is not a chat completion.
        """
        body = {
            "model": "tidegate",
            "messages": list(messages),
            "tools": list(TOOLS),
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
        }
        response = self._post(body, _headers(caller, place))
        if response.status_code in (401, 403):
            raise ConfigError(f"the gateway at {self._url} refuses this key; set TIDEGATE_API_KEY")
        if response.status_code >= 500 or response.status_code in RETRY_STATUS:
            raise EngineUnavailable(f"the gateway at {self._url} answered {response.status_code}: {response.text[:200]}")
        if response.status_code == 400 and CONTEXT_FULL in response.text:
            raise ContextFull(f"the gateway at {self._url}: {response.text[:200]}")
        if response.status_code != 200:
            raise ContractViolation(f"the gateway at {self._url} refused a completion ({response.status_code}): {response.text[:200]}")
        try:
            return _parse(response.json(), response.headers)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ContractViolation(f"the answer of {self._url} is not a chat completion: {error!r}") from error

    def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        for attempt in range(self._tries):
            last = attempt == self._tries - 1
            try:
                response = self._http.post(f"{self._url}/v1/chat/completions", json=body, headers=dict(headers))
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
                if last:
                    raise EngineUnavailable(f"the gateway at {self._url} cannot be reached; start it with tidegate serve") from error
            except httpx.TransportError as error:
                raise EngineUnavailable(f"the gateway at {self._url} broke off a completion: {error!r}") from error
            else:
                if last or response.status_code not in RETRY_STATUS:
                    return response
            time.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
        raise EngineUnavailable(f"the gateway at {self._url} was given no try; set harness.request_tries to 1 or more")
