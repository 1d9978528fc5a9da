"""OTLP/JSON files: recognised, read whole or by lines, read twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.importers import otlp, otlp_genai, otlp_sniffing, registry, sniffing
from pipelines.importers.engine import Importer
from pipelines.importers.otlp_sessions import Sessions
from pipelines.importers.otlp_wire import Signal, signals
from pipelines.importers.sessions import Stamp
from tests.support.otlp import CHAT, CLIENT, SPAN, START, TRACE, keyed, log, logs, one, source, span, traces


def imported(path: Path) -> tuple[list[Any], dict[str, Any]]:
    stamp = Stamp(user_key="u", consent="measure", keep_text=True, client=CLIENT, keyed=keyed, format="otlp")
    importer = Importer(otlp.read, otlp.Mapper(stamp))
    events = list(importer.events([path]))
    return events, importer.counts.as_dict()


def test_the_sample_gives_hand_counted_events_and_accounts_for_every_record() -> None:
    events, counts = imported(otlp.SAMPLE)
    assert counts["events"] == {
        "completion": 4, "edit_decided": 3, "edit_proposed": 3, "edit_survival": 3, "evaluation": 2, "feedback": 1, "session_started": 4,
        "tool_call": 2, "tool_result": 2, "turn_started": 6,
    }  # fmt: skip
    assert (counts["lines"], counts["accepted"], sum(counts["rejected"].values())) == (26, 16, 10)
    assert (counts["tool_calls"], counts["tool_errors"], counts["user_messages"], counts["edits"]) == (2, 1, 1, 1)
    assert {event.origin for event in events} == {"imported"}
    assert all(event.recorded_at_ms == event.occurred_at_ms for event in events)


def test_a_request_over_many_lines_and_a_list_of_requests_are_read_like_one_a_line(tmp_path: Path) -> None:
    usual, counts = imported(otlp.SAMPLE)
    requests = [json.loads(line) for line in otlp.SAMPLE.read_text().splitlines()]
    for name, text in {
        "pretty.json": json.dumps(requests[0], indent=2),
        "compact.json": json.dumps(requests[0], separators=(",", ":")),
        "documents.json": "\n".join(json.dumps(request, indent=1) for request in requests[:2]),
    }.items():
        (tmp_path / name).write_text(text)
        events, _ = imported(tmp_path / name)
        assert {event.event_id for event in events} <= {event.event_id for event in usual}
        assert sum(event.type == "completion" for event in events) == 2
        assert registry.recognise(sniffing.look(tmp_path / name)) == "otlp"
    assert counts["lines"] == 26


def test_a_file_read_twice_gives_duplicates_only(tmp_path: Path) -> None:
    lines = otlp.SAMPLE.read_bytes()
    (tmp_path / "twice.jsonl").write_bytes(lines + lines + lines[:400])
    _, counts = imported(tmp_path / "twice.jsonl")
    assert counts["events"] == imported(otlp.SAMPLE)[1]["events"]
    assert counts["rejected"]["truncated_last_line"] == 1
    assert counts["lines"] == counts["accepted"] + counts["duplicates"] + sum(counts["rejected"].values())


@pytest.mark.parametrize("text", ['{"resourceMetrics": []}', '{"traceId": "x"}', "[1, 2]", "", '{"type": "summary", "leafUuid": "x"}'])
def test_other_files_are_not_taken_for_telemetry(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.jsonl").write_text(text)
    assert not otlp_sniffing.otlp(sniffing.look(tmp_path / "file.jsonl"))


def test_operations_are_told_apart_in_every_dialect() -> None:
    told = {
        "chat": {"gen_ai.operation.name": "chat"}, "execute_tool": {"openinference.span.kind": "TOOL"},
        "invoke_agent": {"traceloop.span.kind": "agent"}, "invoke_workflow": {"traceloop.span.kind": "workflow"},
    }  # fmt: skip
    for expected, attributes in told.items():
        (signal,) = signals(traces(span(attributes)))
        assert isinstance(signal, Signal)
        assert otlp_genai.operation(signal) == expected


def lines(path: Path, *requests: object) -> Path:
    path.write_text("\n".join(json.dumps(request) for request in requests))
    return path


def test_what_a_later_request_tells_of_a_turn_is_known_to_the_spans_before(tmp_path: Path) -> None:
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "make it faster"}]}])
    tool = span({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "grep"}, spanId="b" * 16, start_ms=START + 300)
    call = span({"gen_ai.operation.name": "chat", "gen_ai.input.messages": "[]"}, spanId="c" * 16, start_ms=START + 200)
    agent = span({"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": "c7", "gen_ai.input.messages": asked})
    events, _ = imported(lines(tmp_path / "a.jsonl", traces(tool), traces(call), traces(agent)))
    assert {event.session_id for event in events} == {"c7"}
    opening = one(events, "turn_started")
    assert (opening.payload.message, opening.occurred_at_ms) == ("make it faster", START)


def test_turns_are_numbered_by_their_time_whatever_the_files_order_and_what_each_tells_of_the_history(tmp_path: Path) -> None:
    def turn(number: int) -> dict[str, Any]:
        said = json.dumps([{"role": "user", "content": f"message {number}"}])
        attributes = CHAT | {"gen_ai.response.id": f"r{number}", "gen_ai.input.messages": said}
        return traces(span(attributes, traceId=f"{number:032x}", spanId=f"{number:016x}", start_ms=START + number * 60_000))

    for order in ((1, 2, 3), (3, 1, 2), (3, 2, 1)):
        events, _ = imported(lines(tmp_path / "a.jsonl", *map(turn, order)))
        places = {event.payload.message: event.payload.turn_index for event in events if event.type == "turn_started"}
        assert places == {"message 1": 0, "message 2": 1, "message 3": 2}


def printed(name: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a log record of a span as the JavaScript SDK writes it."""
    ids = {"traceId": TRACE, "spanId": SPAN}
    return {"hrTime": [START // 1_000, 0], "spanContext": ids, "attributes": {"event.name": name} | attributes, "_body": name}


def test_a_call_that_no_span_of_the_file_tells_is_taken_from_its_log_record(tmp_path: Path) -> None:
    usage = {"gen_ai.usage.input_tokens": 700, "gen_ai.usage.output_tokens": 30}
    details = printed("gen_ai.client.inference.operation.details", CHAT | usage)
    alone, _ = imported(lines(tmp_path / "a.jsonl", {}, details))
    assert (one(alone, "completion").payload.prompt_tokens, one(alone, "completion").payload.duration_ms) == (700, None)
    both, counts = imported(lines(tmp_path / "b.jsonl", details, traces(span(CHAT | usage))))
    assert one(both, "completion").payload.duration_ms == 1_000.0
    assert counts["rejected"] == {"not_a_session_event:told_by_its_span": 1}
    sent = log("gen_ai.client.inference.operation.details", CHAT | usage, traceId=TRACE, spanId=SPAN)
    assert imported(lines(tmp_path / "c.jsonl", logs(sent)))[1]["accepted"] == 0  # a collector writes the spans into another file


def test_the_facts_of_a_file_without_spans_are_its_log_records(tmp_path: Path) -> None:
    tool = {"gen_ai.tool.name": "grep", "duration_ms": 5, "success": False}
    record = printed("copilot_chat.tool.call", tool)
    prompt = log("codex.user_prompt", {"conversation.id": "c1", "prompt": "x"})
    ran = log("codex.tool_result", {"conversation.id": "c1", "tool_name": "shell", "success": "true"})
    _, counts = imported(lines(tmp_path / "a.jsonl", record, logs(prompt, ran)))
    assert (counts["tool_calls"], counts["tool_errors"], counts["user_messages"]) == (2, 1, 1)
    assert counts["events"]["tool_call"] == 2


SDK = {"traceId": TRACE, "spanId": SPAN, "name": "chat", "startTime": [1_764_000_000, 0], "endTime": [1_764_000_001, 0]}
PYTHON = {"name": "chat", "context": {"trace_id": f"0x{TRACE}", "span_id": f"0x{SPAN}"}, "parent_id": None, "attributes": CHAT}
TIMES = {"start_time": "2025-11-24T16:00:00Z", "end_time": "2025-11-24T16:00:01Z"}
METRICS = {"resource": {"attributes": {}}, "scopeMetrics": []}


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        (json.dumps(SDK | {"attributes": CHAT}), 1),
        ("\n".join(["{}"] * 9 + [json.dumps(SDK | {"type": "span", "attributes": CHAT})]), 1),
        ("\n".join([json.dumps(METRICS)] * 9 + [json.dumps(SDK | {"attributes": CHAT})]), 1),
        (json.dumps([SDK | {"attributes": CHAT}]), 1),
        (json.dumps(PYTHON | TIMES, indent=4), 1),
        (json.dumps(PYTHON | TIMES | {"end_time": None}, indent=4) + "\n\n" + json.dumps(PYTHON | TIMES, indent=4), 1),
        (json.dumps(PYTHON | TIMES | {"padding": "x" * 70_000}, indent=4), 1),
        (json.dumps(traces(span(CHAT), resource={"a": "b"})["resourceSpans"][0], indent=2), 1),
        (json.dumps(traces(span(CHAT | {"padding": "x" * 70_000}))["resourceSpans"][0], indent=2), 1),
        (json.dumps({"trace_id": "t-1", "span_id": "s1", "startTimeUnixNano": str(START * 10**6), "name": "chat", "attributes": CHAT}), 1),
        (json.dumps({"hrTime": [1_764_000_000, 0], "attributes": {"event.name": "x"}, "padding": "x" * 70_000}, indent=2), 0),
    ],
)  # fmt: skip
def test_what_sdks_and_collectors_write_is_recognised_and_read(tmp_path: Path, text: str, completions: int) -> None:
    (tmp_path / "spans.json").write_text(text)
    assert registry.recognise(sniffing.look(tmp_path / "spans.json")) == "otlp"
    events, counts = imported(tmp_path / "spans.json")
    assert sum(event.type == "completion" for event in events) == completions
    assert not [reason for reason in counts["rejected"] if not reason.startswith("not_a_session_event")]


