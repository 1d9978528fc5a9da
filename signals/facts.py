"""What the rows of one turn say, fact by fact, in plain Python.

Takes: event rows as mappings (wire names, `payload` a mapping), de-duplicated and in time order. Gives: parts of `Evidence`, `Capture`.
Leaves out: which rows belong to a turn and what its window is (`sessions.py`).
"""

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from signals.components import SEVERITY, Checks, Edit, evaluation_score
from signals.filters import Capture
from signals.maturity import Truth, truth_of

Row = Mapping[str, Any]

INVALID: Final = ("unknown_tool", "invalid_arguments")
"""Tool results that are the policy's doing."""
CONSENT: Final = ("none", "measure", "train")
"""From strictest to freest."""
LONGEST_MS: Final = 2.0**40
"""A longer duration is read as this one (35 years): a number that a client sends may be anything, and infinity has no whole part."""
ARRAYS: Final = ("prompt_ids", "response_ids", "behaviour_logprobs")


def moment(row: Row) -> tuple[int, str]:
    """Return what orders a session's events."""
    return row["occurred_at_ms"], row["event_id"]


def of(rows: Iterable[Row], *types: str) -> list[Row]:
    """Return the rows of some types."""
    return [row for row in rows if row["type"] in types]


def _packed_length(text: str) -> int | None:
    try:
        length = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        return None
    return length // 4 if length % 4 == 0 else None


def _broken(payload: Mapping[str, Any]) -> bool:
    if payload.get("capture_error") is not None:
        return True
    arrays = [payload.get(name) for name in ARRAYS]
    if any(array is None for array in arrays):
        return False
    prompt, response, logprobs = [_packed_length(str(array)) for array in arrays]
    return prompt is None or response is None or response != logprobs


def capture(opening: Sequence[Row], completions: Sequence[Row]) -> Capture:
    """Say how well a turn was recorded."""
    served = completions or opening
    versions = [row["policy_version"] for row in served if row.get("policy_version") is not None]
    if not versions:
        versions = [row["policy_version"] for row in opening if row.get("policy_version") is not None]
    payloads = [row["payload"] for row in completions]
    return Capture(
        consent=min((row["consent"] for row in opening), key=CONSENT.index),
        policy_version=max(versions, default=None),
        without_ids=sum(any(p.get(name) is None for name in ARRAYS) for p in payloads),
        broken=sum(map(_broken, payloads)),
        truncated=sum((p.get("top_p") is not None and p["top_p"] < 1) or (p.get("top_k") or 0) > 0 for p in payloads),
    )


def sampling_ms(completions: Sequence[Row]) -> float | None:
    """Sum durations as whole microseconds, so that the sum has no order; None when none is known."""
    durations = [row["payload"].get("duration_ms") for row in completions]
    known = [math.floor(min(duration, LONGEST_MS) * 1000.0 + 0.5) for duration in durations if duration is not None]
    return sum(known) / 1000.0 if known else None


def tokens(completions: Sequence[Row], name: str) -> int:
    """Sum a counter of a turn's completions; absent is 0."""
    return sum(row["payload"].get(name) or 0 for row in completions)


def asked(completions: Sequence[Row]) -> bool:
    """Return whether the turn's last completion ends in a question."""
    return bool(completions) and bool(max(completions, key=moment)["payload"].get("ends_in_question"))


def judged(edit_id: str, proposal: Row, seen: Sequence[Row], *, closes_at_ms: int, window_s: int) -> tuple[Edit, Truth, list[Row]]:
    """Judge one edit by what was seen of it inside the window.

    Returns:
        The edit, what later became of it, and the rows inside the window.
    """
    inside = [
        row for row in seen if row["occurred_at_ms"] <= closes_at_ms and (row["payload"].get("horizon_s") or 0) <= window_s
    ]  # fmt: skip
    survivals = [
        (row["payload"]["horizon_s"], -row["payload"]["survival_no_revert"])
        for row in of(inside, "edit_survival")
        if not row["payload"].get("branch_changed")
    ]
    edit = Edit(
        edit_id=edit_id,
        chars_added=proposal["payload"].get("chars_added") or 0,
        decision=_last_decision(inside),
        survival=-max(survivals)[1] if survivals else None,
    )
    measured = [row["payload"] for row in of(seen, "edit_survival") if not row["payload"].get("branch_changed")]
    return edit, truth_of(measured, _last_decision(seen)), inside


def _last_decision(rows: Iterable[Row]) -> str | None:
    decisions = [(row["occurred_at_ms"], SEVERITY.index(row["payload"]["decision"])) for row in of(rows, "edit_decided")]
    return SEVERITY[max(decisions)[1]] if decisions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A turn's tool calls, each id once."""

    calls: int
    invalid: int
    repeats: int
    serial: int


def calls(rows: Sequence[Row]) -> Calls:
    """Count a turn's calls. Repeats and serial look-ups are counted among valid calls whose client says enough to see them."""
    first: dict[str, Row] = {}
    bad: set[str] = set()
    for row in of(rows, "tool_call"):
        first.setdefault(row["payload"]["tool_call_id"], row)
        if not row["payload"]["arguments_valid"]:
            bad.add(row["payload"]["tool_call_id"])
    bad |= {row["payload"]["tool_call_id"] for row in of(rows, "tool_result") if row["payload"]["result_class"] in INVALID}
    good = [row["payload"] for identity, row in first.items() if identity not in bad]
    known = [
        (call["name"], call["arguments_hash"], call["changes_before"])
        for call in good
        if call.get("arguments_hash") is not None and call.get("changes_before") is not None
    ]
    return Calls(
        calls=len(first.keys() | bad),
        invalid=len(bad),
        repeats=len(known) - len(set(known)),
        serial=sum(bool(call.get("independent")) for call in good),
    )


def checks(rows: Sequence[Row]) -> Checks:
    """Return the last lint delta and the last test run."""
    lint, tests = of(rows, "lint_delta"), of(rows, "test_run")
    figures: dict[str, Any] = {}
    if lint:
        figures |= {name: lint[-1]["payload"].get(name) for name in ("issues_before", "issues_after", "rules_checked", "rules_broken")}
    if tests:
        names = ("passed_before", "failed_before", "passed_after", "failed_after")
        figures |= {name: tests[-1]["payload"].get(name) for name in names}
    return Checks(**figures)


def score(row: Row) -> float | None:
    """Return what a feedback or evaluation says, in [-1, 1]; None when it cannot be read."""
    payload = row["payload"]
    if row["type"] == "feedback":
        return payload["score"]
    return evaluation_score(payload.get("score_value"), payload.get("score_label"))


def said(rows: Sequence[Row]) -> float | None:
    """Return the mean of the last feedback and the last evaluation that can be read, in [-1, 1]; None without."""
    last = [next((s for row in reversed(of(rows, kind)) if (s := score(row)) is not None), None) for kind in ("feedback", "evaluation")]
    known = [value for value in last if value is not None]
    return sum(known) / len(known) if known else None
