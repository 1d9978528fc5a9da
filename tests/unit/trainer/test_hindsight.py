"""Hindsight: the next message's tokens are found as they were served, and what they change is bounded."""

from datetime import UTC, datetime

import numpy as np
import pytest

from trainer import hindsight
from trainer.packing import reply_row
from trainer.selection import Row


def row(name: str, *, turn: int, prompt: list[int], response: list[int], session: str = "s") -> Row:
    return Row(
        completion_id=name, session_id=session, turn_id=f"t{turn}", turn_index=turn, user_key="u", task_bucket=None, language=None,
        policy_version=1, served_at=datetime(2026, 1, 1, tzinfo=UTC), prompt_ids=np.asarray(prompt), response_ids=np.asarray(response),
        mu=np.zeros(len(response), np.float32), temperature=1.0, reward=0.0, reward_version=None,
    )  # fmt: skip


def test_a_turns_completions_share_the_message_that_follows_its_last():
    rows = [
        row("a", turn=0, prompt=[1, 2], response=[3]),
        row("b", turn=0, prompt=[1, 2, 3, 9], response=[4, 5]),
        row("c", turn=1, prompt=[1, 2, 3, 9, 4, 5, 7, 8], response=[6]),
    ]
    found = hindsight.hints(rows)
    assert {name: ids.tolist() for name, ids in found.items()} == {"a": [7, 8], "b": [7, 8]}


def test_a_turn_whose_next_prompt_is_another_text_has_no_hint():
    rows = [row("a", turn=0, prompt=[1], response=[2]), row("b", turn=1, prompt=[1, 3, 4], response=[5]),
            row("x", turn=1, prompt=[1, 2, 9], response=[5], session="another")]  # fmt: skip
    assert hindsight.hints(rows) == {}


def test_a_hinted_row_keeps_its_response_and_puts_the_message_before_it():
    made = hindsight.hinted(reply_row(np.asarray([1, 2]), np.asarray([3, 4]), temperature=0.7, group="g"), np.asarray([8, 9]))
    assert (made.prompt_ids.tolist(), made.response_ids.tolist(), made.trained.tolist()) == ([1, 2, 8, 9], [3, 4], [4, 5])
    assert (made.temperature, made.group) == (0.7, "")


def test_terms_are_the_clipped_difference_times_the_weight():
    found = hindsight.terms(np.asarray([-1.0, -2.0, -0.5]), np.asarray([-0.5, -5.0, -0.5]), weight=0.2, clip=1.0)
    assert found.tolist() == pytest.approx([0.1, -0.2, 0.0])
