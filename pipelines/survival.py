"""How much of an edit still stands (pure).

Takes: the text before an edit, the text with it, and the text now. Gives: the two figures of `edit_survival`, regions followed
through later changes, and the hashed sketch of what was added.

    four_gram = sim(now, ai): how much of the text that the policy wrote still stands in its region;
    no_revert = 1 - max(sim(now, before) - sim(ai, before), 0) / (1 - sim(ai, before)): it falls only as the text goes back to what
    it was, so that building further on an edit does not count against it.

`sim` is `2 |A & B| / (|A| + |B|)` over multisets of character 4-grams. An edit is judged hunk by hunk, each in its own region, so
that what happens elsewhere in the file changes nothing. Line endings (CRLF, CR) and a byte order mark are no part of a text.
Other white space is: a reformatted block has changed, but it was not taken back.

Source: the formulas are those of the edit survival tracker of VS Code's Copilot Chat (microsoft/vscode-copilot-chat,
src/platform/editSurvivalTracking/common/editSurvivalTracker.ts, MIT), which follows regions through editor events. Ours differs in
four places. (1) Regions are followed by a diff, because a file on disk has no events. (2) A hunk weighs max(|before|, |ai|) in
no_revert; there it weighs |before|, so that an insertion that was deleted again counts for nothing. (3) Text typed beside a region,
without touching it, does not belong to it; for no_revert the worse of both readings counts. (4) An edit that only deletes has
four_gram = no_revert; there it is always 1.

Leaves out: files, clocks and branches (`tracker.py`, `signals/survival_git.py`), and who decided.
"""

import hashlib
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pipelines.events import pack_ids, unpack_ids
from pipelines.regions import Gap, carry, gaps, line_gaps, trimmed

GRAM: Final = 4
"""Characters in one gram: long enough to be specific to a phrase, short enough to survive a renamed variable."""
SKETCH_GRAMS: Final = 512
"""Most grams in a sketch, so that an event stays small (about 5 kB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What stands of an edit."""

    four_gram: float
    """Similarity of what the policy wrote with what stands in its region, in [0, 1]."""
    no_revert: float
    """1 less the share of the way back to the text before, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One contiguous change of an edit and where it stands in the tracked text."""

    before: str
    """Text that was replaced; empty for an insertion."""
    after: str
    """Text that the policy wrote; empty for a deletion."""
    start: int
    """First character of the region in the tracked text."""
    end: int
    """Character after the region; equal to `start` for a deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """An edit and the newest text through which its regions were followed."""

    hunks: tuple[Hunk, ...]
    """In order of place; empty when the edit changed nothing."""
    text: str
    """Whole text that the regions refer to, with plain line ends."""
    before_digest: str
    """Digest of the whole text before; `""` when the file did not exist."""
    after_digest: str
    """Digest of the whole text right after the edit."""
    origin: tuple[tuple[int, int], ...]
    """Regions right after the edit, one a hunk: what an exact return to that text restores."""


def plain(text: str) -> str:
    """Return the text with `\\n` line ends and without a byte order mark."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def grams(text: str) -> Counter[str]:
    """Count the character 4-grams of a text; a shorter text is one gram of its own."""
    if not text:
        return Counter()
    return Counter(text[at : at + GRAM] for at in range(max(1, len(text) - GRAM + 1)))


def similarity(one: str, two: str) -> float:
    """Multiset similarity of two texts' 4-grams, `2 |A & B| / (|A| + |B|)`, in [0, 1]; two empty texts are equal."""
    return overlap(grams(one), grams(two))


def overlap(left: Counter[str], right: Counter[str]) -> float:
    """Return `2 |A & B| / (|A| + |B|)` of two multisets, 1 when both are empty."""
    total = left.total() + right.total()
    return 1.0 if total == 0 else 2 * (left & right).total() / total


