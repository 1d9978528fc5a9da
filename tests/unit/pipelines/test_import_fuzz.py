"""Damaged transcripts of every format: cut, garbled, shuffled, repeated, with values of the wrong type. Nothing raises, all is counted."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines import codec
from pipelines.importers import engine, registry, sniffing
from tests.unit.pipelines.test_import_formats import FILES, SAMPLES, stamp

HOSTILE = (
    None,
    True,
    -1,
    2**70,
    1e400,
    "",
    "\ud83d",
    "x" * 300,
    [],
    [[]],
    {},
    {"type": 7},
    "[Request interrupted by user",
    "9999-99-99T00:00:00Z",
)
MARKS = (b"\n", b"{", b'"', b"\\", b"\xff")
CONFIG = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def broken_promises(name: str, data: bytes, folder: Path) -> list[str]:
    """Import one file twice and name what does not hold of what must hold whatever is in it."""
    path = folder / FILES[name]
    path.write_bytes(data)
    sniffing.describe(sniffing.look(path))
    registry.recognise(sniffing.look(path))
    module = registry.load(name)
    both: list[list[bytes]] = []
    broken: list[str] = []
    for _ in range(2):
        importer = engine.Importer(module.read, module.Mapper(stamp(name)))
        events = list(importer.events([path]))
        both.append([codec.encode(event) for event in events])
        counts = importer.counts
        faults = sum(n for reason, n in counts.rejected.items() if not reason.startswith("not_a_session_event"))
        holds = {
            "every record is accepted, a duplicate or rejected": (
                counts.lines == counts.accepted + counts.duplicates + sum(counts.rejected.values())
            ),
            "every damaged record is counted": counts.fault_count == faults,
            f"every record can be mapped, or is told why not {counts.faults}": "unmappable" not in counts.rejected,
            "every event is counted": sum(counts.events.values()) == len(events),
            "every event has its own id": len({event.event_id for event in events}) == len(events),
            "every event is read back as it is": all(
                codec.decode(codec.encode(event), 1_000_000, key=event.session_id) == event for event in events
            ),
        }
        broken += [promise for promise, kept in holds.items() if not kept]
    return broken + ([] if both[0] == both[1] else ["a second import gives the same bytes"])


def sample(name: str) -> bytes:
    return (SAMPLES / FILES[name]).read_bytes()


@pytest.mark.parametrize("name", FILES)
@CONFIG
@given(data=st.data())
def test_bytes_cut_and_garbled_break_no_promise(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    raw = bytearray(sample(name)[: data.draw(st.integers(0, 20_000))])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"\n", b"{", b'"', b"\\", b"\xff"])
        )
    assert broken_promises(name, bytes(raw), tmp_path_factory.getbasetemp()) == []


@pytest.mark.parametrize("name", FILES)
@CONFIG
@given(data=st.data())
def test_records_shuffled_repeated_and_with_hostile_values_break_no_promise(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert broken_promises(name, _mutated(name, data), tmp_path_factory.getbasetemp()) == []


def _mutated(name: str, data: st.DataObject) -> bytes:
    text = sample(name).decode()
    if name == "aider":
        rows = text.split("\n")
        picks = data.draw(st.lists(st.sampled_from(rows) | st.text(max_size=8), max_size=30))
        return "\n".join([rows[1], *picks]).encode("utf-8", "replace")
    if name in ("openhands", "swe-agent"):
        document = json.loads(text)
        rows = document if isinstance(document, list) else document["trajectory"]
        picked = _picked(rows, data)
        changed = picked if isinstance(document, list) else document | {"trajectory": picked}
        return json.dumps(changed).encode()
    rows = [json.loads(line) for line in text.splitlines()]
    return "\n".join(json.dumps(row) for row in _picked(rows, data)).encode()


def _picked(rows: list[Any], data: st.DataObject) -> list[Any]:
    picked = [json.loads(json.dumps(row)) for row in data.draw(st.lists(st.sampled_from(rows), max_size=12))]
    for _ in range(data.draw(st.integers(0, 5))):
        if picked:
            _spoil(data.draw(st.sampled_from(picked)), data)
    return picked


def _spoil(value: Any, data: st.DataObject) -> None:
    """Replace one value somewhere inside."""
    while isinstance(value, dict | list) and value:
        key = data.draw(st.sampled_from(list(value))) if isinstance(value, dict) else data.draw(st.integers(0, len(value) - 1))
        if not isinstance(value[key], dict | list) or not value[key] or data.draw(st.integers(0, 3)) == 0:
            value[key] = deepcopy(data.draw(st.sampled_from(HOSTILE)))
            return
        value = value[key]
