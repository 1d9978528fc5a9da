"""A disk that is really full, for a training job: one sentence and exit code 75, the serving checkpoint untouched, the next run goes on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_full_disk import disk
from tests.support.model import on_policy_records, write_samples

pytestmark = [pytest.mark.sandbox, pytest.mark.deepspeed, pytest.mark.model, pytest.mark.slow]

DISK_BYTES = 24_000_000
LEFT_BYTES = {"nothing": 0, "less than a checkpoint": 70_000, "checkpoints but not the candidate": 480_000}
"""On the tiny model: the job's own files take 20 kB, each of three checkpoints of the adapters 115 kB, the candidate 450 kB."""
SMALLER = ("trainer.world_size=1", "trainer.lora_rank=1")

INSIDE = """
import json, os, shutil, subprocess, sys
from datetime import datetime
from pathlib import Path
from pipelines.config import load
from pipelines.storage import Home
from trainer import candidates
from trainer.config import TrainerConfig

home, source, parent, left = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
words = [sys.executable, "-c", sys.argv[5], sys.argv[6], str(home), parent, "2026-11-30T13:00:00+00:00"]
shutil.copytree(source, home, dirs_exist_ok=True)

def update():
    done = subprocess.run(words, capture_output=True, text=True)
    return {"code": done.returncode, "out": done.stdout.strip(), "said": done.stderr[-1500:]}

def steps():
    return sum('"loss"' in line for path in home.glob("training/*/progress.jsonl") for line in path.read_text().splitlines())

full = {}
for what, size in left.items():
    with (home / "filler").open("wb") as file:
        stat = os.statvfs(home)
        file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - size)))
    full[what] = update() | {"store": [path.name for path in (home / "store").iterdir()], "steps": steps()}
    candidates.verify(home / "store" / parent)
    (home / "filler").unlink()
again = update()
print(json.dumps({"full": full, "again": again, "made": candidates.verify(Path(again["out"])).training if again["code"] == 0 else None}))
"""


def test_on_a_full_disk_an_update_says_so_and_the_same_command_goes_on_once_there_is_room(tiny_store, tiny_folder, tmp_path: Path) -> None:
    from tests.integration.test_trainer_kills import RUNNER, SETTINGS, STEPS

    store, parent = tiny_store
    shutil.copytree(store / parent, tmp_path / "source" / "store" / parent)
    write_samples(tmp_path / "source" / "lake", on_policy_records(tiny_folder, 24))
    home = tmp_path / "disk"
    words = [str(home), str(tmp_path / "source"), parent, json.dumps(LEFT_BYTES), RUNNER, json.dumps([*SETTINGS, *SMALLER])]
    command = [*disk(home, DISK_BYTES), sys.executable, "-c", INSIDE, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for what, full in found["full"].items():
        assert full["code"] == 75, (what, full)
        assert "no space left" in full["said"].strip().splitlines()[-1].lower(), (what, full)
        assert full["store"] == [parent], (what, full)
    assert [full["steps"] for full in found["full"].values()] == [0, 1, STEPS], found["full"]
    assert found["again"]["code"] == 0, found["again"]
    assert found["made"]["steps"] == STEPS
