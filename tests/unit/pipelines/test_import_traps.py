"""Traps of foreign transcripts, one test each: copies, forks, subagents, old shapes, several files of one session."""

import json
from pathlib import Path
from typing import Any

from pipelines.events import ResultClass
from tests.unit.pipelines.test_import_formats import FILES, SAMPLES, of, run, tokens


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def codex_line(second: int, kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": f"2026-02-03T09:00:{second:02d}.000Z", "type": kind, "payload": payload}


def said(second: int, text: str) -> list[dict[str, Any]]:
    content = [{"type": "input_text", "text": text}]
    return [
        codex_line(second, "response_item", type="message", role="user", content=content),
        codex_line(second, "event_msg", type="user_message", message=text),
    ]


def answered(second: int, text: str) -> dict[str, Any]:
    return codex_line(second, "response_item", type="message", role="assistant", content=[{"type": "output_text", "text": text}])


def test_a_codex_fork_repeats_its_ancestor_with_new_times_and_only_its_own_lines_are_events(tmp_path: Path) -> None:
    first = [*said(1, "fix the bug"), answered(2, "done"), *said(3, "continue"), answered(4, "more")]
    again = [row | {"timestamp": "2026-02-03T10:00:00.000Z"} for row in first]
    one = lines(tmp_path / "rollout-a.jsonl", codex_line(0, "session_meta", id="a"), *first)
    two = lines(
        tmp_path / "rollout-b.jsonl",
        codex_line(0, "session_meta", id="b", forked_from_id="a"),
        codex_line(0, "session_meta", id="a"),
        *again,
        *said(30, "continue"),
        answered(31, "again"),
    )
    events, counts = run("codex", one, two)
    assert counts["duplicates"] == 6
    assert [(event.session_id, event.payload.message) for event in events if event.type == "turn_started"] == [
        ("a", "fix the bug"), ("a", "continue"), ("b", "continue"),
    ]  # fmt: skip
    assert counts["events"]["completion"] == 3
    alone, counts = run("codex", two)
    assert counts["duplicates"] == 0
    assert counts["events"]["turn_started"] == 3
    assert len(of(alone, "completion")) == 3


def test_a_codex_user_event_may_come_before_its_item_and_the_same_words_later_are_another_turn(tmp_path: Path) -> None:
    rows = [*reversed(said(1, "go on")), answered(2, "x"), *said(3, "go on"), answered(4, "y")]
    _, counts = run("codex", lines(tmp_path / "rollout-a.jsonl", codex_line(0, "session_meta", id="a"), *rows))
    assert counts["events"]["turn_started"] == 2
    assert counts["rejected"]["not_a_session_event:repeated_user_message"] == 2


def test_a_codex_subagents_prompt_is_no_persons(tmp_path: Path) -> None:
    meta = codex_line(0, "session_meta", id="a", source={"subagent": {"thread_spawn": {"parent_thread_id": "p"}}})
    events, counts = run("codex", lines(tmp_path / "rollout-a.jsonl", meta, *said(1, "review this"), answered(2, "ok")))
    assert of(events, "turn_started") == []
    assert counts["rejected"]["not_a_session_event:sidechain_prompt"] == 1
    assert counts["events"]["completion"] == 1


def test_the_first_codex_versions_wrote_items_bare_and_one_time(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "rollout-2025-06-01T10-00-00-x.jsonl",
        {"id": "old", "timestamp": "2025-06-01T10:00:00.000Z", "instructions": None, "git": {}},
        {"record_type": "state"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>x</environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": '{"output": "a", "metadata": {"exit_code": 0, "duration_seconds": 0.1}}',
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    )
    events, counts = run("codex", path)
    assert {event.session_id for event in events} == {"old"}
    assert [t.message for t in of(events, "turn_started")] == ["list files"]
    assert [c.name for c in of(events, "tool_call")] == ["shell"]
    assert (counts["events"]["completion"], of(events, "tool_result")[0].result_class) == (2, ResultClass.OK)
    assert counts["accepted"] == 4


def test_codex_usage_written_before_its_items_belongs_to_the_reply_that_follows(tmp_path: Path) -> None:
    def usage(second: int, total: int) -> dict[str, Any]:
        info = {"total_token_usage": {"total_tokens": total}, "last_token_usage": {"input_tokens": total, "output_tokens": 1}}
        return codex_line(second, "event_msg", type="token_count", info=info)

    def call(second: int, name: str) -> list[dict[str, Any]]:
        return [
            codex_line(second, "response_item", type="function_call", name="shell", arguments="{}", call_id=name),
            codex_line(second, "response_item", type="function_call_output", call_id=name, output="ok"),
        ]

    rows = [*said(1, "go"), usage(2, 10), *call(3, "a"), usage(4, 20), *call(5, "b"), usage(6, 30), answered(7, "done"), *said(8, "thanks")]
    events, _ = run("codex", lines(tmp_path / "rollout-a.jsonl", codex_line(0, "session_meta", id="a"), *rows))
    assert tokens(events) == [(10, 1, 0), (20, 1, 0), (30, 1, 0)]


def test_a_gemini_session_that_was_resumed_into_lines_repeats_its_messages_once(tmp_path: Path) -> None:
    head = {"sessionId": "s", "projectHash": "p", "startTime": "2026-02-03T10:00:00Z", "lastUpdated": "2026-02-03T10:00:00Z"}
    old = [
        {"id": "1", "timestamp": "2026-02-03T10:00:01Z", "type": "user", "content": "hello there"},
        {"id": "2", "timestamp": "2026-02-03T10:00:02Z", "type": "gemini", "content": "hi", "tokens": {"input": 5, "output": 1}},
    ]
    first = tmp_path / "session-x.json"
    first.write_text(json.dumps(head | {"messages": old}, indent=2))
    new = {"id": "3", "timestamp": "2026-02-03T11:00:00Z", "type": "user", "content": "and now?"}
    events, counts = run("gemini-cli", first, lines(tmp_path / "session-x.jsonl", head, *old, new))
    assert {event.session_id for event in events} == {"s"}
    assert [t.message for t in of(events, "turn_started")] == ["hello there", "and now?"]
    assert [t.turn_index for t in of(events, "turn_started")] == [0, 1]
    assert tokens(events) == [(5, 1, 0)]
    assert counts["duplicates"] == 2


def test_a_gemini_subagents_prompt_is_no_persons(tmp_path: Path) -> None:
    head = {"sessionId": "s", "projectHash": "p", "kind": "subagent"}
    user = {"id": "1", "timestamp": "2026-02-03T10:00:01Z", "type": "user", "content": "look into it"}
    _, counts = run("gemini-cli", lines(tmp_path / "s.jsonl", head, user))
    assert counts["rejected"] == {"not_a_session_event:metadata": 1, "not_a_session_event:sidechain_prompt": 1}


def v1(folder: Path, number: int, kind: str, **fields: Any) -> Path:
    event = {"id": f"e{number}", "timestamp": f"2026-02-03T11:00:{number:02d}.000000", **fields, "kind": kind}
    path = folder / f"event-{number:05d}-e{number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(event))
    return path


def test_openhands_events_of_version_one_are_one_conversation_over_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "conv-1" / "events"
    call = {"id": "c1", "name": "file_editor", "arguments": '{"command": "str_replace"}'}
    edit = {"kind": "FileEditorAction", "command": "str_replace", "path": "/r/a.py", "old_str": "a\nb", "new_str": "a\nB\nc"}
    agent = {"source": "agent", "tool_name": "file_editor"}
    shown = {"kind": "FileEditorObservation", "content": [{"text": "edited"}]}
    files = [
        v1(folder, 0, "SystemPromptEvent", source="agent", system_prompt={"text": "x"}),
        v1(folder, 1, "MessageEvent", source="user", llm_message={"role": "user", "content": [{"type": "text", "text": "do it"}]}),
        v1(folder, 2, "ActionEvent", **agent, action=edit, tool_call_id="c1", tool_call=call, llm_response_id="r"),
        v1(folder, 3, "ObservationEvent", source="environment", observation=shown, tool_call_id="c1", action_id="e2"),
        v1(folder, 4, "ActionEvent", source="agent", action={"kind": "TerminalAction", "command": "ls"}, tool_name="terminal",
           tool_call_id="c2", tool_call={"id": "c2", "name": "terminal", "arguments": "{"}, llm_response_id="r"),
        v1(folder, 5, "AgentErrorEvent", source="agent", error="Error validating args: missing required field", tool_call_id="c2"),
        v1(folder, 6, "ActionEvent", source="agent", action={"kind": "TerminalAction", "command": "rm"}, tool_name="terminal",
           tool_call_id="c3", tool_call={"id": "c3", "name": "terminal", "arguments": "{}"}, llm_response_id="r2"),
        v1(folder, 7, "UserRejectObservation", source="environment", rejection_reason="no", tool_call_id="c3", action_id="e6"),
        v1(folder, 8, "PauseEvent", source="user"),
    ]  # fmt: skip
    events, counts = run("openhands", *files)
    assert counts["events"] == {
        "session_started": 1, "session_ended": 1, "turn_started": 1, "completion": 2, "tool_call": 3, "tool_result": 3,
        "edit_proposed": 1, "edit_decided": 1, "interrupted": 1,
    }  # fmt: skip
    assert {event.session_id for event in events} == {"conv-1"}
    assert [r.result_class for r in of(events, "tool_result")] == [
        ResultClass.OK, ResultClass.INVALID_ARGUMENTS, ResultClass.USER_ABORTED,
    ]  # fmt: skip
    assert [c.arguments_valid for c in of(events, "tool_call")] == [True, False, True]
    edited = of(events, "edit_proposed")[0]
    assert (edited.lines_added, edited.lines_removed, edited.path_hash) == (2, 1, "path:/r/a.py")


def test_a_copy_of_a_file_is_all_duplicates_in_formats_whose_records_can_be_recognised(tmp_path: Path) -> None:
    for name in ("claude-code", "codex", "gemini-cli", "openhands", "continue", "aider", "aider-analytics"):
        once, counts = run(name, SAMPLES / FILES[name])
        copy = tmp_path / FILES[name]
        copy.write_bytes((SAMPLES / FILES[name]).read_bytes())
        twice, both = run(name, SAMPLES / FILES[name], copy)
        kinds = ("turn_started", "completion", "tool_call", "tool_result", "edit_proposed", "edit_decided", "feedback", "test_run")
        assert [len(of(twice, kind)) for kind in kinds] == [len(of(once, kind)) for kind in kinds], name
        assert both["duplicates"] > counts["duplicates"], name
        assert both["lines"] == 2 * counts["lines"]


def test_an_aider_file_stripped_of_trailing_spaces_is_read_and_an_undo_without_its_commit_undoes_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".aider.chat.history.md"
    path.write_text(
        "# aider chat started at 2026-02-03 13:00:00\n\n> Aider v0.50.0\n\n#### fix it\n\nSure.\n\n> Tokens: 1k sent, 2 received.\n"
        "> Applied edit to a.py\n\n#### /undo\n\n> Removed: abcdef1 something\n"
    )
    events, counts = run("aider", path)
    assert [t.message for t in of(events, "turn_started")] == ["fix it"]
    assert [d.decision for d in of(events, "edit_decided")] == ["accepted"]
    assert tokens(events) == [(1000, 2, 0)]
    assert counts["lines"] == 8


def test_a_line_of_a_hundred_kilobytes_is_a_line_like_any_other(tmp_path: Path) -> None:
    output = json.dumps({"output": "x" * 100_000, "metadata": {"exit_code": 0}})
    rows = [
        codex_line(1, "response_item", type="function_call", name="shell", arguments="{}", call_id="c"),
        codex_line(2, "response_item", type="function_call_output", call_id="c", output=output),
    ]
    events, _ = run("codex", lines(tmp_path / "rollout-a.jsonl", codex_line(0, "session_meta", id="a"), *rows))
    assert of(events, "tool_result")[0].output_bytes == 100_000
