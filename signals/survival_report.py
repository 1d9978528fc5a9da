"""What stands of edits at the commit that took them up and some days later.

Takes: edits and the history of their files. Gives: one row an edit and horizon, counts of what could not be measured and why, a
summary, and `edit_survival` events. Leaves out: where edits and histories come from (`survival_edits.py`).

Horizons: `commit`, the first state of the file after the edit; `1d`, `7d`, ...: the file as it was so many days after the edit. A
horizon is measured only if the edit had been committed by then and nothing can have happened since that we do not know of.
With a text the figures are those of `pipelines.survival`, from the text with the edit and the text at the horizon. (Following the
regions through every commit between agreed with `git blame` no better, and would depend on how the work was cut into commits.)
With a sketch alone they are an estimate: the share c of its grams that the file holds now, above the share b that it held before,
(c - b) / (1 - b). A sketch cannot tell a rewrite from a revert, so this stands for both figures, and no_revert is then a lower bound.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pipelines.events import Client, EditSurvival, EditSurvivalPayload
from pipelines.importers.texts import stable_id
from pipelines.survival import Survival, score, sketch_contained
from signals.survival_edits import History, State, Subject
from signals.survival_git import Unreadable

DAY_S: Final = 86_400
COMMIT: Final = "commit"
CLIENT: Final = Client(name="tidegate-survival", version="1")
TAKEN_BACK: Final = 0.5
"""An edit with less no_revert than this counts as taken back in the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One edit at one horizon."""

    edit_id: str
    path: str
    horizon: str
    horizon_s: int
    """Seconds from the edit to the instant that was looked at."""
    version: str
    """Commit or snapshot."""
    four_gram: float
    no_revert: float
    estimated: bool
    """From a sketch."""
    gone: bool
    """The file no longer existed."""
    chars_added: int | None
    """None where only a sketch is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All edits of a run."""

    edits: int
    rows: list[tuple[Subject, Measured]]
    unmeasured: dict[str, dict[str, int]]
    """Horizon -> reason -> edits. Reasons: outside (no file of the repository), not_committed, open (the horizon lies after what is
    known), indistinct (a sketch whose grams the file held before), too_large, binary, missing_object, not_a_file."""


def measure_all(subjects: Iterable[Subject], history: History, *, days: Sequence[int], advance: Callable[[int], None]) -> Outcome:
    """Measure every edit at every horizon.

    Args:
        subjects: Edits.
        history: How their files changed.
        days: Horizons in days.
        advance: Called with 1 after each edit.
    """
    rows: list[tuple[Subject, Measured]] = []
    unmeasured: dict[str, Counter[str]] = {}
    edits = 0
    for subject in subjects:
        edits += 1
        for horizon, found in measure(subject, history, days=days).items():
            if isinstance(found, Measured):
                rows.append((subject, found))
            else:
                unmeasured.setdefault(horizon, Counter())[found] += 1
        advance(1)
    return Outcome(edits=edits, rows=rows, unmeasured={horizon: dict(reasons) for horizon, reasons in unmeasured.items()})


def measure(subject: Subject, history: History, *, days: Sequence[int]) -> dict[str, Measured | str]:
    """Measure one edit: by horizon the row, or the reason why there is none."""
    states = history.states(subject) if subject.path is not None else []
    found: dict[str, Measured | str] = {}
    if history.milestones and subject.commit is None:
        found[COMMIT] = _at(subject, history, states[:1], horizon=COMMIT, at_s=states[0].at_s) if states else "not_committed"
    for day in days:
        deadline_s = subject.made_at_s + day * DAY_S
        reached = [state for state in states if state.at_s <= deadline_s]
        if deadline_s > history.known_until_s():
            found[f"{day}d"] = "open"
        elif not reached and subject.commit is None:
            found[f"{day}d"] = "not_committed"
        else:
            found[f"{day}d"] = _at(subject, history, reached, horizon=f"{day}d", at_s=deadline_s)
    return found if subject.path is not None else dict.fromkeys(found, "outside")


def _at(subject: Subject, history: History, states: Sequence[State], *, horizon: str, at_s: float) -> Measured | str:
    """Measure an edit in the last of some states; none means that its commit is the newest state of the file."""
    try:
        now = history.text(states[-1]) if states else None
        if subject.tracked is not None:
            survival = score(subject.tracked, now) if states else Survival(four_gram=1.0, no_revert=1.0)
        else:
            survival = _estimate(subject.sketch or "", history.base(subject), now or "")
    except Unreadable as error:
        return error.reason
    if survival is None:
        return "indistinct"
    tracked = subject.tracked
    return Measured(
        edit_id=subject.edit_id,
        path=subject.path or "",
        horizon=horizon,
        horizon_s=max(0, int(at_s - subject.made_at_s)),
        version=states[-1].version if states else subject.edit_id.partition(":")[0],
        four_gram=survival.four_gram,
        no_revert=survival.no_revert,
        estimated=tracked is None,
        gone=bool(states) and now is None,
        chars_added=sum(len(hunk.after) for hunk in tracked.hunks) if tracked is not None else None,
    )


def _estimate(sketch: str, base: str, now: str) -> Survival | None:
    before = sketch_contained(sketch, base) if base else 0.0
    if before >= 1.0:
        return None
    kept = min(1.0, max(0.0, (sketch_contained(sketch, now) - before) / (1.0 - before)))
    return Survival(four_gram=kept, no_revert=kept)


def summary(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Return by horizon: edits, mean four_gram and no_revert, share taken back, share whose file is gone, edits only estimated."""
    groups: dict[str, list[Measured]] = {}
    for _, row in outcome.rows:
        groups.setdefault(row.horizon, []).append(row)
    return {
        horizon: {
            "edits": len(rows),
            "four_gram": sum(row.four_gram for row in rows) / len(rows),
            "no_revert": sum(row.no_revert for row in rows) / len(rows),
            "taken_back_share": sum(row.no_revert < TAKEN_BACK for row in rows) / len(rows),
            "gone_share": sum(row.gone for row in rows) / len(rows),
            "estimated": sum(row.estimated for row in rows),
        }
        for horizon, rows in sorted(groups.items(), key=lambda item: (item[0] != COMMIT, len(item[0]), item[0]))
    }