def reverted(before: str, after: str, now: str) -> float:
    """Return how far one hunk's text went back to what it was, in [0, 1]: 1 - no_revert."""
    if now == before and after != before:
        return 1.0
    base = similarity(after, before)
    if base >= 1.0:
        return 0.0
    return min(1.0, max(similarity(now, before) - base, 0.0) / (1.0 - base))


def track(before: str | None, after: str, *, region: tuple[int, int] | None = None) -> Tracked:
    """Start following an edit.

    Args:
        before: Whole text before; None when the file did not exist.
        after: Whole text right after.
        region: [start, end) in `after` that the edit wrote, in characters, where the client knows it; None, or a region outside of
            which the texts differ, means that a diff finds it.
    """
    old, new = plain(before or ""), plain(after)
    hunk = _given(old, new, after, region) if region is not None else None
    found = [hunk] if hunk is not None else [trimmed(old, new, gap) for gap in line_gaps(old, new)]
    hunks = tuple(
        Hunk(before=old[o_from:o_to], after=new[n_from:n_to], start=n_from, end=n_to)
        for o_from, o_to, n_from, n_to in found
        if old[o_from:o_to] != new[n_from:n_to]
    )
    return Tracked(
        hunks=hunks,
        text=new,
        before_digest="" if before is None else digest(old),
        after_digest=digest(new),
        origin=tuple((hunk.start, hunk.end) for hunk in hunks),
    )


def _given(old: str, new: str, raw: str, region: tuple[int, int]) -> Gap | None:
    """Return the change that a client's region means, None when the texts differ outside of it."""
    start, end = (len(plain(raw[: at - (raw[at - 1 : at + 1] == "\r\n")])) if at > 0 else 0 for at in region)
    tail = len(new) - end
    if not 0 <= start <= end <= len(new) or len(old) < start + tail or old[:start] != new[:start]:
        return None
    return (start, len(old) - tail, start, end) if old[len(old) - tail :] == new[end:] else None


def digest(text: str) -> str:
    """Return a short digest of a text, by which equal texts are known again."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def advance(tracked: Tracked, now: str) -> Tracked:
    """Follow an edit's regions into the next text of its file (a later edit, for example)."""
    text = plain(now)
    if text == tracked.text:
        return tracked
    if digest(text) == tracked.after_digest:
        places = tracked.origin
    else:
        changes = gaps(tracked.text, text)
        places = tuple(carry(hunk.start, hunk.end, (tracked.text, text), changes) for hunk in tracked.hunks)
    moved = (replace(hunk, start=low, end=high) for hunk, (low, high) in zip(tracked.hunks, places, strict=True))
    return replace(tracked, text=text, hunks=tuple(moved))


def score(tracked: Tracked, now: str | None) -> Survival:
    """Say how much of a tracked edit stands in the text now.

    Args:
        tracked: The edit.
        now: Whole text now; None when the file is gone (all its regions are empty then).

    Returns:
        Both figures; an edit that changed nothing stands whole.
    """
    text = plain(now or "")
    if not tracked.hunks or (now is not None and digest(text) == tracked.after_digest):
        return Survival(four_gram=1.0, no_revert=1.0)
    back = now is None and not tracked.before_digest
    back = back or (now is not None and digest(text) == tracked.before_digest)
    changes = [] if now is None else gaps(tracked.text, text)
    written = kept = weights = lost = 0.0
    for hunk in tracked.hunks:
        narrow = wide = ""
        if now is not None:
            low, high = carry(hunk.start, hunk.end, (tracked.text, text), changes)
            narrow = text[low:high]
            low, high = carry(hunk.start, hunk.end, (tracked.text, text), changes, beside=True)
            wide = text[low:high]
        weight = max(len(hunk.before), len(hunk.after))
        gone = max(reverted(hunk.before, hunk.after, narrow), reverted(hunk.before, hunk.after, wide) if wide != narrow else 0.0)
        kept += len(hunk.after) * similarity(narrow, hunk.after)
        written += len(hunk.after)
        lost += weight * gone
        weights += weight
    no_revert = 0.0 if back else max(0.0, 1.0 - lost / weights)
    return Survival(four_gram=kept / written if written else no_revert, no_revert=no_revert)