def test_a_session_that_never_ends_is_remembered_in_bounds_and_its_turns_are_numbered_on() -> None:
    sessions = Sessions(source())
    found = [
        item for number in range(12_000)
        for item in signals(traces(span({}, traceId=f"{number + 1:032x}", start_ms=START + number), resource={"session.id": "s"}))
        if isinstance(item, Signal)
    ]  # fmt: skip
    places = []
    for item in found:
        turn = sessions.turn(item)
        assert turn is not None
        opened = sessions.openings(item, turn, item.start_ms or 0)
        places.append(one(opened, "turn_started").payload.turn_index)
    assert places == list(range(12_000))


def test_a_turn_whose_conversation_is_named_late_leaves_no_gap_where_it_was_guessed(tmp_path: Path) -> None:
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "grep"}
    early = traces(span(tool, spanId="b" * 16), resource={"session.id": "window"})
    named = traces(span(CHAT, spanId="c" * 16))
    own = traces(span(tool, traceId="d" * 32, spanId="e" * 16, start_ms=START + 5_000), resource={"session.id": "window"})
    events, _ = imported(lines(tmp_path / "a.jsonl", early, named, own))
    places = {event.session_id: event.payload.turn_index for event in events if event.type == "turn_started"}
    assert places == {"c1": 0, "window": 0}


