"""Which turn each piece of evidence belongs to.

An edit's fate belongs to the turn that proposed the edit, however late it was decided; a user message judges the turn before
it; a tool call belongs to its own turn. So every piece of evidence is credited exactly once, and the credit of a session's turns adds up
to the session's evidence. Discounting across turns is the trainer's (`advantages.py`).

Takes: turns in order and evidence keyed by where it was seen. Gives: the same evidence keyed by the turn that earned it.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


def by_proposal(edits: Mapping[str, str | None], decided: Mapping[str, Sequence[Item]]) -> tuple[dict[str, dict[str, list[Item]]], int]:
    """Give what was seen of edits to the turns that proposed them.

    Args:
        edits: Edit id -> turn that proposed it, None when the proposal never arrived.
        decided: Edit id -> what was seen of it.

    Returns:
        Turn id -> edit id -> what was seen, and how many pieces belong to no turn.
    """
    credited: dict[str, dict[str, list[Item]]] = {}
    orphans = 0
    for edit_id in sorted({*edits, *decided}):
        turn_id = edits.get(edit_id)
        seen = list(decided.get(edit_id, ()))
        if turn_id is None:
            orphans += len(seen)
        else:
            credited.setdefault(turn_id, {})[edit_id] = seen
    return credited, orphans


def by_reply(turns: Sequence[str], messages: Mapping[str, Item]) -> dict[str, Item]:
    """Give each user message to the turn before it.

    Args:
        turns: Turn ids of one session in order.
        messages: Turn id -> the user message that opened it; turns whose opening never arrived are absent.

    Returns:
        Turn id -> the message that opened the turn right after it. The last turn has none.
    """
    return {turn: messages[after] for turn, after in pairwise(turns) if after in messages}
