"""What the monitors saw reaches the people who look at `status`, `doctor` and `/metrics`."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from deploy import doctor, status
from deploy.config import Config
from pipelines.storage import Home
from signals import monitors_alarms
from signals.monitors_alarms import Latest

NOW = datetime(2026, 5, 4, 9, tzinfo=UTC)
ALARM = Latest(
    computed_at=NOW, state="policy", sentence="policy 2 behaves differently: asks 5.0% -> 40.0%", do="roll back: see the runbook"
)
QUIET = Latest(computed_at=NOW, state="quiet", sentence="quiet: 27 comparisons, none beyond its limit", do="")


def found(home: Home, *, now: datetime = NOW) -> list[doctor.Finding]:
    return list(doctor.drift(doctor.Place(config=Config(), home=home, now=now)))


def test_doctor_warns_of_an_alarm_and_says_what_to_do(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert [(item.level, item.found) for item in found(home)] == [("ok", "the monitors have not looked yet")]
    monitors_alarms.write(home, QUIET)
    assert [item.level for item in found(home)] == ["ok"]
    monitors_alarms.write(home, ALARM)
    assert [(item.level, item.do) for item in found(home)] == [("warn", ALARM.do)]


def test_doctor_minds_the_age_of_the_last_look_only_while_a_stream_should_look(tmp_path: Path) -> None:
    home = Home(tmp_path)
    monitors_alarms.write(home, QUIET)
    assert [item.check for item in found(home, now=NOW + timedelta(hours=9))] == ["drift"]


def test_status_says_it_in_one_line_and_in_json(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert status.gather(Config(), home, now=NOW)["drift"] is None
    monitors_alarms.write(home, ALARM)
    seen = status.gather(Config(), home, now=NOW)
    assert seen["drift"]["state"] == "policy"
    text = status.to_text(seen)
    assert f"drift      {ALARM.sentence}; looked 2026-05-04T09:00:00" in text
    assert f"           -> {ALARM.do}" in text
