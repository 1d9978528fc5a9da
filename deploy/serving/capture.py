"""From one answered request to the events that tell of it (pure).

A completion is captured where its tokens were sampled: ids and log-probabilities are the engine's own, never made again from
text. A capture that is incomplete is still an event, with the reason it cannot be trained on; the user's answer does not
depend on it.

Takes: the request's headers and body, the engine's reply, clocks and ids as arguments. Gives: `Stamp`, events.
Leaves out: asking the engine, sending events (`gateway.py`).
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from deploy.serving.protocol import ChatRequest, RequestRefused
from deploy.serving.toolcalls import ParsedCall
from pipelines.commands import destroys_by_call
from pipelines.declining import declines
from pipelines.events import (
    Client,
    Completion,
    CompletionPayload,
    Consent,
    Event,
    SessionStarted,
    SessionStartedPayload,
    ToolCall,
    ToolCallPayload,
    TurnStarted,
    TurnStartedPayload,
    pack_ids,
    pack_logprobs,
)
from pipelines.reading import claims, edit_expected, ends_in_question
from pipelines.redaction import features

TurnType = Literal["main", "side"]
Served = Literal["simulated", "benchmark", "live"]

_IDENTITY: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""Session and turn ids: visible ASCII, so that they travel in headers, keys and file names' safe encodings alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Everything about a request that its events carry."""

    session_id: str
    session_opened: bool
    """The client named no session, so the gateway opened one."""
    session_done: bool
    turn_id: str
    turn_opened: bool
    """The client named no turn and this request begins with a user's message, so the gateway opened one."""
    turn_index: int
    step: int
    """Position of this completion inside its turn."""
    completion_id: str
    turn_type: TurnType
    user_key: str
    origin: Served
    consent: Consent
    surface: str
    task_bucket: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which policy answered."""

    checkpoint: str
    policy_version: int
    arm: str
    tokenizer_sha: str
    template_sha: str


def _choice(headers: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = headers.get(name, default)
    if value not in allowed:
        raise RequestRefused(400, f"{name} is {value!r}; it must be one of {', '.join(allowed)}", code="invalid_header")
    return value


def _identity(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if value is not None and not _IDENTITY.fullmatch(value):
        raise RequestRefused(400, f"{name} must be 1 to 128 visible ASCII characters", code="invalid_header")
    return value


def _number(headers: Mapping[str, str], name: str, default: int) -> int:
    value = headers.get(name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise RequestRefused(400, f"{name} is {value!r}; it must be a whole number from 0", code="invalid_header")
    return int(value)


def stamp(
    headers: Mapping[str, str], request: ChatRequest, *, key_name: str, default_consent: str, new_id: Callable[[], str],
    user_key: Callable[[str], str],
) -> Stamp:  # fmt: skip
    """Read a request's identity from its headers and make up what the client left out.

    Without `X-Turn-Id` a turn is named after its session and the number of user messages so far, so the steps of one turn
    (after tool results) share it, and it opens where the last message is the user's.

    Args:
        headers: Case-insensitive.
        request: The parsed body.
        key_name: Name of the API key, the user where nothing else names one.
        default_consent: Where the client states none.
        new_id: Makes ids.
        user_key: Keyed hash of a raw user name.

    Raises:
        RequestRefused: 400: a header's value is not allowed.
    """
    named_session, named_turn = _identity(headers, "X-Session-Id"), _identity(headers, "X-Turn-Id")
    session_id = named_session or new_id()
    users = [index for index, message in enumerate(request.messages) if message.role == "user"]
    since = request.messages[users[-1] :] if users else request.messages
    origin = _choice(headers, "X-Origin", get_args(Served), "live")
    consent = _choice(headers, "X-Consent", get_args(Consent), default_consent)
    turn_type = _choice(headers, "X-Turn-Type", get_args(TurnType), "main")
    turn_index = _number(headers, "X-Turn-Index", max(0, len(users) - 1))
    return Stamp(
        session_id=session_id, session_opened=named_session is None,
        session_done=headers.get("X-Session-Done", "").lower() in {"1", "true", "yes"},
        turn_id=named_turn or f"{session_id[:110]}:turn-{turn_index}",
        turn_opened=named_turn is None and turn_type == "main" and (named_session is None or request.messages[-1].role == "user"),
        turn_index=turn_index, step=_number(headers, "X-Step", sum(message.role == "assistant" for message in since)),
        completion_id=new_id(), turn_type=turn_type,  # type: ignore[arg-type]
        user_key=user_key(headers.get("X-User") or request.user or f"key:{key_name}"),
        origin=origin, consent=consent,  # type: ignore[arg-type]
        surface=headers.get("X-Surface", "api")[:64], task_bucket=headers["X-Task-Bucket"][:64] if "X-Task-Bucket" in headers else None,
    )  # fmt: skip


def opening_events(mark: Stamp, request: ChatRequest, policy: Policy, *, now_ms: int, new_id: Callable[[], str]) -> list[Event]:
    """Return `session_started` and `turn_started` where the client leaves them to the gateway, in the order they happened."""
    events: list[Event] = []
    common = _envelope(mark, policy, now_ms=now_ms)
    if mark.session_opened:
        session = SessionStartedPayload(surface=mark.surface, task_bucket=mark.task_bucket)
        events.append(SessionStarted(event_id=new_id(), turn_id=None, payload=session, **common))
    if mark.turn_opened:
        text = next((message.content or "" for message in reversed(request.messages) if message.role == "user"), "")
        seen = features(text)
        turn = TurnStartedPayload(
            turn_index=mark.turn_index, message=text, message_chars=seen.chars, language=seen.language,
            stack_traces=seen.stack_traces, diffs=seen.diffs, edit_expected=edit_expected(text),
        )  # fmt: skip
        events.append(TurnStarted(event_id=new_id(), turn_id=mark.turn_id, payload=turn, **common))
    return events


def completion_event(
    mark: Stamp, reply: Mapping[str, Any], policy: Policy, *, sent: Mapping[str, Any], finish_reason: str | None,
    now_ms: int, event_id: str, fault: str | None = None, answers: ChatRequest | None = None,
) -> Completion:  # fmt: skip
    """Return the event of one completion.

    Args:
        mark: The request's identity.
        reply: The engine's body.
        policy: Who answered.
        sent: What the engine was asked for: temperature, top_p, top_k.
        finish_reason: As the client was told.
        now_ms: When the answer arrived.
        event_id: Id of the event.
        fault: Why there is no whole reply; None when there is one.
        answers: The request, where the reply is the last word of its turn (it calls no tool); None elsewhere.
    """
    choice: Mapping[str, Any] = (reply.get("choices") or [{}])[0]
    timings: Mapping[str, Any] = reply.get("timings") or {}
    usage: Mapping[str, Any] = reply.get("usage") or {}
    prompt, response, logprobs, missing = _captured(reply, choice)
    fault = fault or missing
    if mark.consent == "none":
        prompt, response, logprobs, fault = None, None, None, "no_consent"
    if fault is None:
        fault = _not_on_policy(mark, sent)
    payload = CompletionPayload(
        completion_id=mark.completion_id, step=mark.step, model=policy.checkpoint,
        prompt_ids=None if prompt is None else pack_ids(prompt),
        response_ids=None if response is None else pack_ids(response),
        behaviour_logprobs=None if logprobs is None else pack_logprobs(logprobs),
        temperature=sent["temperature"], top_p=sent["top_p"], top_k=sent["top_k"],
        tokenizer_sha=policy.tokenizer_sha, template_sha=policy.template_sha,
        finish_reason=finish_reason, ttft_ms=timings.get("ttft_ms"), duration_ms=timings.get("duration_ms"),
        prompt_tokens=usage.get("prompt_tokens") or 0, response_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, capture_error=fault,
        **(_said(choice, answers) if answers is not None and mark.consent != "none" else {}),
    )  # fmt: skip
    return Completion(event_id=event_id, turn_id=mark.turn_id, payload=payload, **_envelope(mark, policy, now_ms=now_ms))


def tool_call_events(
    mark: Stamp, calls: list[ParsedCall], policy: Policy, *, now_ms: int, new_id: Callable[[], str], digest: Callable[[str], str]
) -> list[ToolCall]:
    """Return one event a tool call, for clients that record none themselves (those that name no session).

    Args:
        mark: The request's identity.
        calls: As parsed from the answer.
        policy: Who answered.
        now_ms: When the answer arrived.
        new_id: Makes ids.
        digest: Keyed hash of arguments.
    """
    if not mark.session_opened:
        return []
    common = _envelope(mark, policy, now_ms=now_ms)
    return [
        ToolCall(
            event_id=new_id(), turn_id=mark.turn_id, **common,
            payload=ToolCallPayload(
                tool_call_id=f"call_{mark.completion_id}_{index}", completion_id=mark.completion_id, name=call.name,
                arguments_valid=call.well_formed, arguments_hash=digest(call.arguments), parallel_group=mark.step,
                destructive=destroys_by_call(call.name, call.arguments),
            ),
        )
        for index, call in enumerate(calls)
    ]  # fmt: skip


def _said(choice: Mapping[str, Any], request: ChatRequest) -> dict[str, Any]:
    """Describe a turn's last word: whether it asks or declines, and which files it speaks of with and without having looked at them.

    What was looked at is what the request shows: a client that shortens its conversation forgets reads.
    """
    text = (choice.get("message") or {}).get("content") or ""
    looked_at = [message.content or "" for message in request.messages if message.role == "tool"]
    looked_at += [json.dumps(call.get("function"), ensure_ascii=False) for message in request.messages for call in message.tool_calls or ()]
    named, unread = claims(text, looked_at)
    return {"ends_in_question": ends_in_question(text), "refused": declines(text), "claims": named, "claims_unread": unread}


def _envelope(mark: Stamp, policy: Policy, *, now_ms: int) -> dict[str, Any]:
    return {
        "session_id": mark.session_id, "occurred_at_ms": now_ms, "recorded_at_ms": now_ms, "origin": mark.origin,
        "policy_version": policy.policy_version, "arm": policy.arm, "user_key": mark.user_key, "consent": mark.consent,
        "client": Client(name="tidegate-gateway", version="1"),
    }  # fmt: skip


def _captured(
    reply: Mapping[str, Any], choice: Mapping[str, Any]
) -> tuple[list[int] | None, list[int] | None, list[float] | None, str | None]:
    """Return prompt ids, response ids, log-probabilities and the fault, if any; each is None where it is not usable."""
    prompt, response = reply.get("prompt_token_ids"), choice.get("token_ids")
    content = (choice.get("logprobs") or {}).get("content")
    if prompt is None or response is None or not _ids(prompt) or not _ids(response):
        return None, None, None, "no_token_ids"
    if not content or any(not isinstance(item.get("logprob"), int | float) for item in content):
        return prompt, response, None, "no_logprobs"
    logprobs = [float(item["logprob"]) for item in content]
    if len(logprobs) != len(response):
        return prompt, response, None, "length_mismatch"
    if not all(map(math.isfinite, logprobs)):
        return prompt, response, None, "not_finite"
    return prompt, response, logprobs, None


def _ids(value: Any) -> bool:
    return bool(value) and isinstance(value, list) and all(isinstance(item, int) and 0 <= item < 2**31 for item in value)


def _not_on_policy(mark: Stamp, sent: Mapping[str, Any]) -> str | None:
    """Name why a complete capture is no sample of the policy at its temperature, or None."""
    if mark.turn_type == "side":
        return "side_turn"
    if sent["temperature"] == 0:
        return "greedy"
    return None
