"""Hindsight: what the policy would have said had it known what the user says next. Optional, and off by default. Pure.

A user's next message often tells what was wrong ("no, the other file"). Score the same response once more with that message already
in the context, and the difference log p(token | prompt, message) - log p(token | prompt) is positive at tokens that the message
would have made likelier and negative at those it would have prevented: a direction for each token, where the reward only gives one
number for the turn. It is added to the advantage, clipped, with a small weight.

The message is taken as the tokens that the next turn's prompt adds to this turn's end, exactly as they were served; nothing is
tokenised. They go behind the prompt, so that the response follows an empty reply and the message that answers it.

Takes rows. Gives hint tokens, and per-token terms from two scorings. Leaves out: scoring (`engine.py`).

Source: Wang et al., "OpenClaw-RL" (hindsight-guided distillation from next-state signals), arXiv 2603.10165.
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from trainer.packing import PackedRow, reply_row
from trainer.selection import Row


def hints(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return the tokens of the next user message by completion id, for the rows whose next turn continues them token by token.

    Args:
        rows: Selected rows; a turn may have several, the longest prompt is its last.
    """
    turns: dict[tuple[str, int], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        turns[row.session_id, row.policy_version][row.turn_index].append(row)
    found: dict[str, np.ndarray] = {}
    for session in turns.values():
        for index, members in session.items():
            following = session.get(index + 1)
            if not following:
                continue
            last = max(members, key=lambda row: len(row.prompt_ids))
            end = np.concatenate([last.prompt_ids, last.response_ids])
            prompt = min(following, key=lambda row: len(row.prompt_ids)).prompt_ids
            if len(prompt) > len(end) and np.array_equal(prompt[: len(end)], end):
                found |= dict.fromkeys((row.completion_id for row in members), prompt[len(end) :])
    return found


def hinted(row: PackedRow, hint_ids: np.ndarray) -> PackedRow:
    """Return a row whose response follows its prompt and the hint; it shares its prefix with nobody."""
    return reply_row(np.concatenate([row.prompt_ids, hint_ids]), row.response_ids, temperature=row.temperature)


def terms(plain: Float[np.ndarray, " R"], knowing: Float[np.ndarray, " R"], *, weight: float, clip: float) -> Float[np.ndarray, " R"]:
    """Return weight clip(knowing - plain, -clip, clip), to be added to a token's advantage.

    Args:
        plain: Log-probabilities of the response under the approved checkpoint, nats.
        knowing: The same with the hint in the context.
        weight: >= 0.
        clip: > 0, nats.
    """
    return (weight * np.clip(knowing - plain, -clip, clip)).astype(np.float32)
