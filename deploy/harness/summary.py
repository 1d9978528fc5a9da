"""What a set of sessions says about a policy: rates with intervals (pure).

Takes: rows of sessions.jsonl. Gives: a figure each for kept edits, dissatisfied follow-ups, invalid calls, asks, first tries
and latency, with n and a 95 % interval. The unit is the user: requests of one person are not independent, so intervals come from
resampling users; where there are too few users, from Wilson's formula, and the figure says so. Leaves out: comparisons of policies (gate).
"""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

MIN_USERS: Final = 8
"""Fewer users make a bootstrap by user meaningless."""
RESAMPLES: Final = 1_000
Z_95: Final = 1.959964

RATES: Final[dict[str, tuple[str, str]]] = {
    "kept_edits": ("edits_kept", "edits_proposed"),
    "dissatisfied": ("dissatisfied", "n_turns"),
    "invalid_calls": ("invalid_calls", "calls"),
    "asks": ("asks", "n_turns"),
    "solved": ("solved", "requests"),
    "first_try_kept": ("first_kept", "first_tries"),
    "form_ref": ("ref", "formed"),
    "unscored_turns": ("unscored_turns", "n_turns"),
}
"""Figure: numerator over denominator, both sums over sessions."""


def wilson(successes: int, n: int, *, z: float = Z_95) -> tuple[float, float]:
    """Return Wilson's interval of a proportion; (0, 1) without data.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference", JASA 22.
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return 0.0 if successes == 0 else max(0.0, centre - half), 1.0 if successes == n else min(1.0, centre + half)


def ratio_interval(pairs: Sequence[tuple[float, float]], rng: random.Random) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of sum(num) / sum(den), resampling the pairs.

    Args:
        pairs: [users] numerator and denominator of each user.
        rng: Draws the resamples.
    """
    ratios: list[float] = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(pairs, k=len(pairs))
        denominator = sum(den for _, den in drawn)
        if denominator > 0:
            ratios.append(sum(num for num, _ in drawn) / denominator)
    if not ratios:
        return 0.0, 1.0
    ratios.sort()
    return ratios[int(0.025 * len(ratios))], ratios[min(len(ratios) - 1, int(0.975 * len(ratios)))]


def _counts(row: Mapping[str, Any]) -> dict[str, int]:
    turns = row["turns"]
    first = [turn for turn in turns if turn["try_number"] == 0]
    formed = [turn for turn in first if turn["form"] is not None]
    return {
        "n_turns": len(turns),
        "first_tries": len(first),
        "first_kept": sum(turn["keeps"] == "yes" for turn in first),
        "formed": len(formed),
        "ref": sum(turn["form"] == "ref" for turn in formed),
    }


def _rate(pairs: Mapping[str, tuple[int, int]], rng: random.Random) -> dict[str, Any]:
    numerator = sum(num for num, _ in pairs.values())
    n = sum(den for _, den in pairs.values())
    users = [pair for pair in pairs.values() if pair[1] > 0]
    method = "bootstrap by user" if len(users) >= MIN_USERS and 0 < numerator < n else "wilson"
    low, high = ratio_interval(users, rng) if method == "bootstrap by user" else wilson(min(numerator, n), n)
    return {"rate": numerator / n if n else None, "low": low, "high": high, "n": n, "users": len(users), "interval": method}


def summarise(rows: Sequence[Mapping[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """Sum up sessions.

    Args:
        rows: Lines of sessions.jsonl; those with outcome infra_error count only as such.
        seed: Of the bootstrap.

    Returns:
        Counts, a dict for each of RATES with rate (None without data), low, high, n, users, interval, and latency of turns.
    """
    good = [row for row in rows if row["outcome"] != "infra_error"]
    rng = random.Random(seed)
    result: dict[str, Any] = {
        "sessions": len(rows),
        "infra_errors": len(rows) - len(good),
        "abandoned": sum(row["outcome"] == "abandoned" for row in good),
        "turns": sum(len(row["turns"]) for row in good),
        "response_tokens": sum(row["response_tokens"] for row in good),
        "policy_versions": sorted({row["policy_version"] for row in good if row["policy_version"] is not None}),
    }
    extended: list[dict[str, Any]] = [{**row, **_counts(row)} for row in good]
    for name, (numerator, denominator) in RATES.items():
        pairs: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for row in extended:
            num, den = pairs[row["user_key"]]
            pairs[row["user_key"]] = (num + row[numerator], den + row[denominator])
        result[name] = _rate(pairs, rng)
    seconds = sorted(turn["seconds"] for row in good for turn in row["turns"])
    result["latency_s"] = {
        "median": statistics.median(seconds) if seconds else None,
        "p95": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))] if seconds else None,
        "n": len(seconds),
    }
    endings: dict[str, int] = defaultdict(int)
    for row in good:
        for turn in row["turns"]:
            endings[turn["fault"] or "kept"] += 1
    result["verdicts"] = dict(sorted(endings.items()))
    return result


def describe(result: Mapping[str, Any]) -> str:
    """Write a summary for people, one figure a line."""
    lines = [
        f"{result['sessions']} sessions, {result['turns']} turns, {result['abandoned']} abandoned, {result['infra_errors']} infra errors; "
        f"policy versions {result['policy_versions'] or 'unknown'}"
    ]
    for name in RATES:
        figure = result[name]
        if figure["rate"] is None:
            lines.append(f"{name.replace('_', ' '):>20}  no data")
        else:
            interval = f"[{figure['low']:.1%}, {figure['high']:.1%}]"
            lines.append(f"{name.replace('_', ' '):>20}  {figure['rate']:6.1%}  {interval}  n={figure['n']} ({figure['interval']})")
    latency = result["latency_s"]
    if latency["median"] is not None:
        lines.append(f"{'latency of a turn':>20}  median {latency['median']:.1f} s, p95 {latency['p95']:.1f} s")
    lines.append(f"{'verdicts':>20}  " + ", ".join(f"{name} {count}" for name, count in result["verdicts"].items()))
    return "\n".join(lines)