def survival(before: str | None, after: str, now: str | None) -> Survival:
    """Say how much of one edit stands in the text now, with nothing known of what came between."""
    return score(track(before, after), now)


def added_grams(tracked: Tracked) -> Counter[str]:
    """Count the 4-grams of the text that an edit wrote, hunk by hunk."""
    counts: Counter[str] = Counter()
    for hunk in tracked.hunks:
        counts.update(grams(hunk.after))
    return counts


def sketch(counts: Counter[str]) -> str:
    """Pack 4-grams as (hash, count) pairs of int32, in order of the unsigned hash.

    More than `SKETCH_GRAMS` different grams are sampled: those with the smallest hashes stay. Sketches of two texts then hold the
    same grams where both have them, so that shares taken from sketches are estimates without bias.
    The hash is CRC-32 of the gram's UTF-8 bytes, mixed so that neighbours spread (finaliser of MurmurHash3). Both are one to one
    on 32 bits, so grams of four ASCII characters never collide.
    Source: coordinated bottom-k sampling, Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007.
    """
    hashes, numbers = _hashed(counts)
    hashes, numbers = hashes[:SKETCH_GRAMS], numbers[:SKETCH_GRAMS]
    return pack_ids(np.stack([hashes.view(np.int32), numbers], axis=1).reshape(-1))


def _hashed(counts: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return different hashes [N] uint32, ascending, and their counts [N] int32."""
    raw = np.array([zlib.crc32(gram.encode("utf-8", "surrogatepass")) for gram in counts], dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        raw = (raw ^ (raw >> np.uint32(shift))) * np.uint32(factor)
    raw ^= raw >> np.uint32(16)
    hashes, place = np.unique(raw, return_inverse=True)
    numbers = np.bincount(place, weights=list(counts.values()), minlength=len(hashes)).astype(np.int32)
    return hashes, numbers


def _read(packed: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = unpack_ids(packed)
    if len(pairs) % 2:
        raise ValueError("a sketch is pairs of int32")
    return np.ascontiguousarray(pairs[0::2]).view("<u4"), pairs[1::2]


def _cut(*sketches: tuple[np.ndarray, np.ndarray]) -> list[dict[int, int]]:
    """Restrict sketches to the hashes that none of them left out."""
    full = [int(hashes[-1]) for hashes, _ in sketches if len(hashes) >= SKETCH_GRAMS]
    limit = min(full, default=2**32)
    return [{int(h): int(n) for h, n in zip(hashes, numbers, strict=True) if h <= limit} for hashes, numbers in sketches]


def sketch_similarity(one: str, two: str) -> float:
    """Return the similarity of two texts from their sketches: exact up to `SKETCH_GRAMS` different grams, else an estimate.

    Raises:
        ValueError: One of them is no sketch.
    """
    left, right = _cut(_read(one), _read(two))
    total = sum(left.values()) + sum(right.values())
    return 1.0 if total == 0 else 2 * sum(min(n, right.get(h, 0)) for h, n in left.items()) / total


def sketch_contained(packed: str, text: str) -> float:
    """Return which share of a sketch's grams a text holds, in [0, 1]; 1 for an empty sketch.

    Raises:
        ValueError: `packed` is no sketch.
    """
    (held,) = _cut(_read(packed))
    hashes, numbers = _hashed(grams(plain(text)))
    wanted = np.array(sorted(held), dtype=np.uint32)
    at = np.searchsorted(hashes, wanted)
    there = [int(numbers[place]) if place < len(hashes) and hashes[place] == value else 0 for value, place in zip(wanted, at, strict=True)]
    total = sum(held.values())
    return 1.0 if total == 0 else sum(min(held[int(value)], number) for value, number in zip(wanted, there, strict=True)) / total
