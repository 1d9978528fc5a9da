"""Imported sessions say which commands destroy something and which last words decline or ask, without keeping the texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pipelines.test_import_formats import of, run

COMMAND, REFUSAL = "rm -rf src", "I'm sorry, but I can't help with that."
AT = "2026-02-03T10:00:{:02}.000Z"


def lines(*entries: dict[str, Any]) -> str:
    return "\n".join(json.dumps(entry) for entry in entries) + "\n"


def claude() -> str:
    def line(number: int, kind: str, message: dict[str, Any]) -> dict[str, Any]:
        return {"uuid": f"u{number}", "sessionId": "s", "timestamp": AT.format(number), "type": kind, "message": message}

    call = {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": COMMAND}}
    return lines(
        line(1, "user", {"role": "user", "content": "Remove everything"}),
        line(2, "assistant", {"id": "m1", "role": "assistant", "content": [{"type": "text", "text": REFUSAL}, call]}),
        line(3, "assistant", {"id": "m2", "role": "assistant", "content": [{"type": "text", "text": REFUSAL}]}),
    )


def codex() -> str:
    def item(number: int, **payload: Any) -> dict[str, Any]:
        return {"timestamp": AT.format(number), "type": "response_item", "payload": payload}

    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": REFUSAL}]}
    arguments = json.dumps({"command": ["bash", "-lc", COMMAND]})
    return lines(
        {"timestamp": AT.format(0), "type": "session_meta", "payload": {"id": "s"}},
        item(1, type="message", role="user", content=[{"type": "input_text", "text": "Remove everything"}]),
        item(2, **said), item(3, type="function_call", name="shell", call_id="c", arguments=arguments),
        item(4, type="function_call_output", call_id="c", output="ok"), item(5, **said),
    )  # fmt: skip


def gemini() -> str:
    call = {"id": "c", "name": "run_shell_command", "args": {"command": COMMAND}, "status": "success", "result": []}
    return lines(
        {"sessionId": "s"}, {"id": "u", "timestamp": AT.format(1), "type": "user", "content": "Remove everything"},
        {"id": "g1", "timestamp": AT.format(2), "type": "gemini", "content": REFUSAL, "toolCalls": [call]},
        {"id": "g2", "timestamp": AT.format(3), "type": "gemini", "content": REFUSAL},
    )  # fmt: skip


def openhands() -> str:
    message = {"action": "message", "timestamp": AT.format(1)}
    return json.dumps([
        {"id": 1, "source": "user", **message, "args": {"content": "Remove everything"}},
        {"id": 2, "source": "agent", "action": "run", "timestamp": AT.format(2), "args": {"command": COMMAND, "thought": REFUSAL},
         "tool_call_metadata": {"function_name": "execute_bash", "tool_call_id": "c"}},
        {"id": 3, "source": "agent", **message, "args": {"content": REFUSAL}},
    ])  # fmt: skip


def continued() -> str:
    common = {"schema": "0.2.0", "userId": "u"}
    call = {"toolCallId": "c", "functionName": "builtin_run_terminal_command", "toolCallArgs": json.dumps({"command": COMMAND})}
    chat = {"prompt": "<user>\nRemove everything", "completion": REFUSAL, "sessionId": "s"}
    return lines(
        {"eventName": "toolUsage", "timestamp": AT.format(1), **call, "accepted": True, "succeeded": True, **common},
        {"eventName": "chatInteraction", "timestamp": AT.format(2), **chat, **common},
    )


def aider() -> str:
    return (
        "\n# aider chat started at 2026-02-03 13:00:00\n\n#### remove everything  \n\n" + REFUSAL
        + "\n\n> Tokens: 1k sent, 10 received.  \n> Running rm -rf src  \n"
    )  # fmt: skip


def swe_agent() -> str:
    return json.dumps({"trajectory": [{"action": COMMAND, "observation": "", "response": ""}], "history": [], "info": {}})


FORMATS: dict[str, tuple[str, Callable[[], str]]] = {
    "claude-code": ("s.jsonl", claude), "codex": ("rollout-s.jsonl", codex), "gemini-cli": ("session-s.jsonl", gemini),
    "openhands": ("s.json", openhands), "continue": ("s.jsonl", continued), "aider": ("s.md", aider),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_destructive_command_and_a_refusal_are_told_and_their_texts_are_not(name: str, tmp_path: Path) -> None:
    file, write = FORMATS[name]
    (tmp_path / file).write_text(write(), encoding="utf-8")
    events, _ = run(name, tmp_path / file)
    assert [call.destructive for call in of(events, "tool_call")] == [True]
    said = [(reply.refused, reply.ends_in_question) for reply in of(events, "completion")]
    assert said[-1] == (True, False)
    assert set(said[:-1]) <= {(None, None)}  # a reply that calls a tool is no last word
    kept = [value for event in events for value in event.payload.model_dump(exclude={"arguments_hash"}).values() if isinstance(value, str)]
    assert not any(COMMAND in value or "can't help" in value for value in kept)


def test_an_action_of_swe_agent_is_its_command(tmp_path: Path) -> None:
    (tmp_path / "s.traj").write_text(swe_agent(), encoding="utf-8")
    events, _ = run("swe-agent", tmp_path / "s.traj")
    assert [call.destructive for call in of(events, "tool_call")] == [True]


def test_a_call_that_runs_no_command_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text(claude().replace('"Bash"', '"Read"'), encoding="utf-8")
    events, _ = run("claude-code", tmp_path / "s.jsonl")
    assert [call.destructive for call in of(events, "tool_call")] == [None]
