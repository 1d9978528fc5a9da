"""A disk that is really full: one sentence and exit code 75, nothing half-written, and the same command again goes on."""

import base64
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import kafka
from pipelines.config import KafkaConfig, PipelinesConfig
from pipelines.storage import Home
from tests.support.spark import as_record, event

pytestmark = [pytest.mark.sandbox]

DISK_BYTES = 250_000_000
LEFT_BYTES = (1_500_000, 34_000_000, 64_000_000)
"""Too little for Spark to start (it takes a copy of its jars, 23 MB); enough for that, and too little for a batch (32 MB); enough for both,
and too little for what is distilled from it (24 MB)."""

UPKEEP = """
import json, os, random, sys
from pathlib import Path
from pipelines.errors import StorageFull
from pipelines.storage import Home
from signals import lake, maintenance
from signals.config import LakeConfig, SignalsConfig
from tests.support.lakes import NOW, book, event_row

home, rng = Home(Path(sys.argv[1])), random.Random(1)
lake.create_missing(home)
for n in range(8):
    old = 100 if n < 4 else 1
    lake.append(home, "events", [event_row(n, session=f"s{n}", days_ago=old, original=rng.randbytes(400_000)),
                                 event_row(8 + n, session=f"s{n}", days_ago=old)])
book(home)
with (home.root / "filler").open("wb") as file:
    stat = os.statvfs(home.root)
    file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - 700_000)))
before = lake.versions(home)["events"]
try:
    maintenance.compact(home, LakeConfig(), now=NOW)
    said = "it was done"
except StorageFull as error:
    said = str(error)
full = {"said": said, "rows": lake.events(home).num_rows, "moved": lake.versions(home)["events"] - before}
(home.root / "filler").unlink()
merged = maintenance.compact(home, LakeConfig(), now=NOW)
gone = maintenance.retain(home, SignalsConfig(), now=NOW, apply=True)["rows"]
print(json.dumps({"full": full, "files": [item["files_after"] for item in merged if item["table"] == "events"], "gone": gone,
                  "rows": lake.events(home).num_rows}))
"""


def disk(home: Path, size_bytes: int) -> list[str]:
    """Return the start of a command that sees a small disk of its own at `home`."""
    home.mkdir()
    return ["bwrap", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--size", str(size_bytes), "--tmpfs", str(home)]


def test_upkeep_on_a_full_disk_changes_nothing_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    command = [*disk(tmp_path / "disk", 16_000_000), sys.executable, "-c", UPKEEP, str(tmp_path / "disk")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "no space left to write" in found["full"]["said"]
    assert (found["full"]["rows"], found["full"]["moved"]) == (16, 0)
    assert (found["files"], found["gone"]["events"], found["rows"]) == ([1, 1], 8, 8)


INSIDE = """
import json, os, subprocess, sys
from pathlib import Path
from pipelines.storage import Home
from signals import lake

home, command = Path(sys.argv[1]), sys.argv[2:]
options = command[command.index("--home"):]

def signals(*words):
    done = subprocess.run([sys.executable, "-m", "signals", *words, "--json", *options], capture_output=True, text=True)
    return {"code": done.returncode, "out": done.stdout, "said": done.stderr[-1500:]}

lake.create_missing(Home(home))
full = []
for left in LEFT:
    with (home / "filler").open("wb") as file:
        stat = os.statvfs(home)
        file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - left)))
    full.append(signals("run", "--once") | {"rows": lake.count(Home(home), "events")})
    (home / "filler").unlink()
print(json.dumps({"full": full, "again": signals("run", "--once"), "check": signals("check")}))
"""


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(kafka_config: KafkaConfig, tmp_path: Path) -> None:
    rng = random.Random(31)
    events = [
        event("completion", number, number, {"completion_id": "c", "prompt_ids": base64.b64encode(rng.randbytes(600_000)).decode()},
              session_id=f"s{number}")
        for number in range(40)
    ]  # fmt: skip
    config = PipelinesConfig(kafka=kafka_config)
    kafka.ensure_topics(config, Home(tmp_path / "unused"))
    with kafka.Producer(config, Home(tmp_path / "unused")) as producer:
        for key, value in map(as_record, events):
            producer.send(value, key.decode())
    home = tmp_path / "disk"
    settings = {"kafka.bootstrap_servers": kafka_config.bootstrap_servers, "kafka.topic": kafka_config.topic, "kafka.partitions": 2,
                "spark.driver_memory": "700m", "spark.master": "local[1]"}  # fmt: skip
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    command = [sys.executable, "-m", "signals", "run", "--once", "--json", "--home", str(home), *flags]
    script = [sys.executable, "-c", INSIDE.replace("LEFT", str(LEFT_BYTES)), str(home), *command]
    done = subprocess.run([*disk(home, DISK_BYTES), *script], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for full in found["full"]:
        assert full["code"] == 75, full
        assert "Traceback" not in full["said"]
        assert "no space left" in full["said"].strip().splitlines()[-1].lower()
    assert [full["rows"] for full in found["full"]] == [0, 0, len(events)]
    assert found["again"]["code"] == 0, found["again"]
    assert found["check"]["code"] == 0, found["check"]
    assert sum(own["events"] for own in json.loads(found["check"]["out"])["partitions"]) == len(events)
