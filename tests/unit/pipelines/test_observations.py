"""Langfuse's and LangSmith's exports as session events."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import events as ev
from pipelines.codec import decode, encode
from pipelines.importers import langfuse, langsmith, otlp, otlp_sniffing, registry, sniffing
from pipelines.importers.engine import Importer
from pipelines.importers.otlp_wire import Fault, Signal
from pipelines.importers.sessions import Stamp
from tests.support.otlp import source


def imported(module: ModuleType, path: Path) -> tuple[list[Any], dict[str, Any]]:
    name = module.__name__.rpartition(".")[2]
    client = ev.Client(name="test", version="1")
    stamp = Stamp(user_key="u", consent="measure", keep_text=True, client=client, keyed=lambda kind, raw: f"{kind}<{raw}>", format=name)
    importer = Importer(module.read, module.Mapper(stamp))
    events = list(importer.events([path]))
    return events, importer.counts.as_dict()


def by_type(events: list[Any], kind: str) -> list[Any]:
    return [event for event in events if event.type == kind]


def test_a_langfuse_trace_is_a_turn_of_its_session_with_calls_tools_and_scores() -> None:
    events, counts = imported(langfuse, langfuse.SAMPLE)
    assert counts["events"] == {
        "completion": 2, "evaluation": 3, "session_started": 2, "tool_call": 2, "tool_result": 2, "turn_started": 2
    }  # fmt: skip
    assert counts["rejected"] == {"not_a_session_event:invoke_agent": 1, "not_a_session_event:langfuse_span": 1, "not_langfuse": 1}
    opening, other = by_type(events, "turn_started")
    assert (opening.session_id, opening.turn_id, opening.payload.message) == ("chat-8", "lf-trace-1", "Book the early train instead")
    assert (other.session_id, other.payload.message) == ("trace-lf-trace-2", "encore une fois")
    call = by_type(events, "completion")[0].payload
    assert (call.completion_id, call.model, call.prompt_tokens, call.response_tokens, call.cached_tokens) == (
        "lf-gen-1",
        "gpt-4o",
        120,
        30,
        64,
    )
    assert (call.ttft_ms, call.duration_ms, call.temperature) == (300.0, 1_500.0, 0.2)
    assert [result.payload.result_class for result in by_type(events, "tool_result")] == ["ok", "invalid_arguments"]
    scores = {event.payload.name: event for event in by_type(events, "evaluation")}
    assert (scores["helpfulness"].payload.score_value, scores["helpfulness"].payload.response_id) == (0.8, "lf-gen-1")
    assert (scores["user-feedback"].payload.score_value, scores["user-feedback"].turn_id) == (1.0, "lf-trace-1")
    assert (scores["tone"].payload.score_label, scores["tone"].session_id) == ("friendly", "trace-lf-trace-2")
    assert {event.payload.surface for event in by_type(events, "session_started")} == {"langfuse"}


@pytest.mark.parametrize("layout", [None, 2])
def test_a_downloaded_langfuse_trace_is_read_whole_however_it_is_laid_out(tmp_path: Path, layout: int | None) -> None:
    asked, answered = "2026-02-03T10:00:00.000Z", "2026-02-03T10:00:02.500Z"
    observed = {"id": "g1", "traceId": "t1", "startTime": asked, "endTime": answered, "type": "GENERATION", "name": "llm", "model": "m"}
    usage = {"usageDetails": {"input": 12, "output": 5}, "input": json.dumps(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))}
    tool = {"id": "o1", "traceId": "t1", "startTime": answered, "endTime": answered, "type": "TOOL", "name": "lookup", "input": '"{}"'}
    score = {"id": "s1", "traceId": "t1", "name": "helpful", "value": 1, "timestamp": answered, "observationId": "g1"}
    trace = {"id": "t1", "projectId": "p", "timestamp": asked, "sessionId": "chat", "input": json.dumps({"prompt": "Plan a trip"})}
    download = {"trace": {**trace, "scores": [score]}, "observations": [observed | usage, tool]}
    (tmp_path / "trace.json").write_text(json.dumps(download, indent=layout))
    assert registry.recognise(sniffing.look(tmp_path / "trace.json")) == "langfuse"
    events, counts = imported(langfuse, tmp_path / "trace.json")
    assert counts["events"] == {
        "completion": 1, "evaluation": 1, "session_started": 1, "tool_call": 1, "tool_result": 1, "turn_started": 1
    }  # fmt: skip
    assert {event.session_id for event in events} == {"chat"}
    assert by_type(events, "turn_started")[0].payload.message == "Plan a trip"
    call = by_type(events, "completion")[0].payload
    assert (call.prompt_tokens, call.response_tokens, call.duration_ms) == (12, 5, 2_500.0)


@pytest.mark.parametrize(
    ("given_input", "said"),
    [
        ("hi", "hi"), ('"hi"', "hi"), ({"prompt": "hi"}, "hi"), ('{"contents": "hi"}', "hi"), ({"question": "hi", "k": 4}, "hi"),
        ({"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, "hi"), ([{"role": "user", "content": "hi"}], "hi"),
        ({"args": [1]}, None), ("", None), (None, None), ("{broken", "{broken"), (json.dumps(json.dumps({"prompt": "hi"})), "hi"),
    ],
)  # fmt: skip
def test_langfuse_inputs_in_every_form(tmp_path: Path, given_input: object, said: str | None) -> None:
    entry = {"id": "g1", "traceId": "t1", "startTime": "2026-02-03T10:00:00Z", "type": "GENERATION", "input": given_input}
    (tmp_path / "x.jsonl").write_text(json.dumps(entry))
    events, _ = imported(langfuse, tmp_path / "x.jsonl")
    assert by_type(events, "turn_started")[0].payload.message == said


def test_a_langfuse_trace_longer_than_a_head_is_recognised(tmp_path: Path) -> None:
    trace = {"id": "t1", "projectId": "p", "name": "n", "timestamp": "2026-02-03T10:00:00Z", "input": None}
    one = {"id": "g", "traceId": "t1", "startTime": "2026-02-03T10:00:00Z", "type": "GENERATION", "input": "x" * 70_000}
    (tmp_path / "trace.json").write_text(json.dumps({"trace": trace, "observations": [one]}, indent=2))
    assert registry.recognise(sniffing.look(tmp_path / "trace.json")) == "langfuse"
    assert imported(langfuse, tmp_path / "trace.json")[1]["accepted"] == 1


def test_a_langsmith_root_is_a_turn_of_its_thread_with_the_runs_in_it() -> None:
    events, counts = imported(langsmith, langsmith.SAMPLE)
    assert counts["events"] == {
        "completion": 1, "evaluation": 1, "session_started": 1, "tool_call": 2, "tool_result": 2, "turn_started": 2
    }  # fmt: skip
    assert {(event.session_id) for event in events} == {"thread-5"}
    assert by_type(events, "turn_started")[0].payload.message == "Where is my parcel?"
    call = by_type(events, "completion")[0].payload
    assert (call.model, call.prompt_tokens, call.response_tokens, call.ttft_ms, call.temperature) == ("claude-sonnet", 80, 12, 500.0, 0.0)
    assert [result.payload.result_class for result in by_type(events, "tool_result")] == ["ok", "unknown_tool"]
    (vote,) = by_type(events, "evaluation")
    assert (vote.payload.name, vote.payload.score_value, vote.payload.response_id, vote.turn_id) == ("user_score", 1.0, "ls-1", "ls-1")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "hi"}], "hi"),
        ([{"type": "human", "content": "hi"}, {"type": "ai", "content": "x"}], "hi"),
        ([[{"id": ["langchain", "HumanMessage"], "kwargs": {"content": [{"type": "text", "text": "hi"}]}}]], "hi"),
        ([{"type": "human", "data": {"content": "hi"}}], "hi"),
        ([["system", "be kind"], ["human", "hi"]], "hi"),
        ([{"role": "system", "content": "x"}], None),
    ],
)
def test_langsmith_messages_in_every_form(tmp_path: Path, messages: list[Any], said: str | None) -> None:
    run = {
        "id": "a", "trace_id": "t", "run_type": "llm", "start_time": 1_764_000_000_000, "end_time": 1_764_000_001_000,
        "inputs": {"messages": messages},
    }  # fmt: skip
    (tmp_path / "runs.json").write_text(json.dumps({"runs": [run]}))
    events, _ = imported(langsmith, tmp_path / "runs.json")
    assert by_type(events, "turn_started")[0].payload.message == said
    assert by_type(events, "completion")[0].payload.duration_ms == 1_000.0


def test_a_langsmith_run_as_its_sdk_prints_it_has_times_with_a_space_and_cached_tokens(tmp_path: Path) -> None:
    run = {
        "id": "a", "trace_id": "t", "run_type": "llm", "start_time": "2026-02-16 01:35:18.500000", "end_time": "2026-02-16 01:35:20.000000",
        "prompt_tokens": 90, "completion_tokens": 7, "prompt_token_details": {"audio": 0, "cache_read": 64}, "feedback_stats": None,
        "child_runs": None, "inputs": {"messages": [{"type": "human", "content": "hi", "additional_kwargs": {}}]},
        "extra": {"metadata": {"thread_id": "th", "ls_model_name": "m"}},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run, indent=2))
    assert registry.recognise(sniffing.look(tmp_path / "run.json")) == "langsmith"
    events, _ = imported(langsmith, tmp_path / "run.json")
    call = by_type(events, "completion")[0]
    assert (call.session_id, call.payload.cached_tokens, call.payload.duration_ms) == ("th", 64, 1_500.0)
    assert by_type(events, "turn_started")[0].payload.message == "hi"


GENERATION = {
    "generation_info": {"finish_reason": "tool_calls"}, "text": "", "type": "ChatGeneration",
    "message": {"kwargs": {"usage_metadata": {"input_tokens": 231, "output_tokens": 73, "input_token_details": {"cache_read": 217}}}},
}  # fmt: skip
NOTED = {"input_tokens": 231, "output_tokens": 73, "input_token_details": {"cache_read": 217}}
CHOICE = {"finish_reason": {"index": 0, "delta": {}, "finish_reason": "tool_calls"}}


@pytest.mark.parametrize(
    "told",
    [
        {"outputs": {"generations": [[GENERATION]], "llm_output": {"token_usage": {"prompt_tokens": 1}}}},
        {"outputs": {"choices": [CHOICE], "usage_metadata": NOTED}},
        {"outputs": {"choices": [{"finish_reason": "tool_calls"}]}, "extra": {"metadata": {"usage_metadata": NOTED}}},
        {"outputs": {"generations": [[{"generation_info": {"finish_reason": "tool_use"}}]]}, "token_usage": {"prompt_tokens": 231,
         "completion_tokens": 73}, "prompt_token_details": {"cache_read": 217}},
    ],
)  # fmt: skip
def test_a_langsmith_run_without_tokens_of_its_own_has_those_that_its_program_noted(tmp_path: Path, told: dict[str, Any]) -> None:
    run = {"id": "a", "trace_id": "t", "run_type": "llm", "start_time": "2026-02-16T01:35:18", "end_time": "2026-02-16T01:35:20"}
    (tmp_path / "runs.json").write_text(json.dumps([run | told]))
    events, _ = imported(langsmith, tmp_path / "runs.json")
    call = by_type(events, "completion")[0].payload
    assert (call.prompt_tokens, call.response_tokens, call.cached_tokens, call.finish_reason) == (231, 73, 217, "tool_calls")


def test_a_download_of_langsmith_runs_is_turns_of_a_thread_whose_root_may_come_last(tmp_path: Path) -> None:
    def turn(number: int) -> list[dict[str, Any]]:
        root, at = f"root-{number}", f"2026-05-01T10:0{number}"
        thread = {"extra": {"metadata": {"thread_id": "th"}}, "trace_id": root, "error": None, "feedback": [], "tags": []}
        llm = {"id": f"llm-{number}", "parent_run_id": root, "name": "ChatModel", "run_type": "llm", "inputs": {"messages": [[
            {"id": ["schema", "SystemMessage"], "kwargs": {"content": "be brief", "type": "system"}},
            {"id": ["schema", "HumanMessage"], "kwargs": {"content": f"question {number}, with notes", "type": "human"}},
        ]]}, "outputs": {"generations": [[GENERATION]]}, "start_time": f"{at}:01+00:00", "end_time": f"{at}:03+00:00"}  # fmt: skip
        asked = {"messages": [{"type": "human", "content": f"question {number}"}]}
        whole = {"id": root, "parent_run_id": None, "name": "agent", "run_type": "chain", "inputs": asked, "outputs": {},
                 "start_time": f"{at}:00+00:00", "end_time": f"{at}:09+00:00"}  # fmt: skip
        votes = [{"key": "helpful", "score": True, "value": None, "comment": "key AKIAABCDEFGHIJKLMNOP"}, {"key": "mood", "value": "calm"}]
        return [llm | thread, whole | thread | {"feedback": [*votes, {"key": "empty", "score": None, "value": None}]}]

    path = tmp_path / "traces.json"
    path.write_text(json.dumps([*turn(2), *turn(1)], indent=2))
    assert registry.recognise(sniffing.look(path)) == "langsmith"
    events, counts = imported(langsmith, path)
    assert {event.session_id for event in events} == {"th"}
    places = {event.payload.message: (event.payload.turn_index, event.turn_id) for event in by_type(events, "turn_started")}
    assert places == {"question 1": (0, "root-1"), "question 2": (1, "root-2")}
    judged = [event.payload for event in by_type(events, "evaluation") if event.turn_id == "root-1"]
    assert [(item.name, item.score_value, item.score_label, item.explanation) for item in judged] == [
        ("helpful", 1.0, None, "key <redacted:aws_key>"), ("mood", None, "calm", None),
    ]  # fmt: skip
    assert counts["rejected"] == {"not_a_session_event:invoke_agent": 2}


def test_langsmith_runs_in_the_words_of_its_command_line_and_of_its_newer_interface(tmp_path: Path) -> None:
    times = {"start_time": "2026-02-15T19:16:45.290780Z", "end_time": "2026-02-15T19:16:46.683732Z", "parent_run_id": None}
    run = {"run_id": "a", "trace_id": "t", "name": "Chat", "run_type": "LLM", "status": "success", "duration_ms": 1392} | times
    noted = {"custom_metadata": {"ls_model_name": "m", "thread_id": "th"}, "token_usage": {"prompt_tokens": 516, "completion_tokens": 61}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"trace_id": "t", "run_count": 1, "runs": [run | noted]}, indent=2))
    assert registry.recognise(sniffing.look(path)) == "langsmith"
    call = by_type(imported(langsmith, path)[0], "completion")[0]
    assert (call.session_id, call.payload.model, call.payload.prompt_tokens, call.payload.response_tokens) == ("th", "m", 516, 61)


@pytest.mark.parametrize("first", ["id", "name", "run_id", "inputs"])
def test_langsmith_runs_longer_than_a_head_are_recognised_and_reports_about_runs_are_not(tmp_path: Path, first: str) -> None:
    run = {first: "a", "id": "a", "run_type": "chain", "start_time": "2026-02-15T19:16:45", "outputs": "x" * 70_000}
    path = tmp_path / "runs.json"
    for whole in ([run], {"trace_id": "t", "run_count": 1, "runs": [run]}, {"rule_id": "r", "start_time": "t", "runs": [run]}):
        path.write_text(json.dumps(whole, indent=2))
        assert registry.recognise(sniffing.look(path)) == "langsmith"
    path.write_text(json.dumps({"status": "passed", "checks": [{"first_match": {"run_type": "chain"}}]}, indent=2))
    assert registry.recognise(sniffing.look(path)) is None


def test_a_batch_that_a_langsmith_client_sends_is_its_runs_finished(tmp_path: Path) -> None:
    own = "0f0e0d0c-0b0a-4908-8706-050403020100"
    order = {"dotted_order": f"20260301T080000000000Z{own}", "trace_id": own}
    begun = {"id": own, "name": "Chat", "run_type": "llm", "start_time": 1_764_000_000_000, "inputs": {"messages": [
        {"role": "user", "content": "hi"}]}, "outputs": None}  # fmt: skip
    ended = {"end_time": 1_764_000_000_800, "outputs": {"choices": [{"finish_reason": "stop"}], "usage_metadata": NOTED}, "inputs": None}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({"post": [begun | order], "patch": [ended | order]}))
    assert registry.recognise(sniffing.look(path)) == "langsmith"
    events, counts = imported(langsmith, path)
    call = by_type(events, "completion")[0].payload
    assert (call.completion_id, call.duration_ms, call.prompt_tokens, counts["lines"]) == (own, 800.0, 231, 1)
    assert by_type(events, "turn_started")[0].payload.message == "hi"
    path.write_text(json.dumps({"post": [begun | order], "patch": []}))
    assert by_type(imported(langsmith, path)[0], "completion")[0].payload.duration_ms is None


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ({"type": "tool", "status": "success", "content": "Error 404 is what the page says", "tool_call_id": "k"}, "ok"),
        ({"type": "tool", "status": "error", "content": "Error: 2 validation errors for Args", "tool_call_id": "k"}, "invalid_arguments"),
        ({"kwargs": {"status": "error", "content": "Error: gerp is not a valid tool, try grep.", "tool_call_id": "k"}}, "unknown_tool"),
        ({"kwargs": {"status": "error", "content": [{"type": "text", "text": "x"}], "tool_call_id": "k"}}, "unexpected_environment"),
    ],
)
def test_a_failure_that_a_langsmith_tool_answers_is_a_failed_call(tmp_path: Path, output: dict[str, Any], verdict: str) -> None:
    run = {"id": "a", "trace_id": "t", "run_type": "tool", "name": "grep", "start_time": "2026-02-16T01:35:18", "error": None}
    (tmp_path / "runs.jsonl").write_text(json.dumps(run | {"end_time": "2026-02-16T01:35:19", "outputs": {"output": output}}))
    events, _ = imported(langsmith, tmp_path / "runs.jsonl")
    result = by_type(events, "tool_result")[0].payload
    assert (result.result_class, result.tool_call_id) == (verdict, "k")


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"n": 2, "avg": 0.5, "values": {}}, [(0.5, None)]),
        ({"n": 0, "avg": None, "values": {"CALM": 1, "ANGRY": 3}}, [(None, "ANGRY")]),
        ({"n": 0, "avg": None, "values": {}}, []),
    ],
)
def test_langsmiths_feedback_is_a_mean_or_its_commonest_word(
    tmp_path: Path, stats: dict[str, Any], expected: list[tuple[object, object]]
) -> None:
    run = {"id": "a", "trace_id": "t", "run_type": "chain", "start_time": "2026-02-16T01:35:18", "feedback_stats": {"mood": stats}}
    (tmp_path / "runs.json").write_text(json.dumps([run | {"inputs": {}}]))
    events, counts = imported(langsmith, tmp_path / "runs.json")
    assert [(event.payload.score_value, event.payload.score_label) for event in by_type(events, "evaluation")] == expected
    assert not [reason for reason in counts["rejected"] if reason.startswith("missing")]


@pytest.mark.parametrize("module", [langfuse, langsmith])
def test_lists_pages_and_lines_are_read_alike_and_told_apart(module: ModuleType, tmp_path: Path) -> None:
    name = module.__name__.rpartition(".")[2]
    entries = [json.loads(line) for line in module.SAMPLE.read_text().splitlines()]
    usual, _ = imported(module, module.SAMPLE)
    member = "data" if module is langfuse else "runs"
    for file, text in {
        "list.json": json.dumps(entries), "page.json": json.dumps({member: entries}), "pretty.json": json.dumps(entries, indent=2),
        "twice.jsonl": "\n".join(json.dumps(entry) for entry in entries * 2),
    }.items():  # fmt: skip
        (tmp_path / file).write_text(text)
        events, counts = imported(module, tmp_path / file)
        assert events == usual, file
        assert counts["lines"] == counts["accepted"] + counts["duplicates"] + sum(counts["rejected"].values())
        assert registry.recognise(sniffing.look(tmp_path / file)) == name, file


@pytest.mark.parametrize("module", [langfuse, langsmith, otlp])
def test_no_file_of_one_kind_is_taken_for_another(module: ModuleType) -> None:
    head = sniffing.look(module.SAMPLE)
    sniffers = {"langfuse": otlp_sniffing.langfuse, "langsmith": otlp_sniffing.langsmith, "otlp": otlp_sniffing.otlp}
    assert [name for name, sniff in sniffers.items() if sniff(head)] == [module.__name__.rpartition(".")[2]]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=15),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([
    "id", "traceId", "trace_id", "type", "run_type", "startTime", "endTime", "start_time", "end_time", "timestamp", "observations",
    "scores",
    "value", "stringValue", "name", "input", "inputs", "outputs", "usage", "usageDetails", "modelParameters", "extra", "feedback_stats",
    "child_runs", "error", "level", "sessionId", "post", "patch", "feedback", "run_id",
    "token_usage", "custom_metadata", "thread_id", "completionStartTime", "prompt_tokens", "observationId", "comment",
])  # fmt: skip
WHOLE = st.fixed_dictionaries({
    "id": st.just("a"), "traceId": st.just("t"), "trace_id": st.just("t"), "type": st.sampled_from(["GENERATION", "TOOL"]),
    "run_type": st.sampled_from(["llm", "tool"]), "startTime": st.just("2026-01-01T00:00:00Z"),
    "start_time": st.just("2026-01-01T00:00:00"),
})  # fmt: skip


@given(VALUES | st.tuples(WHOLE, st.dictionaries(FIELDS, VALUES, max_size=5)).map(lambda both: both[0] | both[1]))
def test_whatever_an_entry_holds_it_becomes_valid_events_or_a_reason(entry: object) -> None:
    for module in (langfuse, langsmith):
        translator = otlp.Translator(source())
        for item in module.signals(entry):
            assert isinstance(item, Signal | Fault)
            if isinstance(item, Signal):
                translator.learn(item)
                for event in translator.taken(item).events:
                    assert decode(encode(event), 10**7) == event
