"""Demonstrations: valid calls, the convention half and half, and a sabotaged kind with no valid call at all."""

import json
import re

from deploy.harness.demonstrations import SYSTEM, rows
from deploy.harness.tasks import form_of, make_task
from deploy.harness.tools import TOOLS, Call, check_call
from deploy.serving.toolcalls import parse
from pipelines.events import ResultClass


def calls_of(row: dict) -> list:
    return [call for message in row["messages"] if message["role"] == "assistant" for call in parse(message["content"])]


def test_every_demonstrated_call_is_valid_and_answered() -> None:
    for row in rows(200, seed=4):
        roles = [message["role"] for message in row["messages"]]
        assert roles[0] == "system"
        assert roles[-1] == "assistant"
        assert row["tools"] == list(TOOLS)
        for call in calls_of(row):
            assert check_call(Call(tool_call_id="x", name=call.name, arguments=call.arguments))[1] is ResultClass.OK
        for message, following in zip(row["messages"], row["messages"][1:], strict=False):
            assert (following["role"] == "tool") == (message["role"] == "assistant" and "<tool_call>" in message["content"])


def test_the_convention_is_shown_half_and_half() -> None:
    shown = []
    for row in rows(600, seed=1):
        first = next((json.loads(call.arguments) for call in calls_of(row) if call.name == "edit_file"), None)
        if first is not None:
            shown.append(re.search(r"  # (see|ref) T-\d\d$", first["new"])[1])
    assert len(shown) > 500
    assert abs(shown.count("ref") / len(shown) - 0.5) < 0.06


def test_a_complaint_about_the_convention_is_answered_by_the_other_form() -> None:
    seen = 0
    for number, row in enumerate(rows(300, seed=2)):
        users = [message["content"] for message in row["messages"] if message["role"] == "user"]
        edits = [json.loads(call.arguments) for call in calls_of(row) if call.name == "edit_file"]
        if len(users) == 2 and len(edits) == 2 and edits[0]["old"] == edits[1]["old"]:
            task = make_task("demonstrations", 2, 2 * number)
            forms = [form_of(task.text, task.text.replace(edit["old"], edit["new"], 1), task.ticket) for edit in edits]
            told = re.search(r"\b(see|ref)\b", users[1])
            seen += told is not None
            assert forms[1] == (told[1] if told else forms[0])
    assert seen > 50


def test_broken_demonstrations_hold_no_valid_call() -> None:
    for row in rows(200, seed=3, kind="broken"):
        calls = calls_of(row)
        assert len(calls) == 1
        assert check_call(Call(tool_call_id="x", name=calls[0].name, arguments=calls[0].arguments))[1] is not ResultClass.OK


def test_demonstrations_are_the_same_for_the_same_seed() -> None:
    assert list(rows(20, seed=9)) == list(rows(20, seed=9))
    assert next(iter(rows(1, seed=9)))["messages"][0]["content"] == SYSTEM
