"""Made-up session events for the bench, as Kafka records: the lengths and the mix of real sessions, and one record in a hundred hostile.

A session has turns (geometric, 4 on average), a turn completions, tool calls, edits and what became of them; completions carry packed
arrays of log-normal length. One event in a hundred is sent twice, one arrives much later than its neighbours, some evidence comes after its
turn's window, and one record in five of the turns that follow another is a remark on what was done. Everything is a function of (seed,
chunk), so that chunks can be made anywhere, in any order, and again.

Takes: a seed and a chunk's number. Gives: records in order of arrival. Leaves out: sending them (`bench_topics.py`). Texts are made of
fixed sentences: nothing here comes from a person.
"""

import base64
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

START_MS: Final = 1_780_000_000_000
"""When the first session begins, epoch milliseconds: the past, so that every window is closed and nothing depends on today."""
SESSIONS_A_CHUNK: Final = 200
"""About ten thousand events: small enough to be made in a second, large enough that its sessions overlap as real ones do."""
CHUNK_MS: Final = 3_600_000
"""Time over which the sessions of a chunk begin."""
MEAN_TURNS: Final = 4.0
RESPONSE_TOKENS: Final = (5.0, 0.9)
"""Mean and deviation of the logarithm: a median of 148, a mean of 220 tokens."""
PROMPT_TOKENS: Final = (5.8, 0.6)
"""A median of 330, a mean of 395 tokens."""
TOKENS_RANGE: Final = (51, 1998)
HORIZONS_S: Final = (0, 30, 120, 300, 900)
DUPLICATE_SHARE: Final = 0.01
DELAYED_SHARE: Final = 0.01
LATE_SHARE: Final = 0.01
"""Of the measurements of edits: taken after the turn's window closed."""
HOSTILE_SHARE: Final = 0.01
REMARK_SHARE: Final = 0.2
"""Of the messages after a session's first: about what was done, not about what is next."""
OVERSIZED_BYTES: Final = 70_000
"""Length of an oversized record; the bench's limit is below it and above the largest honest event."""
MAX_EVENT_BYTES: Final = 64_000
"""The limit to run the stream with."""

REQUESTS: Final = (
    "Rename total to amount in {0} and update the callers",
    "Add a test for the empty case in {0}",
    "Now move the retry logic out of {0} into its own function",
    "Füge in {0} eine Prüfung für negative Werte hinzu",
    "Ajoute un test pour {0} quand la liste est vide",
    "{0} にテストを追加してください",
    "why does {0} open the file twice? explain before you change anything",
    "Fix the error handling in {0}: a timeout must not kill the process",
)
REMARKS: Final = (
    "no, that is not what I asked for, undo it",
    "still fails:\nTraceback (most recent call last):\n  File \"{0}\", line 12, in run\nKeyError: 'amount'",
    "thanks, works",
    "das geht immer noch nicht",
    "perfect. commit it",
    "you changed {0} too, revert that part",
    "non, l'autre fichier",
)
FOLDERS: Final = ("src", "api", "store", "app", "lib", "tests", "core", "ui", "jobs", "cmd")
WORDS: Final = ("cart", "client", "parser", "model", "order", "queue", "token", "cache", "render", "invoice", "login", "index", "report")
ENDINGS: Final = ("py", "ts", "go", "rb", "rs", "java", "cpp", "jsx")
BUCKETS: Final = ("edit", "explain", "fix", "test", None)
LANGUAGES: Final = ("en", "en", "en", "de", "fr", "ja", None)


LIFETIME_MS: Final = 366 * 86_400_000
"""How long after START_MS a reader's clock is taken to be where one is needed here."""


class Record(NamedTuple):
    """A Kafka record to send."""

    key: bytes | None
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A record that is no event, and the only reasons that are right for it."""

    record: Record
    reasons: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What share of the records is what; all in [0, 1]."""

    duplicates: float = DUPLICATE_SHARE
    delayed: float = DELAYED_SHARE
    hostile: float = HOSTILE_SHARE


