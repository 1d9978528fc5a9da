"""OTLP/JSON files: recognised, read whole or by lines, read twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.importers import otlp, otlp_genai, otlp_sniffing, registry, sniffing
from pipelines.importers.engine import Importer
from pipelines.importers.otlp_wire import Signal, signals
from pipelines.importers.sessions import Stamp
from tests.support.otlp import CLIENT, keyed, span, traces


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
