"""Session events spoilt in many ways, for the bench and for tests: each says whether the contract still takes it for an event.

Takes: a seed and a chunk's number. Gives: records with what was done to them. Leaves out: honest records (`generator.py`) and the kinds of
hostile ones that are mixed under them there.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from pipelines import codec
from pipelines.errors import Rejected
from signals.generator import HOSTILE, LIFETIME_MS, MAX_EVENT_BYTES, START_MS, Mix, Record, as_json, chunk

FUZZ_A_CHUNK: Final = 5_000


def _flipped(rng: random.Random, value: bytes) -> bytes:
    changed = bytearray(value)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _spliced(rng: random.Random, value: bytes) -> bytes:
    begin, end = sorted(rng.randrange(len(value)) for _ in range(2))
    return value[:begin] + rng.choice((b"", rng.randbytes(rng.randrange(1, 40)), value[begin:end] * 2)) + value[end:]


def _with_field(rng: random.Random, value: bytes) -> bytes:
    """Put something unfit into a field of the event or of its payload."""
    event = json.loads(value)
    unfit = rng.choice((None, -1, 2**70, 1e308, True, [], {}, {"a": {"b": []}}, "", "x" * 300, "\x00", "\u202e", [1] * 50, "NaN", -(2**63)))
    place = event["payload"] if rng.random() < 0.5 else event
    place[rng.choice(tuple(place) or ("type",))] = unfit
    return as_json(event)


FUZZ: Final[dict[str, Callable[[random.Random, bytes], bytes]]] = {
    "flipped": _flipped,
    "spliced": _spliced,
    "unfit_value": _with_field,
    "truncated": lambda rng, value: value[: rng.randrange(len(value))],
    "random_bytes": lambda rng, _value: rng.randbytes(rng.randrange(300)),
    "brackets": lambda rng, _value: b"[" * rng.randrange(1, 5_000),
    "deep": lambda rng, value: value[:-1] + b',"deep":' + b'{"a":' * rng.randrange(1, 3_000),
    "goes_on": lambda rng, value: value + rng.choice((b"}", b"{}", b"\x00", value)),
    "wide_characters": lambda rng, value: value.decode().encode(rng.choice(("utf-16", "utf-32"))),
    "payload_is_text": lambda _rng, value: value.replace(b'"payload":{', b'"payload":"', 1),
    "odd_number": lambda rng, value: re.sub(
        rb":(\d+)", lambda _found: b":" + rng.choice((b"NaN", b"1e999", b"-0", b"0x1", b"1.5", b"7", b"9" * 30)), value, count=1
    ),
    "bare_text": lambda _rng, value: re.sub(
        rb':"([\w.-]+)"', lambda found: b":" + (b"5" if found[1][:1].isalpha() else found[1]), value, count=2
    ),
    "text_is_more": lambda rng, value: re.sub(rb':"[^"]*"', b":" + rng.choice((b"[1]", b"{}", b"true", b"null", b'[":"]')), value, count=1),
    "twice": lambda rng, value: value[:-1] + b"," + rng.choice((value[1:-1], b'"user_key":7', b'"user_key":"z"', b'"arm":null')) + b"}",
    "unknown_field": lambda rng, value: value[:-1] + rng.choice((b',"x":1}', b',"x" :"y"}', b',"arm" : 5}', b',"x":NaN}', b',"x":[":"]}')),
    "white_space": lambda rng, value: value.replace(b'":', rng.choice((b'" :', b'"\t:\n', b'":\x0b')), rng.randrange(1, 9)),
    "surrogates": lambda rng, value: value.replace(b'":"', b'":"\\ud800', rng.randrange(1, 4)),
    "single_quotes": lambda _rng, value: value.replace(b'"', b"'"),
    "base64": lambda rng, value: re.sub(
        rb"([A-Za-z0-9+/]{40})", lambda found: rng.choice((found[1][1:], b"-" + found[1][1:], found[1] + b"=")), value, count=1
    ),
}
"""Ways to spoil the bytes of an honest event, by name. Some leave an event by chance: its judge is the contract, not its maker."""
FUZZ_KEYS: Final[tuple[Callable[[random.Random, bytes | None], bytes | None], ...]] = (
    *(lambda _rng, key: key,) * 9,
    lambda _rng, _key: None,
    lambda rng, _key: rng.randbytes(rng.randrange(1, 200)),
)
HONEST_KIND: Final = "honest"
HONEST_EVERY: Final = 50
"""One fuzzed record in so many is left as it was: a judge that turns everything down must not pass."""


class Fuzzed(NamedTuple):
    """A record that was spoilt, or left as it was."""

    kind: str
    """What was done to it: a key of FUZZ or of HOSTILE, or `honest`."""
    record: Record
    event: bool
    """Whether the contract takes it for an event all the same."""


def is_event(record: Record, *, now_ms: int = START_MS + LIFETIME_MS) -> bool:
    """Return whether the contract takes a record for an event."""
    return not isinstance(codec.decode(record.value, MAX_EVENT_BYTES, now_ms=now_ms, key=record.key or b""), Rejected)


def _fuzzed(rng: random.Random, record: Record) -> tuple[str, Record]:
    if rng.random() < 0.3:
        kind = rng.choice(tuple(HOSTILE))
        return kind, HOSTILE[kind][0](rng, record)
    kind = rng.choice(tuple(FUZZ))
    value = FUZZ[kind](rng, record.value)[:MAX_EVENT_BYTES] or b"\x00"
    return kind, Record(rng.choice(FUZZ_KEYS)(rng, record.key), value)


def fuzz_chunk(number: int, *, seed: int = 0, records: int = FUZZ_A_CHUNK) -> Iterator[Fuzzed]:
    """Yield records made of the honest ones of a chunk until so many of them are no events; the others are yielded too, and say so.

    Args:
        number: The chunk, from 0.
        seed: Other seeds give other records.
        records: How many hostile ones.
    """
    rng = random.Random(f"fuzz-{seed}-{number}")
    honest = list(chunk(number, seed=seed, sessions=20, mix=Mix(duplicates=0, delayed=0, hostile=0)))
    small = [record for record in honest if len(record.value) < 8_000] or honest
    while records > 0:
        record = rng.choice(small)
        kind, record = (HONEST_KIND, record) if rng.randrange(HONEST_EVERY) == 0 else _fuzzed(rng, record)
        event = is_event(record)
        records -= not event
        yield Fuzzed(kind, record, event)
