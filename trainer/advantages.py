"""Advantages for logged turns with one trajectory per prompt. Pure.

Return from turn k of a session, over its scored turns:  G_k = sum_{j>=k} gamma^(j-k) r_j
Baseline of a turn in bucket c:  b = (n mean_LOO + kappa ema_c) / (n + kappa)
Advantage:  A = clip((G - b) / (std_batch + eps), -5, 5);  A = G - b when std_batch < 1e-6 or there is one turn.

mean_LOO is over the n turns of the bucket that belong to other sessions *and* other users, so a baseline never sees the action
it is subtracted from, nor its author's. ema_c is the bucket's running mean from earlier updates; a bucket without one takes the
leave-out mean over all buckets (0 when there is none). The unit is the turn: a turn of five completions counts once.

Where two or more sessions answered one and the same prompt, b is the mean return of the other sessions of that prompt (RLOO).

Leaves out: unscored turns. They are in no mean; the caller does not pass them.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float

EPS: Final = 1e-6
"""Below this the batch's returns are all the same and dividing would blow rounding up."""
POSITION_BANDS: Final = (0, 1, 2, 5)
"""Lower ends of the turn-position bands: first turn, second, third to fifth, later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTurn:
    """One turn with a reward."""

    session_id: str
    user_key: str
    turn_index: int
    reward: float
    bucket: str
    prompt: str = ""
    """Digest of the tokens that the turn started from; empty where they are unknown, which is one prompt with nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the advantage of one turn is made of."""

    ret: float
    """G, the discounted return."""
    baseline: float
    others: int
    """n, turns behind the leave-out mean."""
    advantage: float


def bucket(task_bucket: str | None, turn_index: int, language: str | None) -> str:
    """Name the group of turns that share a baseline: task kind, turn-position band, language."""
    band = max(low for low in POSITION_BANDS if low <= max(turn_index, 0))
    return f"{task_bucket or 'unknown'}/{band}/{language or 'unknown'}"


def returns(turns: Sequence[ScoredTurn], *, gamma: float) -> Float[np.ndarray, " turns"]:
    """Return G for each turn: later scored turns of its session, discounted by their distance in turns."""
    sessions: dict[str, list[int]] = defaultdict(list)
    for position, turn in enumerate(turns):
        sessions[turn.session_id].append(position)
    found = np.zeros(len(turns))
    for positions in sessions.values():
        following, following_index = 0.0, 0
        for position in sorted(positions, key=lambda p: turns[p].turn_index, reverse=True):
            turn = turns[position]
            following = turn.reward + (
                gamma ** (following_index - turn.turn_index) * following if following_index > turn.turn_index else 0.0
            )
            following_index = turn.turn_index
            found[position] = following
    return found


class _Sums:
    """Sums of returns, with what to leave out."""

    def __init__(self) -> None:
        self.total = [0.0, 0]
        self.by_user: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self.by_session: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self.by_both: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])

    def add(self, turn: ScoredTurn, ret: float) -> None:
        for entry in (
            self.total, self.by_user[turn.user_key], self.by_session[turn.session_id], self.by_both[turn.user_key, turn.session_id],
        ):  # fmt: skip
            entry[0] += ret
            entry[1] += 1

    def without(self, turn: ScoredTurn) -> tuple[float, int]:
        """Sum and count over turns of other users and other sessions (inclusion-exclusion)."""
        user, session = self.by_user[turn.user_key], self.by_session[turn.session_id]
        both = self.by_both[turn.user_key, turn.session_id]
        return self.total[0] - user[0] - session[0] + both[0], int(self.total[1] - user[1] - session[1] + both[1])


def _by_prompt(turns: Sequence[ScoredTurn]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for position, turn in enumerate(turns):
        if turn.prompt:
            found[turn.prompt].append(position)
    return found


def estimate(turns: Sequence[ScoredTurn], *, ema: Mapping[str, float], gamma: float, kappa: float, clip: float) -> list[Estimate]:
    """Estimate the advantage of every turn.

    Args:
        turns: All scored turns of the window, each (session, turn_index) once; rewards finite.
        ema: Running mean return of each bucket from earlier updates.
        gamma: Discount across turns, in [0, 1].
        kappa: Turns that the running mean counts for, >= 0.
        clip: Largest |A|.

    Returns:
        One estimate a turn, in order.

    Source: Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", ICLR 2019 workshop (leave-one-out baseline); Ahmadian
        et al., arXiv 2402.14740 (RLOO, for several sessions of one prompt).
    """
    rets = returns(turns, gamma=gamma)
    same_prompt = _by_prompt(turns)
    buckets: dict[str, _Sums] = defaultdict(_Sums)
    everything = _Sums()
    for turn, ret in zip(turns, rets, strict=True):
        buckets[turn.bucket].add(turn, float(ret))
        everything.add(turn, float(ret))
    baselines: list[tuple[float, int]] = []
    for turn in turns:
        group = [position for position in same_prompt.get(turn.prompt, ()) if turns[position].session_id != turn.session_id]
        if group:
            baselines.append((float(np.mean(rets[group])), len(group)))
            continue
        total, others = buckets[turn.bucket].without(turn)
        prior = ema.get(turn.bucket)
        if prior is None:
            all_total, all_others = everything.without(turn)
            prior = all_total / all_others if all_others else 0.0
        baselines.append(((total + kappa * prior) / (others + kappa) if others + kappa > 0 else prior, others))
    spread = float(np.std(rets)) if len(turns) > 1 else 0.0
    estimates: list[Estimate] = []
    for ret, (baseline, others) in zip(rets, baselines, strict=True):
        centred = float(ret) - baseline
        advantage = centred if spread < EPS else float(np.clip(centred / (spread + EPS), -clip, clip))
        estimates.append(Estimate(ret=float(ret), baseline=baseline, others=others, advantage=advantage))
    return estimates


def updated_ema(turns: Sequence[ScoredTurn], estimates: Sequence[Estimate], *, ema: Mapping[str, float], decay: float) -> dict[str, float]:
    """Return the running means after this window: decay * old + (1 - decay) * window mean; a new bucket starts at its mean."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for turn, found in zip(turns, estimates, strict=True):
        grouped[turn.bucket].append(found.ret)
    fresh = dict(ema)
    for name, values in sorted(grouped.items()):
        mean = float(np.mean(values))
        fresh[name] = decay * ema[name] + (1 - decay) * mean if name in ema else mean
    return fresh


def user_weights(user_keys: Sequence[str], *, cap: float) -> Float[np.ndarray, " rows"]:
    """Return omega = min(1, cap / n_user) for each row: one person's many rows cannot outvote the rest."""
    counts: dict[str, int] = defaultdict(int)
    for key in user_keys:
        counts[key] += 1
    return np.asarray([min(1.0, cap / counts[key]) for key in user_keys])