def test_evaluations_and_spans_that_a_service_logs_one_by_one_are_read(tmp_path: Path) -> None:
    resource = {"attributes": {"service.name": "desk"}}
    line = {"resource": resource, "scope": {"name": "tracer"}, "traceId": TRACE, "spanId": SPAN, "name": "chat", "kind": "INTERNAL"}
    times = {"startTimeUnixNano": START * 10**6, "endTimeUnixNano": (START + 700) * 10**6}
    score = {"gen_ai.evaluation.name": "Correct", "gen_ai.evaluation.score.value": 0.25, "gen_ai.evaluation.score.label": "Poor"}
    judged = {
        "resource": resource, "traceId": TRACE, "timeUnixNano": (START + 9_000) * 10**6, "observedTimeUnixNano": (START + 9_500) * 10**6,
        "severityNumber": 9, "name": "gen_ai.evaluation.result", "attributes": score | {"session.id": "s1"},
    }  # fmt: skip
    path = lines(tmp_path / "events.jsonl", judged, line | times | {"attributes": CHAT})
    assert registry.recognise(sniffing.look(path)) == "otlp"
    events, _ = imported(path)
    found = one(events, "evaluation")
    assert (found.session_id, found.turn_id, found.occurred_at_ms) == ("c1", TRACE, START + 9_000)
    assert (found.payload.score_value, found.payload.score_label) == (0.25, "Poor")
    assert one(events, "completion").payload.duration_ms == 700.0
