"""Simulated users with a hidden, documented preference (pure and seeded).

The preference: the comment on a changed line cites its ticket with **ref** (`SimulationConfig.preference`; `see` in the other
world). A user keeps an edit when its check passes and it follows the preference. Otherwise they undo it and ask again in
their own words (with the whole request when nothing was changed), give the request up, or leave; they leave sooner when turns
are slow. The policy is told the preference only as a person would tell it, in follow-ups. A learning curve can so be held
against the truth: a policy that follows the preference and edits correctly keeps every edit.

Takes: seeds, what came of a turn. Gives: `User`, `Verdict`, `Move`. Leaves out: the session (`session.py`) and all I/O.
"""

import math
import random
from dataclasses import dataclass
from typing import Final, Literal

from deploy.harness.config import SimulationConfig
from deploy.harness.tasks import FORMS, Form

Language = Literal["en", "de", "fr", "es"]
Fault = Literal["no_edit", "check_failed", "convention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """One simulated person."""

    name: str
    """Raw name; only its keyed hash leaves the process."""
    language: Language
    """Of follow-ups; requests are English, as tickets often are."""
    preference: Form
    patience_s: float
    """A slower turn is interrupted."""
    persistence: float
    """Probability to ask again after a bad turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a user makes of one turn."""

    keeps: Literal["yes", "no"]
    fault: Fault | None
    """Why not; None when kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a user does next."""

    kind: Literal["next_request", "ask_again", "done", "abandon"]
    text: str = ""
    """The message of `ask_again`, or the words before a next request."""


LANGUAGES: Final[dict[Language, float]] = {"en": 0.7, "de": 0.1, "fr": 0.1, "es": 0.1}

TELL_CONVENTION: Final[dict[Language, tuple[str, ...]]] = {
    "en": (
        "not what i asked, the comment must say {want}",
        "that's not right, write {want} in the comment",
        "undo that. {want}, not {other}",
        "the other way: {want} {ticket}",
        "wrong word, use {want}",
        "no, {want}",
    ),
    "de": ("stimmt nicht, da muss {want} stehen", "andersrum, bitte {want}", "nochmal, mit {want} statt {other}"),
    "fr": ("ce n'est pas ça, il faut {want}", "refais, avec {want}"),
    "es": ("eso no, debe decir {want}", "otra vez, con {want}"),
}
TELL_BROKEN: Final[dict[Language, tuple[str, ...]]] = {
    "en": ("that does not work, I undid it. try again", "still wrong, again please", "nope, it fails", "broken now, once more"),
    "de": ("das geht nicht, nochmal bitte", "immer noch falsch"),
    "fr": ("ça ne marche pas, encore une fois", "toujours pas bon, refais"),
    "es": ("no funciona, otra vez por favor", "sigue mal"),
}
TELL_NOTHING: Final[dict[Language, tuple[str, ...]]] = {
    "en": ("you changed nothing, try again", "nothing happened, i asked for an edit", "just make the change"),
    "de": ("es hat sich nichts geändert, ich wollte eine Änderung", "bitte einfach machen"),
    "fr": ("rien n'a changé, refais", "modifie le fichier s'il te plaît"),
    "es": ("no cambió nada, otra vez", "edita el archivo por favor"),
}
THANKS: Final[dict[Language, tuple[str, ...]]] = {
    "en": ("thanks.", "good.", "great, next:", ""),
    "de": ("danke.", "passt, jetzt:"),
    "fr": ("merci.", "parfait."),
    "es": ("gracias.", "ahora:"),
}


def draw_user(config: SimulationConfig, seed: int, index: int) -> User:
    """Draw the person behind one session; a run's sessions take the `users` people in turn."""
    number = index % config.users
    rng = random.Random(f"user/{seed}/{number}")
    return User(
        name=f"simulated-{seed}-{number}",
        language=rng.choices(list(LANGUAGES), list(LANGUAGES.values()))[0],
        preference=config.preference,
        patience_s=config.patience_s * math.exp(rng.gauss(0.0, 0.3)),
        persistence=rng.uniform(0.7, 0.95),
    )


def judge(user: User, *, edited: Literal["yes", "no"], check: Literal["passed", "failed"], form: Form | None) -> Verdict:
    """Decide what to do with a turn's edits.

    Args:
        user: Who looks.
        edited: Whether any file differs from before the turn.
        check: Whether the task's check passes now.
        form: How the changed code cites the ticket (`tasks.form_of`).
    """
    if edited == "no":
        return Verdict(keeps="no", fault="no_edit")
    if check == "failed":
        return Verdict(keeps="no", fault="check_failed")
    if form != user.preference:
        return Verdict(keeps="no", fault="convention")
    return Verdict(keeps="yes", fault=None)


def complain(user: User, fault: Fault, rng: random.Random, *, ticket: str) -> str:
    """Say in the user's own words what is wrong."""
    phrases = {"convention": TELL_CONVENTION, "check_failed": TELL_BROKEN, "no_edit": TELL_NOTHING}[fault]
    other = FORMS[1 - FORMS.index(user.preference)]
    return rng.choice(phrases[user.language]).format(want=user.preference, other=other, ticket=ticket)


def next_move(
    user: User,
    verdict: Verdict,
    *,
    ticket: str,
    waited_s: float,
    asked_again: int,
    requests_left: int,
    config: SimulationConfig,
    rng: random.Random,
) -> Move:
    """Decide how the session goes on.

    Args:
        user: Who decides.
        verdict: Of the turn that just ended.
        ticket: Of the request.
        waited_s: How long the turn took; beyond the patience a user asks again half as often and leaves instead.
        asked_again: How often this request was repeated already.
        requests_left: Requests still to bring.
        config: `max_asks_again`.
        rng: Draws; the same state gives the same move.
    """
    patience = 0.5 if waited_s > user.patience_s else 1.0
    if verdict.fault is not None and asked_again < config.max_asks_again and rng.random() < user.persistence * patience:
        return Move(kind="ask_again", text=complain(user, verdict.fault, rng, ticket=ticket))
    if verdict.fault is not None and rng.random() < 0.4 / patience:
        return Move(kind="abandon")
    if requests_left > 0:
        words = rng.choice(THANKS[user.language]) if verdict.fault is None else ""
        return Move(kind="next_request", text=words)
    return Move(kind="done")
