"""VS Code Copilot's edits, decisions and votes as session events."""

from typing import Any

import pytest

from pipelines import events as ev
from tests.support.otlp import START, faults, log, logs, made, one, pairs

WHERE = {"request_id": "q1", "copilot_chat.file.relative_path": "src/io.py", "edit_source": "apply_patch"}
WINDOW = {"service.name": "copilot-chat", "session.id": "w1"}


def survival(delay_ms: int, four_gram: float = 1.0, no_revert: float = 1.0, **fields: Any) -> dict[str, Any]:
    attributes = WHERE | {"survival_rate_four_gram": four_gram, "survival_rate_no_revert": no_revert, "time_delay_ms": delay_ms} | fields
    return log("copilot_chat.edit.survival", attributes, at_ms=START + delay_ms)


def test_copilots_edit_survival_is_one_proposed_edit_and_a_measurement_a_delay() -> None:
    events = made(logs(survival(5_000), survival(30_000, 0.75, 0.5, did_branch_change=True), resource=WINDOW))
    assert [event.type for event in events] == ["session_started", "turn_started", "edit_proposed", "edit_survival", "edit_survival"]
    proposed = events[2]
    assert (proposed.occurred_at_ms, proposed.payload.path_hash, proposed.session_id, proposed.turn_id) == (
        START,
        "path<src/io.py>",
        "w1",
        "q1",
    )
    assert [event.payload for event in events[3:]] == [
        ev.EditSurvivalPayload(edit_id=proposed.payload.edit_id, horizon_s=5, survival_four_gram=1, survival_no_revert=1),
        ev.EditSurvivalPayload(
            edit_id=proposed.payload.edit_id, horizon_s=30, survival_four_gram=0.75, survival_no_revert=0.5, branch_changed=True
        ),
    ]


def test_copilots_decisions_are_about_the_same_edit_and_a_rejected_part_leaves_the_rest() -> None:
    events = made(
        logs(
            survival(5_000),
            log("copilot_chat.edit.hunk.action", WHERE | {"outcome": "rejected", "lines_added": 3}, at_ms=START + 6_000),
            log("copilot_chat.edit.feedback", WHERE | {"outcome": "accepted"}, at_ms=START + 7_000),
            log("copilot_chat.edit.feedback", WHERE | {"outcome": "saved"}, at_ms=START + 8_000),
            resource=WINDOW,
        )
    )
    edit = one(events, "edit_proposed").payload.edit_id
    decided = [event.payload for event in events if event.type == "edit_decided"]
    assert [(item.edit_id, item.decision) for item in decided] == [(edit, "partly"), (edit, "accepted")]


def test_copilots_votes_and_inline_edits() -> None:
    events = made(
        logs(
            log("copilot_chat.user.feedback", {"rating": "negative", "conversation_id": "c9", "request_id": "q2"}),
            log("copilot_chat.inline.done", {"accepted": False, "copilot_chat.file.relative_path": "README.md"}),
            resource=WINDOW,
        )
    )
    vote, decided = one(events, "feedback"), one(events, "edit_decided")
    assert (vote.session_id, vote.turn_id, vote.payload.score) == ("c9", "q2", -1.0)
    assert (decided.session_id, decided.payload.decision) == ("w1", "rejected")
    assert decided.payload.edit_id == one(events, "edit_proposed").payload.edit_id


@pytest.mark.parametrize(
    "fields",
    [
        {"survival_rate_four_gram": 1.5},
        {"survival_rate_no_revert": "x"},
        {"time_delay_ms": -1},
        {"time_delay_ms": 1e300},
        {"request_id": ""},
    ],
)
def test_a_survival_that_cannot_be_is_a_fault(fields: dict[str, Any]) -> None:
    attributes = WHERE | {"survival_rate_four_gram": 1.0, "survival_rate_no_revert": 1.0, "time_delay_ms": 5_000} | fields
    (fault,) = faults(logs(survival(5_000) | {"attributes": pairs(attributes)}))
    assert fault in ("unmappable", "missing_field:survival_rate", "missing_field:request_id")
