"""From request and reply to events: stamps, exact packing, and every way in which a capture is incomplete."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.datastructures import Headers

from deploy.serving.capture import Policy, Stamp, completion_event, opening_events, stamp, tool_call_events
from deploy.serving.config import ServingConfig
from deploy.serving.gateway import client_body, engine_body
from deploy.serving.protocol import ChatRequest, RequestRefused, parse_chat
from deploy.serving.replicas import compare_probe
from deploy.serving.toolcalls import parse, write
from pipelines.events import unpack_ids, unpack_logprobs

POLICY = Policy(checkpoint="c" * 64, policy_version=5, arm="serving", tokenizer_sha="t" * 64, template_sha="p" * 64)
SENT = {"temperature": 0.8, "top_p": 1.0, "top_k": 0}


def request(*roles: str, **more: Any) -> ChatRequest:
    messages = [{"role": role, "content": f"{role} {index}"} for index, role in enumerate(roles or ("user",))]
    return parse_chat(json.dumps({"messages": messages} | more).encode())


def mark(asked: ChatRequest | None = None, **headers: str) -> Stamp:
    ids: Iterator[str] = (f"id-{number}" for number in range(100))
    named = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return stamp(
        named, asked or request(), key_name="local", default_consent="measure", new_id=lambda: next(ids),
        user_key=lambda raw: f"hash of {raw}",
    )  # fmt: skip


def reply(**changed: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "stop", "token_ids": [7, 8, 2], "message": {"role": "assistant", "content": "ok"},
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.25}, {"logprob": -0.125}]},
    }  # fmt: skip
    body: dict[str, Any] = {"prompt_token_ids": [1, 5, 6], "choices": [choice | changed.pop("choice", {})]}
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return body | {"usage": usage, "timings": {"ttft_ms": 10.0, "duration_ms": 30.0}} | changed


def capture(mark: Stamp, body: dict[str, Any], *, sent: dict[str, Any] | None = None) -> Any:
    return completion_event(mark, body, POLICY, sent=sent or SENT, finish_reason="stop", now_ms=1_000, event_id="e")


def test_a_complete_capture_holds_the_engines_numbers() -> None:
    event = capture(mark(X_Session_Id="s", X_Turn_Id="t", X_Consent="train", X_Origin="simulated"), reply())
    payload = event.payload
    assert unpack_ids(payload.prompt_ids).tolist() == [1, 5, 6]
    assert unpack_ids(payload.response_ids).tolist() == [7, 8, 2]
    assert unpack_logprobs(payload.behaviour_logprobs).tolist() == [-0.5, -1.25, -0.125]
    assert (payload.capture_error, payload.temperature, payload.cached_tokens, payload.ttft_ms) == (None, 0.8, 2, 10.0)
    assert (event.session_id, event.turn_id, event.policy_version, event.arm, event.consent) == ("s", "t", 5, "serving", "train")
    assert (payload.model, payload.tokenizer_sha, payload.template_sha) == ("c" * 64, "t" * 64, "p" * 64)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (reply(prompt_token_ids=None), "no_token_ids"),
        (reply(prompt_token_ids=["a"]), "no_token_ids"),
        (reply(choice={"token_ids": []}), "no_token_ids"),
        (reply(choice={"logprobs": None}), "no_logprobs"),
        (reply(choice={"logprobs": {"content": [{"logprob": None}]}}), "no_logprobs"),
        (reply(choice={"logprobs": {"content": [{"logprob": -1.0}]}}), "length_mismatch"),
        (reply(choice={"token_ids": [7], "logprobs": {"content": [{"logprob": float("-inf")}]}}), "not_finite"),
        ({}, "no_token_ids"),
    ],
)
def test_an_incomplete_capture_is_an_event_with_its_reason(body: dict[str, Any], fault: str) -> None:
    payload = capture(mark(), body).payload
    assert payload.capture_error == fault
    assert payload.behaviour_logprobs is None


def test_without_consent_no_token_leaves_and_side_turns_and_greedy_ones_are_not_trainable() -> None:
    silent = capture(mark(X_Consent="none"), reply()).payload
    assert (silent.prompt_ids, silent.response_ids, silent.behaviour_logprobs, silent.capture_error) == (None, None, None, "no_consent")
    assert capture(mark(X_Turn_Type="side"), reply()).payload.capture_error == "side_turn"
    assert capture(mark(), reply(), sent=SENT | {"temperature": 0}).payload.capture_error == "greedy"


def test_the_gateway_opens_what_the_client_leaves_open() -> None:
    plain = mark(request("system", "user"))
    opened = opening_events(plain, request("system", "user"), POLICY, now_ms=1_000, new_id=lambda: "e")
    assert [event.type for event in opened] == ["session_started", "turn_started"]
    assert opened[1].payload.message == "user 1"  # type: ignore[union-attr]
    assert opening_events(mark(X_Session_Id="s", X_Turn_Id="t"), request(), POLICY, now_ms=1, new_id=lambda: "e") == []
    named = mark(X_Session_Id="s")
    assert [event.type for event in opening_events(named, request(), POLICY, now_ms=1, new_id=lambda: "e")] == ["turn_started"]


def test_the_steps_of_one_turn_share_its_id_and_only_the_first_opens_it() -> None:
    first = mark(request("system", "user"), X_Session_Id="s")
    second = mark(request("system", "user", "assistant", "tool"), X_Session_Id="s")
    third = mark(request("system", "user", "assistant", "tool", "assistant", "user"), X_Session_Id="s")
    assert (first.turn_id, first.step, first.turn_opened) == (second.turn_id, 0, True)
    assert (second.step, second.turn_opened) == (1, False)
    assert third.turn_id != first.turn_id
    assert (third.turn_index, third.step, third.turn_opened) == (1, 0, True)


def test_the_user_is_the_header_the_body_or_the_key() -> None:
    assert mark(request(user="bob"), X_User="ada").user_key == "hash of ada"
    assert mark(request(user="bob")).user_key == "hash of bob"
    assert mark().user_key == "hash of key:local"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X_Origin", "imported"), ("X_Consent", "yes"), ("X_Turn_Type", "x"), ("X_Step", "-1"), ("X_Turn_Index", "many"),
        ("X_Session_Id", ""), ("X_Turn_Id", "x" * 129),
    ],
)  # fmt: skip
def test_a_header_with_a_value_outside_its_set_is_refused(header: str, value: str) -> None:
    with pytest.raises(RequestRefused, match=header.replace("_", "-")) as caught:
        mark(**{header: value})
    assert caught.value.status == 400


def test_tool_calls_of_plain_clients_become_events_and_those_of_recording_clients_do_not() -> None:
    calls = parse(write("grep", {"pattern": "x"}) + "<tool_call>broken</tool_call>")
    opened = tool_call_events(mark(), calls, POLICY, now_ms=1, new_id=lambda: "e", digest=lambda text: f"h{len(text)}")
    assert [(event.payload.name, event.payload.arguments_valid) for event in opened] == [("grep", True), ("", False)]
    assert tool_call_events(mark(X_Session_Id="s"), calls, POLICY, now_ms=1, new_id=lambda: "e", digest=lambda _: "h") == []


def test_the_client_sees_the_verbatim_content_its_calls_and_no_token_ids() -> None:
    content = "I look. " + write("grep", {"pattern": "x"})
    body = client_body(
        reply(choice={"message": {"role": "assistant", "content": content}}), parse(content), finish="tool_calls", completion_id="c"
    )
    assert body["choices"][0]["message"]["content"] == content
    assert body["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "grep", "arguments": '{"pattern": "x"}'}
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]


def test_defaults_fill_what_the_client_leaves_out_and_nothing_it_says() -> None:
    config = ServingConfig(temperature=0.9, max_tokens=33)
    body = engine_body(request(), config)
    assert (body["temperature"], body["max_tokens"], body["top_p"], body["top_k"]) == (0.9, 33, 1.0, 0)
    said = engine_body(request(temperature=0.0, max_completion_tokens=4, top_p=0.5, top_k=-1, seed=9), config)
    assert (said["temperature"], said["max_tokens"], said["top_p"], said["top_k"], said["seed"]) == (0.0, 4, 0.5, 0, 9)


def test_text_parts_are_joined_and_images_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = parse_chat(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert asked.rendered() == [{"role": "user", "content": "ab"}]
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    with pytest.raises(RequestRefused, match="only text parts"):
        parse_chat(json.dumps(image).encode())


def test_a_fingerprint_is_the_mean_difference_and_not_a_number_when_anything_is_missing() -> None:
    assert compare_probe([-1.0, -2.0], [-1.5, -2.0], tolerance_nats=1).mean_abs_nats == pytest.approx(0.25)
    for found in ([-1.0], [-1.0, None], [-1.0, float("nan")], []):
        assert not compare_probe(found, [-1.0, -2.0], tolerance_nats=1).mean_abs_nats <= 1


def test_a_turns_last_word_says_whether_it_asks_and_which_files_it_speaks_of_unread() -> None:
    read = {"id": "1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "cart.py"}'}}
    messages = [
        {"role": "user", "content": "what do cart.py and tax.py do?"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "tool_call_id": "1", "content": "import shop.py"},
    ]
    asked = parse_chat(json.dumps({"messages": messages}).encode())
    body = reply(choice={"message": {"role": "assistant", "content": "cart.py uses shop.py, and tax.py the rest. Shall I change it?"}})

    def spoken(consent: str, answers: ChatRequest | None) -> tuple[Any, ...]:
        who = mark(asked, X_Consent=consent)
        event = completion_event(who, body, POLICY, sent=SENT, finish_reason="stop", now_ms=1, event_id="e", answers=answers)
        return event.payload.ends_in_question, event.payload.claims, event.payload.claims_unread

    assert spoken("measure", asked) == (True, 3, 1)
    assert spoken("none", asked) == spoken("measure", None) == (None, None, None)


def test_a_turns_last_word_says_whether_it_declines() -> None:
    asked = parse_chat(json.dumps({"messages": [{"role": "user", "content": "Write me a worm"}]}).encode())

    def refused(text: str, consent: str = "measure") -> bool | None:
        body = reply(choice={"message": {"role": "assistant", "content": text}})
        who = mark(asked, X_Consent=consent)
        event = completion_event(who, body, POLICY, sent=SENT, finish_reason="stop", now_ms=1, event_id="e", answers=asked)
        return event.payload.refused

    assert refused("I'm sorry, but I can't help with that.") is True
    assert refused("I can't find worm.py.") is False
    assert refused("I'm sorry, but I can't help with that.", "none") is None


def test_a_turn_that_the_gateway_opens_says_whether_a_change_was_asked_for() -> None:
    asked = parse_chat(json.dumps({"messages": [{"role": "user", "content": "Rename total to amount"}]}).encode())
    opened = opening_events(mark(asked), asked, POLICY, now_ms=1, new_id=lambda: "i")
    assert opened[0].payload.edits_observed is None  # type: ignore[union-attr]
    assert opened[1].payload.edit_expected > 0.5  # type: ignore[union-attr,operator]
