"""Telemetry of any content and in any order: every signal gets one answer."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pipelines.codec import decode, encode
from pipelines.importers import otlp
from pipelines.importers.otlp_sessions import Recent
from pipelines.importers.otlp_wire import signals
from tests.support.otlp import SPAN, START, TRACE, logs, made, source, traces, wrapped

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from([
    "gen_ai.operation.name", "gen_ai.conversation.id", "gen_ai.request.model", "gen_ai.response.id", "gen_ai.usage.input_tokens",
    "gen_ai.response.finish_reasons", "gen_ai.input.messages", "gen_ai.prompt", "gen_ai.prompt.0.role", "gen_ai.tool.name", "error.type",
    "gen_ai.tool.call.id", "gen_ai.tool.call.arguments", "gen_ai.evaluation.name", "gen_ai.evaluation.score.value", "session.id", "user.id",
    "request_id", "survival_rate_four_gram", "survival_rate_no_revert", "time_delay_ms", "outcome", "accepted", "rating", "event.name",
    "prompt.id", "conversation.id", "decision", "success", "duration_ms", "tool_use_id", "tool_name", "input_tokens", "event.kind",
    "copilot_chat.session_id", "ai.operationId", "edit_source",
    "gen_ai.request.temperature", "gen_ai.request.top_k", "lines_added", "copilot_chat.time_to_first_token", "openinference.span.kind",
])  # fmt: skip
WORDS = st.sampled_from(
    ["chat", "execute_tool", "invoke_agent", "LLM", "accepted", "rejected", "positive", "[]", '[{"role":"user"}]', "0.5", "5000"]
)
VALUES = st.one_of(WORDS.map(wrapped), st.integers().map(lambda n: {"intValue": n}), st.floats().map(lambda x: {"doubleValue": x}), JSON)
ATTRIBUTES = st.lists(st.fixed_dictionaries({"key": NAMES, "value": VALUES}), max_size=8)
IDS = st.sampled_from([TRACE, "", SPAN, "x"]) | JSON
TIMES = st.integers(0, 2**63).map(str) | st.sampled_from([0, str(START * 10**6), [1, 2], None]) | JSON
EVENT_NAMES = st.sampled_from([
    "gen_ai.evaluation.result", "gen_ai.user.message", "gen_ai.client.inference.operation.details", "copilot_chat.edit.survival",
    "copilot_chat.edit.feedback", "copilot_chat.edit.hunk.action", "copilot_chat.inline.done", "copilot_chat.user.feedback",
    "copilot_chat.session.start", "copilot_chat.tool.call", "copilot_chat.agent.turn", "claude_code.tool_result", "claude_code.api_request",
    "codex.user_prompt", "codex.sse_event", "codex.tool_decision", "gemini_cli.tool_call", "", "x",
])  # fmt: skip
ODD_LOG = st.fixed_dictionaries(
    {"eventName": EVENT_NAMES, "timeUnixNano": TIMES, "traceId": IDS, "spanId": IDS, "attributes": ATTRIBUTES, "body": JSON}
)
ODD_SPAN = st.fixed_dictionaries(
    {"traceId": IDS, "spanId": IDS, "startTimeUnixNano": TIMES, "endTimeUnixNano": TIMES, "attributes": ATTRIBUTES, "status": JSON,
     "events": st.lists(st.fixed_dictionaries({"name": EVENT_NAMES, "attributes": ATTRIBUTES}), max_size=2)}
)  # fmt: skip


@given(
    JSON
    | st.lists(ODD_SPAN | JSON, max_size=4).map(lambda spans: traces(*spans))
    | st.lists(ODD_LOG | JSON, max_size=4).map(lambda all_: logs(*all_))
)
def test_whatever_is_sent_each_signal_gets_one_answer_and_every_event_is_valid(document: object) -> None:
    found = list(signals(document))
    answers = [list(otlp.Translator(source(), whole=whole).request(document)) for whole in (False, True)]
    assert [len(each) for each in answers] == [len(found)] * 2
    for answer in (*answers[0], *answers[1]):
        assert bool(answer.events) + (answer.fault is not None) + answer.ignored == 1
        for event in answer.events:
            line = encode(event)
            assert decode(line, 10**7) == event


@given(st.permutations(range(5)), st.integers(0, 5))
def test_facts_do_not_depend_on_the_order_within_a_request_nor_on_repeats(order: list[int], repeat: int) -> None:
    request = json.loads(otlp.SAMPLE.read_text().splitlines()[0])
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    shuffled = [spans[i] for i in order] + spans[:repeat]
    usual, other = made(traces(*spans[:5])), made(traces(*shuffled))
    ours = {event.event_id: event for event in usual}
    theirs = {event.event_id: event for event in other}
    assert theirs.keys() == ours.keys()
    assert {event.type for event in other} == {event.type for event in usual}


def test_memory_is_bounded_and_forgets_the_oldest_first() -> None:
    recent: Recent[int] = Recent(limit=3)
    for i in range(3):
        recent.put(str(i), i)
    assert recent.get("0") == 0
    recent.put("3", 3)
    assert [recent.get(key) for key in "0123"] == [0, None, 2, 3]
    assert (recent.first("3", 9), recent.first("4", 4)) == (False, True)
