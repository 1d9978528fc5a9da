"""Which turn each piece of evidence belongs to, and how much of what was said about a whole session each turn gets.

An edit's fate belongs to the turn that proposed the edit, however late it was decided; a user message judges the turn before it; a tool
call, a check and a score given to a turn belong to that turn. What was said about the session belongs to the turns that were open when it
was said, discounted by their distance from the last of them. So every piece is credited exactly once: the credit of a session's turns,
sum(mass value) over their pieces, adds up to the credit of all its evidence. (The trainer's discounted return across turns,
`advantages.py`, starts from there.)

Takes: turns in order and evidence keyed by where it was seen. Gives: the same evidence keyed by the turn that earned it, and shares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When a turn can be spoken about."""

    turn_id: str
    started_at_ms: int
    closes_at_ms: int


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


def shares(windows: Sequence[Window], at_ms: int, *, discount: float) -> dict[str, float]:
    """Share what was said about a session at one instant among the turns that were open then.

    The last of them gets 1, the one before `discount`, the one before `discount^2`, ..., all divided by their sum: what was said just after
    a turn is mostly about that turn. A turn that had not begun, or whose window had closed and whose reward is final, gets nothing.

    Args:
        windows: The session's turns in order.
        at_ms: When it was said.
        discount: In (0, 1].

    Returns:
        Turn id -> share in (0, 1]; the shares sum to 1, or there are none.
    """
    open_then = [window.started_at_ms <= at_ms <= window.closes_at_ms for window in windows]
    places = [place for place, is_open in enumerate(open_then) if is_open]
    if not places:
        return {}
    whole = 0.0
    for place in places:
        whole += math.pow(discount, places[-1] - place)
    return {windows[place].turn_id: math.pow(discount, places[-1] - place) / whole for place in places}
