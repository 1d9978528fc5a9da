"""The gateway: an OpenAI-compatible door in front of the engines that captures what the policy did.

    POST /v1/chat/completions   answered by the session's checkpoint; the capture goes to the recorder, never in the way
    GET  /v1/models             what serves
    GET  /health                200 once a replica is ready (no key needed, like /metrics)
    GET  /metrics               Prometheus text
    GET  /admin/status          replicas, swaps, refusals, event counts

Takes: requests with an API key. Gives: answers and session events. Leaves out: processes (`fleet.py`, `replicas.py`), what is
captured (`capture.py`), streaming (refused with a sentence), and running tools (the client's).
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deploy.serving.capture import Stamp, completion_event, opening_events, stamp, tool_call_events
from deploy.serving.config import ServingConfig
from deploy.serving.fleet import Fleet
from deploy.serving.hangup import unless_hung_up
from deploy.serving.keys import who
from deploy.serving.protocol import ChatRequest, RequestRefused, error_body, parse_chat
from deploy.serving.replicas import Replica
from deploy.serving.toolcalls import ParsedCall, openai_calls, parse
from pipelines.errors import EngineUnavailable
from pipelines.events import Event, new_id
from pipelines.metrics import CONTENT_TYPE, Registry
from pipelines.recorder import RecorderCounts

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5
"""Told to clients with a 503."""
DISCARD_BYTES: Final = 64_000_000
"""Of a body that is too large, so much is still read before the connection is closed."""


class Records(Protocol):
    """Where events go (`pipelines.recorder.Recorder`)."""

    def record(self, event: Event) -> None:
        """Take an event; never waits, never raises."""

    def counts(self) -> RecorderCounts:
        """Return what became of the events so far."""
        ...


class Meters:
    """The gateway's metrics, each declared here once."""

    def __init__(self) -> None:
        self.registry: Final = Registry()
        of = self.registry
        self.requests = of.counter("tidegate_gateway_requests_total", "Requests by HTTP status.", ["status"])
        self.seconds = of.histogram("tidegate_gateway_request_seconds", "Seconds from arrival to answer.")
        self.ttft = of.histogram("tidegate_gateway_first_token_seconds", "Seconds from arrival at the engine to the first token.")
        self.tokens = of.counter("tidegate_gateway_tokens_total", "Tokens by kind: prompt, cached, response.", ["kind"])
        self.calls = of.counter("tidegate_gateway_tool_calls_total", "Tool calls by form: well_formed, broken.", ["form"])
        self.faults = of.counter("tidegate_gateway_capture_errors_total", "Completions that cannot be trained on, by reason.", ["reason"])
        self.in_flight = of.gauge("tidegate_gateway_in_flight", "Requests being answered.")
        self.version = of.gauge("tidegate_gateway_policy_version", "Policy version that new sessions get.")
        self.replicas = of.gauge("tidegate_gateway_replicas", "Replicas that answer.")
        self.restarts = of.gauge("tidegate_gateway_replica_restarts", "Restarts of the replicas that live now.")
        self.swaps = of.gauge("tidegate_gateway_swaps", "Swaps since the gateway started.")
        self.refused = of.gauge("tidegate_gateway_target_refused", "1 while the ledger's checkpoint gets no traffic.")
        self.events = of.gauge("tidegate_recorder_events", "Session events by fate.", ["fate"])

    def refresh(self, fleet: Fleet, counts: RecorderCounts) -> None:
        """Bring the gauges up to date."""
        serving = fleet.serving
        self.version.set(serving.target.policy_version if serving else 0)
        self.replicas.set(sum(replica.ready for replica in fleet.replicas))
        self.restarts.set(sum(replica.restarts for replica in fleet.replicas))
        self.swaps.set(fleet.swaps)
        self.refused.set(1 if fleet.refused else 0)
        fates = asdict(counts) | {"rejected": sum(counts.rejected.values())}
        for fate, number in fates.items():
            self.events.set(number, fate=fate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Secrets and defaults that identify a request's sender."""

    keys: dict[str, str]
    hasher: Callable[[str, str], str]
    """Keyed hash: kind, raw text."""
    default_consent: str


class Gateway:
    """The HTTP side. Lives in the fleet's event loop."""

    def __init__(
        self,
        fleet: Fleet,
        recorder: Records,
        *,
        identity: Identity,
        config: ServingConfig,
        more_metrics: Callable[[], str] = str,
    ) -> None:
        """Take the engines, where events go, and what `/metrics` shows of other parts behind our own (Prometheus text)."""
        self._fleet = fleet
        self._recorder = recorder
        self._identity = identity
        self._config = config
        self._meters = Meters()
        self._more_metrics = more_metrics

    def app(self) -> Starlette:
        """Return the HTTP application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/admin/status", self.status),
            ],
            exception_handlers={RequestRefused: self._refused, EngineUnavailable: self._unavailable, 404: _missing, 405: _missing},
        )

    async def chat(self, request: Request) -> Response:
        """Answer one chat completion and record it."""
        arrived = time.monotonic()
        key_name = self._authorise(request)
        asked = parse_chat(await self._read(request))
        mark = stamp(
            request.headers, asked, key_name=key_name, default_consent=self._identity.default_consent, new_id=new_id,
            user_key=lambda raw: self._identity.hasher("user", raw),
        )  # fmt: skip
        self._meters.in_flight.inc()
        try:
            async with self._fleet.borrow(mark.session_id, ends=mark.session_done or mark.session_opened) as replica:
                deadline = arrived + self._config.request_timeout_s
                answer = await unless_hung_up(request, self._answer(mark, asked, replica, deadline=deadline))
        finally:
            self._meters.in_flight.inc(-1)
        self._meters.seconds.observe(time.monotonic() - arrived)
        answer = answer or Response(status_code=499)
        self._meters.requests.inc(status=str(answer.status_code))
        return answer

    async def _answer(self, mark: Stamp, asked: ChatRequest, replica: Replica, *, deadline: float) -> Response:
        self._record(opening_events(mark, asked, replica.policy, now_ms=_now_ms(), new_id=new_id))
        body = engine_body(asked, self._config)
        try:
            reply = await replica.chat(body, deadline=deadline)
        except (RequestRefused, EngineUnavailable, asyncio.CancelledError) as error:
            self._record([self._failure(mark, replica, body, error)])
            raise
        choice = reply["choices"][0]
        calls = parse(choice["message"].get("content") or "") if asked.tools else []
        finish = "tool_calls" if calls and choice.get("finish_reason") == "stop" else choice.get("finish_reason")
        event = completion_event(
            mark, reply, replica.policy, sent=body, finish_reason=finish, now_ms=_now_ms(), event_id=new_id(),
            answers=None if calls else asked,
        )  # fmt: skip
        self._record([event])
        digest = self._identity.hasher
        self._record(
            tool_call_events(
                mark, calls, replica.policy, now_ms=_now_ms(), new_id=new_id, digest=lambda text: digest("arguments", text)
            )
        )  # fmt: skip
        self._measure(reply, calls, fault=event.payload.capture_error)
        policy = replica.policy
        headers = {
            "X-Completion-Id": mark.completion_id, "X-Policy-Version": str(policy.policy_version), "X-Arm": policy.arm,
            "X-Session-Id": mark.session_id, "X-Turn-Id": mark.turn_id,
        }  # fmt: skip
        return JSONResponse(client_body(reply, calls, finish=finish, completion_id=mark.completion_id), headers=headers)

    def _failure(self, mark: Stamp, replica: Replica, body: dict[str, Any], error: BaseException) -> Event:
        """Return the event of a completion that came to nothing: its turn must not vanish."""
        fault = error.code if isinstance(error, RequestRefused) else "engine_unavailable"
        fault = "client_gone" if isinstance(error, asyncio.CancelledError) else fault
        return completion_event(
            mark, {}, replica.policy, sent=body, finish_reason="error", now_ms=_now_ms(), event_id=new_id(), fault=fault
        )  # fmt: skip

    def _record(self, events: list[Any]) -> None:
        for event in events:
            self._recorder.record(event)

    def _measure(self, reply: dict[str, Any], calls: list[ParsedCall], *, fault: str | None) -> None:
        usage, timings = reply.get("usage") or {}, reply.get("timings") or {}
        self._meters.tokens.inc(usage.get("prompt_tokens") or 0, kind="prompt")
        self._meters.tokens.inc((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, kind="cached")
        self._meters.tokens.inc(usage.get("completion_tokens") or 0, kind="response")
        if (first := timings.get("ttft_ms")) is not None:
            self._meters.ttft.observe(first / 1000)
        for call in calls:
            self._meters.calls.inc(form="well_formed" if call.well_formed else "broken")
        if fault:
            self._meters.faults.inc(reason=fault)

    async def models(self, request: Request) -> Response:
        """List what serves."""
        self._authorise(request)
        listed = [
            {"id": replica.target.checkpoint, "object": "model", "owned_by": "tidegate", "policy_version": replica.target.policy_version}
            for replica in self._fleet.replicas
        ]  # fmt: skip
        return JSONResponse({"object": "list", "data": listed})

    async def health(self, _request: Request) -> Response:
        """Say whether requests are answered now."""
        serving = self._fleet.serving
        ready = serving is not None and serving.ready
        body = {"ready": ready, "checkpoint": serving.target.checkpoint if serving else None}
        return JSONResponse(body, status_code=200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        """Return the metrics."""
        self._meters.refresh(self._fleet, self._recorder.counts())
        text = self._meters.registry.render() + self._more_metrics()
        return PlainTextResponse(text, headers={"Content-Type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        """Return replicas, refusals and event counts."""
        self._authorise(request)
        return JSONResponse(self._fleet.status() | {"events": asdict(self._recorder.counts())})

    def _authorise(self, request: Request) -> str:
        name = who(self._identity.keys, request.headers.get("Authorization"))
        if name is None:
            raise RequestRefused(401, "send an API key of this gateway as `Authorization: Bearer KEY`", code="invalid_api_key")
        return name

    async def _read(self, request: Request) -> bytes:
        """Read the body, but keep no more than `max_body_bytes` of it.

        A larger one is read to its end and thrown away, within reason: closing a connection while the client still writes resets
        it, and the client would see that instead of our sentence.
        """
        limit = self._config.max_body_bytes
        body, seen = bytearray(), 0
        async for chunk in request.stream():
            seen += len(chunk)
            if seen <= limit:
                body += chunk
            elif seen > limit + DISCARD_BYTES:
                break
        if seen > limit:
            raise RequestRefused(413, f"the body is larger than {limit} bytes; shorten the conversation", code="body_too_large")
        return bytes(body)

    async def _refused(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        self._meters.requests.inc(status=str(error.status))
        return JSONResponse(error_body(error.status, error.sentence, code=error.code), status_code=error.status)

    async def _unavailable(self, _request: Request, error: Exception) -> Response:
        self._meters.requests.inc(status="503")
        body = error_body(503, str(error), code="engine_unavailable")
        return JSONResponse(body, status_code=503, headers={"Retry-After": str(RETRY_AFTER_S)})


def engine_body(asked: ChatRequest, config: ServingConfig) -> dict[str, Any]:
    """Return what the engine is asked for: the client's wishes, our defaults, and everything that capture needs."""
    body: dict[str, Any] = {
        "messages": asked.rendered(),
        "temperature": config.temperature if asked.temperature is None else asked.temperature,
        "top_p": asked.top_p or 1.0,
        "top_k": max(0, asked.top_k or 0),
        "max_tokens": asked.limit or config.max_tokens,
        "seed": random.SystemRandom().getrandbits(48) if asked.seed is None else asked.seed,  # a resend draws the same tokens
        "logprobs": True,
        "return_token_ids": True,
    }
    if asked.tools:
        body["tools"] = asked.tools
    return body


def client_body(reply: dict[str, Any], calls: list[ParsedCall], *, finish: str | None, completion_id: str) -> dict[str, Any]:
    """Return OpenAI's body: the engine's without token ids, with tool calls beside the verbatim content.

    The content keeps its tool-call markup, so that a client which sends the message back gives the engine the very tokens it
    sampled.
    """
    choice = reply["choices"][0]
    message: dict[str, Any] = dict(choice["message"])
    if calls:
        message["tool_calls"] = openai_calls(calls, completion_id=completion_id)
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": reply.get("created", int(time.time())),
        "model": reply.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": reply.get("usage") or {},
    }


async def _missing(request: Request, _error: Exception) -> Response:
    sentence = f"{request.method} {request.url.path} is not served; see /v1/chat/completions and /v1/models"
    return JSONResponse(error_body(404, sentence, code="not_found"), status_code=404)


def _now_ms() -> int:
    return int(time.time() * 1000)
