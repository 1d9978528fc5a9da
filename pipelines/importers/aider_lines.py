"""What one piece of an aider history says. Pure.

Takes: texts of users, program and model. Gives: what they mean, None where they mean nothing here.
Leaves out: state between pieces (`aider.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipelines.importers.edit_sizes import EditSize, fenced_edits, search_replace_blocks

_PROMPTS: Final = frozenset({"ask", "code", "architect", "help", "context"})
"""Commands that carry a message to the model, where they have one."""
_CHOICE: Final = re.compile(r"\(Y\)es/\(N\)o.*\[(?:Yes|No|[^\]]{0,20})\]:?\s*(\w*)\s*$")
_TOKENS: Final = re.compile(
    r"Tokens: ([\d.,]+[kKmM]?) sent(?:, ([\d.,]+[kKmM]?) cache write)?(?:, ([\d.,]+[kKmM]?) cache hit)?, ([\d.,]+[kKmM]?) received"
)
_MODEL: Final = re.compile(r"(?:Main model|Models?): (\S+) with ")
_UNIT: Final = {"k": 1_000, "m": 1_000_000}
_GIT: Final = re.compile(r"(?:/git|/run\s+git|!\s*git)\s+(revert|reset)\s+(.*)", re.S)
_BACK: Final = re.compile(r"HEAD(?:~(\d{1,2})|(\^{1,5}))?$")


@dataclass(frozen=True, slots=True)
class Said:
    """One piece of a history."""

    kind: str
    """start, user, program or answer."""
    text: str
    """Without the marks at the beginnings of lines."""


def is_command(text: str) -> bool:
    """Whether what the user typed is for the program alone: `!` and `/` commands, but for those that ask the model."""
    if not text.startswith(("/", "!")):
        return False
    word, _, rest = text[1:].partition(" ")
    return text[0] == "!" or word not in _PROMPTS or not rest.strip()


def confirmation(text: str) -> bool | None:
    """Return the answer to a yes-or-no question of the program, None for any other text."""
    found = _CHOICE.search(text[-400:])
    return None if found is None else found[1].lower()[:1] in ("y", "a")


def applied_path(text: str) -> str | None:
    """Return the file that an edit was applied to."""
    return text.removeprefix("Applied edit to ").strip() if text.startswith("Applied edit to ") else None


def skipped_path(text: str) -> str | None:
    """Return the file whose edit the user did not allow; one that git ignores was not the user's choice."""
    if not text.startswith("Skipping edits to ") or "gitignore spec" in text:
        return None
    return text.removeprefix("Skipping edits to ").strip()


def token_counts(text: str) -> tuple[int, int, int] | None:
    """Return (sent, received, cached) of a usage line; sent includes what was written to and read from a cache."""
    found = _TOKENS.match(text)
    if found is None:
        return None
    sent, write, hit, received = (_number(part) for part in found.groups())
    return sent + write + hit, received, hit


def _number(text: str | None) -> int:
    if not text:
        return 0
    digits, unit = text.rstrip("kKmM").replace(",", ""), _UNIT.get(text[-1].lower(), 1)
    try:
        return min(int(float(digits) * unit + 0.5), 2**31 - 1)
    except ValueError:
        return 0


def model_of(text: str) -> str | None:
    """Return the model that a heading names."""
    found = _MODEL.match(text)
    return found[1][:200] if found else None


def edits_of(answer: str) -> list[tuple[str, EditSize]]:
    """Return (path, size) of the edits in an answer, in whatever notation it has."""
    return search_replace_blocks(answer) or fenced_edits(answer) if "```" in answer or "<<<<" in answer else []


def reverted(command: str, commits: Sequence[str]) -> int:
    """Return how many of the newest commits a git command of the user takes back; a revert counts where it names the newest."""
    found = _GIT.match(command)
    if found is None or not commits:
        return 0
    words = found[2].split()
    if found[1] == "reset":
        if "--hard" not in words:
            return 0
        back = next((match for word in words if (match := _BACK.match(word))), None)
        if back is None:
            return 0
        return min(int(back[1] or 0) or len(back[2] or ""), len(commits))
    newest = commits[-1]
    return int(any(word == "HEAD" or (len(word) >= 6 and (word.startswith(newest) or newest.startswith(word))) for word in words))