def events(outcome: Outcome, *, now_ms: int) -> list[EditSurvival]:
    """Return the measurements of edits whose session and user are known, as events.

    The same measurement has the same event id and content, so recording a run again is harmless.
    """
    made: list[EditSurvival] = []
    for subject, row in outcome.rows:
        if subject.session_id is None or subject.user_key is None:
            continue
        at_ms = int(subject.made_at_s * 1000) + row.horizon_s * 1000
        payload = EditSurvivalPayload(
            edit_id=row.edit_id,
            horizon_s=row.horizon_s,
            survival_four_gram=row.four_gram,
            survival_no_revert=row.no_revert,
            milestone="commit" if row.horizon == COMMIT else None,
            estimated=row.estimated,
        )
        seed = f"{subject.session_id}/{row.horizon}/{row.version}/{payload.model_dump_json()}"
        made.append(
            EditSurvival(
                event_id=stable_id(seed, at_ms, space="survival"),
                session_id=subject.session_id,
                turn_id=subject.turn_id,
                occurred_at_ms=at_ms,
                recorded_at_ms=now_ms,
                origin=subject.origin,
                policy_version=subject.policy_version,
                arm=subject.arm,
                user_key=subject.user_key,
                consent=subject.consent,
                client=CLIENT,
                payload=payload,
            )
        )
    return made


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return a run as JSON-ready values."""
    return {
        "edits": outcome.edits,
        "by_horizon": summary(outcome),
        "unmeasured": outcome.unmeasured,
        "rows": [asdict(row) for _, row in outcome.rows],
    }
