"""From components to one number: weights, norms, and the rules that keep the number honest.

The number is the mean value of the evidence, each piece by its mass, so it lies in [-1, 1]. Which piece has which mass and value:
- A component that says how it went (edits kept, follow-up, conventions, explicit; latency beside them) has its weight as mass.
- A cost c in [-1, 0] (tool calls, effort, evidence) has mass w |c| and value -1: it pulls the mean down, and the more, the larger it is.
  A cost of 0 has no mass. As an ordinary member of the mean, a spurious valid call or a short answer would halve a bad reward.
- A deferral stands in the place of kept edits. On such a turn whatever else speaks for the policy is left out, and what speaks against
  it is a cost: an answer to a question is friendly, quick and breaks no test, and must not pay for the edit that was not made. Only what
  people said of the turn in so many words counts as it is.
- Latency and effort alone are no evidence: a fast turn that nobody reacted to is not a good turn.
- Where there are only costs, the worst of them is the reward: one invalid call is evidence enough, so no turn escapes a bad reward by
  leaving `scored`.
So the number is monotone: a better value of any component never lowers it, and one more invalid call never raises it.

With frozen norms the value v of a component is min(max((v - mean) / (sd + eps), -3), 3) / 3 of its stratum: still in [-1, 1], and 0 is
what was usual. Takes: components. Gives: pieces, the scalar, `reward_version`. Leaves out: components themselves (`components.py`), and the
same rules as columns (`judgement.py`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from signals import followups
from signals.components import FAILED, PARTLY_KEPT, PASSED
from signals.config import RewardsConfig
from signals.norms import CLIP, NO_NORMS, NORMALISED, Norms
from signals.samples import COMPONENTS

RULES: Final = 2
"""Raise it when a rule here or in `components.py` changes, so that the reward version changes with it."""
COSTS: Final = ("tool_calls", "effort", "evidence")
"""Components that are never above 0 and pull the mean down."""
OUTCOMES: Final = ("edits_kept", "follow_up", "conventions", "explicit", "deferral")
"""Components that say how the turn went."""
TELLING_COSTS: Final = ("tool_calls", "evidence")
"""Costs that are evidence by themselves."""
IN_PLACE_OF_EDITS: Final = ("follow_up", "latency", "conventions")
"""Components that only count against the policy on a deferred turn."""

Scale = Mapping[str, tuple[float, float]]
"""Component -> mean and standard deviation of the stratum."""
Pieces = dict[str, tuple[float, float]]
"""Component -> mass and value in the mean."""


def is_evidence(present: Mapping[str, float]) -> bool:
    """Return whether these components say anything about the turn (see the module's rules)."""
    return any(name in present for name in OUTCOMES) or any(present.get(name, 0.0) < 0.0 for name in TELLING_COSTS)


def normalised(name: str, value: float, scale: Scale, eps: float) -> float:
    """Return a value on its stratum's scale, in [-1, 1]; as it is where no norm was frozen."""
    found = scale.get("edits_kept" if name == "deferral" else name) if name in (*NORMALISED, "deferral") else None
    if found is None:
        return value
    mean, sd = found
    return max(-CLIP, min(CLIP, (value - mean) / (sd + eps))) / CLIP


def pieces(present: Mapping[str, float], config: RewardsConfig, *, scale: Scale | None = None, explicit_mass: float = 1.0) -> Pieces:
    """Return what each component puts into the mean; empty without evidence.

    Args:
        present: The turn's components.
        config: Weights.
        scale: Frozen mean and deviation by component; None or empty: values as they are.
        explicit_mass: For how much what was said counts (`components.explicit`).
    """
    weights = {name: config.weights.get(name, 0.0) for name in present}
    if not any(weights.get(name, 0.0) > 0 for name in OUTCOMES):
        worst = min(
            (name for name in TELLING_COSTS if weights.get(name, 0.0) > 0 and present[name] < 0.0), key=lambda n: present[n], default=None
        )
        return {} if worst is None else {worst: (weights[worst], present[worst])}
    found: Pieces = {}
    for name in COMPONENTS:
        if name not in present:
            continue
        value = present[name]
        if name in COSTS:
            found[name] = (weights[name] * -value, -1.0)
            continue
        value = normalised(name, value, scale or {}, config.norm_eps)
        if "deferral" in present and name in IN_PLACE_OF_EDITS:
            found[name] = (weights[name] * -min(value, 0.0), -1.0)
        else:
            found[name] = (weights[name] * (explicit_mass if name == "explicit" else 1.0), value)
    return {name: (mass, value) for name, (mass, value) in found.items() if mass > 0.0}


def credit(found: Pieces) -> tuple[float, float]:
    """Return sum(mass value) and sum(mass): what the turn earned, and for how much evidence."""
    earned = mass = 0.0
    for own_mass, value in found.values():
        earned += own_mass * value
        mass += own_mass
    return earned, mass


def scalar(
    present: Mapping[str, float], config: RewardsConfig, *, scale: Scale | None = None, explicit_mass: float = 1.0
) -> float | None:  # fmt: skip
    """Return the reward, in [-1, 1]; None without evidence or where all its weights are 0."""
    earned, mass = credit(pieces(present, config, scale=scale, explicit_mass=explicit_mass))
    return max(-1.0, min(1.0, earned / mass)) if mass > 0.0 and is_evidence(present) else None


def reward_version(config: RewardsConfig, norms: Norms = NO_NORMS, *, judged: str = "") -> str:
    """Return the digest of everything that decides a reward: rules, model, phrase lists, weights, window, norms, the judge's verdicts.

    Args:
        config: Weights, window, costs.
        norms: What was usual.
        judged: `Judged.version`; empty without verdicts.
    """
    parts: dict[str, object] = {
        "rules": RULES,
        "components": COMPONENTS,
        "partly_kept": PARTLY_KEPT,
        "labels": [PASSED, FAILED],
        "follow_up": followups.version(),
        "config": config.model_dump(mode="json"),
        "norms": norms.version,
        **({"judge": judged} if judged else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:12]