@cache
def _packed() -> tuple[str, str]:
    """Return long texts of packed token ids and of packed log-probabilities, to cut arrays from: three tokens are sixteen characters."""
    rng = np.random.default_rng(20_260_601)
    size = 300_000
    ids = (rng.zipf(1.15, size) % 49_152).astype("<i4")
    logprobs = (-rng.exponential(0.7, size)).astype("<f4")
    return base64.b64encode(ids.tobytes()).decode(), base64.b64encode(logprobs.tobytes()).decode()


def _tokens(rng: random.Random, shape: tuple[float, float]) -> int:
    """Draw a length: log-normal, inside TOKENS_RANGE, and a multiple of three so that its base64 has no padding."""
    low, high = TOKENS_RANGE
    return round(min(max(math.exp(rng.gauss(*shape)), low), high) / 3) * 3


def _cut(rng: random.Random, tokens: int) -> tuple[str, str]:
    """Return packed ids and log-probabilities of so many tokens."""
    ids, logprobs = _packed()
    begin = rng.randrange(0, len(ids) // 16 - tokens // 3) * 16
    return ids[begin : begin + tokens // 3 * 16], logprobs[begin : begin + tokens // 3 * 16]


def _uuid7(at_ms: int, rng: random.Random) -> str:
    bits = rng.getrandbits(74)
    digits = f"{at_ms:012x}7{bits >> 62:03x}{0x8 | (bits >> 60 & 3):x}{bits & (2**60 - 1):015x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _geometric(rng: random.Random, mean: float, most: int) -> int:
    """Draw a whole number from 1 to `most` with (about) that mean."""
    return min(1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean)), most) if mean > 1 else 1


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is None, as the recorder does."""
    return {name: value for name, value in fields.items() if value is not None}


class Session:
    """One session being written down; its clock moves on with every event."""

    def __init__(self, name: str, rng: random.Random, at_ms: int) -> None:
        """Begin a session at an instant."""
        self.name, self.rng, self.at_ms = name, rng, at_ms
        self.events: list[tuple[int, Record]] = []
        self._turn: str | None = None
        self._origin = {
            "origin": rng.choice(("live", "live", "live", "simulated")),
            "policy_version": rng.randrange(1, 5),
            "arm": "candidate" if rng.random() < 0.1 else "serving",
            "user_key": f"{rng.randrange(5_000):016x}",
            "consent": rng.choice(("train", "train", "train", "measure", "none")),
            "client": {"name": "bench", "version": "1"},
        }

    def add(self, kind: str, payload: Mapping[str, Any], *, after_ms: int = 400, at_ms: int | None = None) -> None:
        """Write down one event, up to `after_ms` after the last one, or at an instant of its own that does not move the clock."""
        if at_ms is None:
            self.at_ms += self.rng.randrange(1, after_ms)
        at = self.at_ms if at_ms is None else at_ms
        event = {
            "event_id": _uuid7(at, self.rng), "schema_version": 1, "session_id": self.name, "turn_id": self._turn, "occurred_at_ms": at,
            "recorded_at_ms": at + self.rng.randrange(1, 30), **self._origin, "type": kind, "payload": _said(payload),
        }  # fmt: skip
        self.events.append((at, Record(self.name.encode(), as_json(_said(event)))))

    def turn(self, index: int) -> None:
        """Write down one turn."""
        rng = self.rng
        self._turn = f"{self.name}-{index}"
        remark = index > 0 and rng.random() < REMARK_SHARE
        message = rng.choice(REMARKS if remark else REQUESTS).format(self._file())
        self.add("turn_started", {
            "turn_index": index, "message": message, "message_chars": len(message), "language": rng.choice(LANGUAGES),
            "stack_traces": int("Traceback" in message), "reply_delay_ms": rng.randrange(1_000, 200_000) if index else None,
        }, after_ms=60_000)  # fmt: skip
        steps = _geometric(rng, 2.2, 12)
        for step in range(steps):
            self._completion(step, calls=0 if step == steps - 1 else _geometric(rng, 1.3, 4))
        if rng.random() < 0.6:
            for number in range(_geometric(rng, 1.4, 5)):
                self._edit(number)
        if rng.random() < 0.2:
            self.add("lint_delta", {"issues_before": rng.randrange(5), "issues_after": rng.randrange(5)})
        if rng.random() < 0.2:
            self.add("test_run", {"passed_after": rng.randrange(50), "failed_after": rng.randrange(3)})
        if rng.random() < 0.03:
            self.add("feedback", {"source": "thumb", "score": rng.choice((-1.0, 1.0))}, after_ms=20_000)
        if rng.random() < 0.03:
            self.add("interrupted", {"by": rng.choice(("user", "user", "system"))})

    def _file(self) -> str:
        """Return a path; hardly any two messages are the same then, as a cache of texts must not make the bench look better than life."""
        rng = self.rng
        return f"{rng.choice(FOLDERS)}/{rng.choice(WORDS)}_{rng.choice(WORDS)}{rng.randrange(100)}.{rng.choice(ENDINGS)}"

    def _completion(self, step: int, *, calls: int) -> None:
        rng, identity = self.rng, f"{self._turn}-c{step}"
        prompt, response = _tokens(rng, PROMPT_TOKENS), _tokens(rng, RESPONSE_TOKENS)
        (prompt_ids, _), (response_ids, logprobs) = _cut(rng, prompt), _cut(rng, response)
        self.add("completion", {
            "completion_id": identity, "step": step, "model": "policy", "prompt_ids": prompt_ids, "response_ids": response_ids,
            "behaviour_logprobs": logprobs, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "tokenizer_sha": "4f1c", "template_sha": "88ab",
            "finish_reason": "tool_calls" if calls else "stop", "ttft_ms": round(rng.uniform(40, 900), 2),
            "duration_ms": round(response * rng.uniform(8, 30), 2), "prompt_tokens": prompt, "response_tokens": response,
        }, after_ms=9_000)  # fmt: skip
        for number in range(calls):
            call = f"{identity}-k{number}"
            self.add("tool_call", {
                "tool_call_id": call, "completion_id": identity, "name": rng.choice(("edit_file", "read_file", "search", "run")),
                "arguments_valid": rng.random() < 0.95, "arguments_hash": f"{rng.getrandbits(64):016x}", "parallel_group": step,
            })  # fmt: skip
            result = "ok" if rng.random() < 0.95 else rng.choice(("unknown_tool", "timeout", "unexpected_environment"))
            self.add("tool_result", {
                "tool_call_id": call, "result_class": result, "duration_ms": round(rng.expovariate(1 / 300), 2),
                "exit_code": 0 if result == "ok" else 1, "output_bytes": rng.randrange(10, 9_000),
            }, after_ms=2_000)  # fmt: skip

    def _edit(self, number: int) -> None:
        rng, identity = self.rng, f"{self._turn}-e{number}"
        added = int(rng.lognormvariate(4.5, 1.2))
        self.add("edit_proposed", {
            "edit_id": identity, "path_hash": f"{rng.getrandbits(64):016x}", "lines_added": 1 + added // 40,
            "lines_removed": rng.randrange(9), "chars_added": added, "chars_removed": rng.randrange(200),
        })  # fmt: skip
        if rng.random() < 0.85:
            decision = rng.choice(("accepted", "accepted", "accepted", "rejected", "partly", "undone"))
            self.add("edit_decided", {"edit_id": identity, "decision": decision}, after_ms=30_000)
        kept = 1.0
        for horizon in HORIZONS_S[: rng.randrange(3, len(HORIZONS_S) + 1)]:
            kept *= rng.choice((1.0, 1.0, rng.random()))
            shift = 7_200_000 if rng.random() < LATE_SHARE else 0
            self.add("edit_survival", {
                "edit_id": identity, "horizon_s": horizon, "survival_four_gram": round(kept * 0.97, 4),
                "survival_no_revert": round(kept, 4), "branch_changed": rng.random() < 0.02,
            }, at_ms=self.at_ms + horizon * 1000 + shift)  # fmt: skip

    def whole(self) -> list[tuple[int, Record]]:
        """Write the session down from its start to its end; returns its events with their instants."""
        rng = self.rng
        surface = rng.choice(("cli", "ide", "ide", "api"))
        self.add("session_started", {"surface": surface, "task_bucket": rng.choice(BUCKETS), "repository": f"{rng.getrandbits(64):016x}"})
        for index in range(_geometric(rng, MEAN_TURNS, 40)):
            self.turn(index)
        self._turn = None
        if rng.random() < 0.8:
            self.add("session_ended", {"reason": rng.choice(("done", "done", "abandoned", "idle"))}, after_ms=600_000)
        return self.events


def as_json(event: Mapping[str, Any]) -> bytes:
    """Write an event as the recorder does."""
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()


def _changed(record: Record, **changes: Any) -> Record:
    return Record(record.key, as_json(json.loads(record.value) | changes))


HOSTILE: Final[dict[str, tuple[Callable[[random.Random, Record], Record], frozenset[str]]]] = {
    "empty": (lambda _rng, r: Record(r.key, b""), frozenset({"malformed_json"})),
    "cut": (lambda rng, r: Record(r.key, r.value[: rng.randrange(1, min(len(r.value) - 1, 60))]), frozenset({"malformed_json"})),
    "bad_utf8": (lambda _rng, r: Record(r.key, b"\xff\xfe" + r.value), frozenset({"malformed_json"})),
    "noise": (lambda rng, r: Record(r.key, rng.randbytes(rng.randrange(1, 400))), frozenset({"malformed_json"})),
    "array": (lambda _rng, r: Record(r.key, b"[1,2,3]"), frozenset({"malformed_json"})),
    "wrong_type": (lambda _rng, r: _changed(r, recorded_at_ms="yesterday"), frozenset({"invalid_field"})),
    "wrong_value": (lambda _rng, r: _changed(r, origin="elsewhere"), frozenset({"invalid_field"})),
    "version": (lambda rng, r: _changed(r, schema_version=rng.randrange(90, 99)), frozenset({"unknown_version"})),
    "type": (lambda _rng, r: _changed(r, type="telepathy"), frozenset({"unknown_type"})),
    "no_payload": (lambda _rng, r: _changed(r, payload={}), frozenset({"missing_field"})),
    "future": (lambda _rng, r: _changed(r, occurred_at_ms=START_MS * 2), frozenset({"future_dated"})),
    "key": (lambda _rng, r: Record(b"another", r.value), frozenset({"wrong_key"})),
    "no_key": (lambda _rng, r: Record(None, r.value), frozenset({"wrong_key"})),
    "oversized": (lambda _rng, r: _changed(r, padding="x" * OVERSIZED_BYTES), frozenset({"oversized"})),
}
"""Kind -> (how an honest record becomes one, the reasons that are right for it)."""


def hostile(rng: random.Random, record: Record) -> Hostile:
    """Turn an honest record into one that is no event."""
    make, reasons = HOSTILE[rng.choice(tuple(HOSTILE))]
    return Hostile(record=make(rng, record), reasons=reasons)


def chunk(number: int, *, seed: int = 0, sessions: int = SESSIONS_A_CHUNK, mix: Mix | None = None) -> Iterator[Record]:
    """Yield the records of one chunk in order of arrival.

    Args:
        number: The chunk, from 0; its sessions are its own.
        seed: Other seeds give other events.
        sessions: How many.
        mix: Shares of what is out of order; None means the realistic ones.
    """
    mix = mix or Mix()
    rng = random.Random(f"{seed}-{number}")
    placed: list[tuple[int, int, Record]] = []
    for index in range(sessions):
        begin = START_MS + number * CHUNK_MS + rng.randrange(CHUNK_MS)
        for at, record in Session(f"b{seed}-{number:05d}-{index:04d}", rng, begin).whole():
            delayed = rng.random() < mix.delayed
            placed.append((at + (rng.randrange(1, CHUNK_MS) if delayed else 0), len(placed), record))
            if rng.random() < mix.duplicates:
                placed.append((at + rng.randrange(CHUNK_MS), len(placed), record))
            if rng.random() < mix.hostile:
                placed.append((at, len(placed), hostile(rng, record).record))
    for _, _, record in sorted(placed, key=lambda item: item[:2]):
        yield record
