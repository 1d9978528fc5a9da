"""A forgotten user is in no byte of the lake, of the spool or of the files of large events; everybody else is untouched."""

import base64
import json
from pathlib import Path

import pytest

from pipelines import claims, spool
from pipelines.config import KafkaConfig
from pipelines.errors import Busy
from pipelines.storage import Home, exclusive
from signals import checks, forget, lake
from signals.config import SignalsConfig
from tests.support.lakes import NOW, book, event_row, fitted, naming, refused_row, turn_row

CONFIG = SignalsConfig(kafka=KafkaConfig(bootstrap_servers="127.0.0.1:1", topic="t"))
GONE, STAYS = "a1b2c3d4e5f60718293a4b5c6d7e8f90", "00ff00ff00ff00ff00ff00ff00ff00ff"
OWN, OTHER = "session-of-the-user-that-is-to-go", "session-of-somebody-else"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Two users in every table that can hold one, in several versions, and in quarantined bytes."""
    made = Home(tmp_path)
    lake.create_missing(made)
    for offset, (session, user) in enumerate([(OWN, GONE), (OTHER, STAYS), (OWN, GONE), (OTHER, STAYS)]):
        lake.append(made, "events", [event_row(offset, session=session, user=user, payload={"message": f"words of {user}"})])
    broken = [f'{{"user_key":"{GONE}","cut'.encode(), b"anna@example.org wrote this", b"nobody", f'{{"session_id":"{OTHER}"'.encode()]
    lake.append(made, "quarantine", [refused_row(4 + number, raw) for number, raw in enumerate(broken)])
    book(made)
    for name in ("turns", "rewards", "edits", "samples", "conflicts"):
        rows = [turn_row(OWN, user=GONE), turn_row(OTHER, user=STAYS)]
        if name == "samples":
            rows = [row | {"completion_id": row["turn_id"], "attempt": 0, "consent": "train", "served_at": NOW} for row in rows]
        for _ in range(2):
            lake.replace_days(made, name, fitted(name, rows), [NOW.date()])
    keys = {"policy_version": 1, "arm": "serving", "origin": "live", "outcome": "scored", "date": NOW.date()}
    lake.replace_days(made, "ledger_counts", [keys | {"turns": 2}], [NOW.date()])
    return made


def run(home: Home, raw: str | None = None) -> dict[str, object]:
    return forget.forget(home, CONFIG, GONE, raw=raw, now=NOW, delete_records=False)


def test_no_byte_of_the_lake_names_a_forgotten_user(home: Home) -> None:
    assert len(naming(home.lake, GONE, OWN)) > 10, "the scan sees the user before"
    done = run(home, raw="anna@example.org")
    assert naming(home.lake, GONE, OWN, "anna@example.org") == []
    assert done["rows"] == {"events": 2, "quarantine": 2, "turns": 1, "rewards": 1, "edits": 1, "samples": 1, "conflicts": 1}
    assert done["sessions"] == 1


def test_everybody_else_is_untouched_and_the_ledger_still_adds_up(home: Home) -> None:
    run(home)
    assert lake.events(home)["payload"].to_pylist()[0]["message"] == f"words of {STAYS}"
    assert sorted(lake.events(home)["offset"].to_pylist()) == [1, 3]
    assert sorted(lake.read(home, "quarantine")["offset"].to_pylist()) == [5, 6, 7], (
        "without the name, that record cannot be known as theirs"
    )
    for name in ("turns", "rewards", "edits", "samples", "conflicts"):
        assert lake.read(home, name)["session_id"].to_pylist() == [OTHER]
    assert [row["turns"] for row in lake.counts(home)] == [1]
    checks.quick(home)
    assert checks.figures(home)[0].removed == 3
    lake.append(home, "events", [event_row(8, session=OTHER, user=STAYS)])
    assert lake.count(home, "events") == 3, "a table whose log was cut takes further commits"


def test_a_stream_state_still_fits_the_lake_after_its_log_was_cut(home: Home) -> None:
    lake.append(home, "events", [event_row(9, session=OTHER, user=STAYS)], transaction=("append:u", 3))
    run(home)
    assert lake.open_table(home, "events").transaction_version("append:u") == 3


def test_what_waits_on_disk_is_forgotten_too(home: Home) -> None:
    box = spool.Spool(home, max_bytes=10_000)
    for user in (GONE, STAYS):
        box.append(json.dumps({"user_key": user}).encode())
    held = run(home)["spool"]
    assert held == {"spooled": 0, "held": 1, "quarantined": 0, "claims": 0}
    box.close()
    rejected = home.spool / "quarantine" / "oversized.jsonl"
    rejected.parent.mkdir()
    lines = [json.dumps({"raw": base64.b64encode(f'{{"user_key":"{user}"}}'.encode()).decode()}) for user in (GONE, STAYS)]
    rejected.write_text("\n".join(lines) + "\n")
    for user in (GONE, STAYS):
        claims.put(CONFIG.kafka, home, json.dumps({"user_key": user}).encode(), session_id="s", now=NOW)
    assert run(home)["spool"] == {"spooled": 1, "held": 0, "quarantined": 1, "claims": 1}
    assert naming(home.root, GONE) == []
    assert len(naming(home.root, STAYS)) > 3


def test_what_remains_elsewhere_is_said(home: Home) -> None:
    report = home.reports / "report.html"
    report.parent.mkdir()
    report.write_text(f"<p>{OWN}</p>")
    remains = " ".join(run(home)["remains"])  # type: ignore[arg-type]
    assert "the broker was not reached: the topic keeps this user's records until retention ends" in remains
    assert f"{report} names this user" in remains
    assert "keep what they learned" in remains


def test_it_waits_for_no_running_job(home: Home) -> None:
    with exclusive(home.run / "signals.lock", what="the signals job"), pytest.raises(Busy, match="stop it first: tidegate down"):
        run(home)


def test_a_user_nobody_knows_leaves_everything_as_it_is(home: Home) -> None:
    done = forget.forget(home, CONFIG, "f" * 32, raw=None, now=NOW, delete_records=False)
    assert (done["sessions"], done["rows"]) == (0, {})
    assert lake.count(home, "events") == 4
