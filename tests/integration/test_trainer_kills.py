"""An update that is killed again and again, at moments drawn by a seeded generator, against one that is left alone.

`TIDEGATE_KILLS=20` kills twenty times; by default it is a few, to be quick.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines.storage import Home
from tests.support.model import on_policy_records, write_samples
from trainer import candidates
from trainer import job as jobs

pytestmark = [pytest.mark.deepspeed, pytest.mark.model, pytest.mark.slow]

KILLS = int(os.environ.get("TIDEGATE_KILLS", "3"))
RUNNER = """
import json, sys
from datetime import datetime
from pathlib import Path
from cyclopts import App
from pipelines.config import load
from pipelines.storage import Home
from pipelines.terminal import run
from trainer.config import TrainerConfig
from trainer.update import update

app = App()

@app.default
def main():
    made = update(load(TrainerConfig, overrides=json.loads(sys.argv[1])), Home(Path(sys.argv[2])), parent=sys.argv[3], policy_version=1,
                  lake_version=None, now=datetime.fromisoformat(sys.argv[4]))
    print(made["path"])

sys.exit(run(app, []))
"""
SETTINGS = (
    "trainer.world_size=2", "trainer.dtype=fp32", "trainer.lora_rank=4", "trainer.lr=1e-3", "trainer.passes=8", "trainer.rows_per_step=8",
    "trainer.max_tokens_per_micro_batch=128", "trainer.collective_timeout_s=60", "trainer.timeout_s=240", "trainer.kl_budget=10.0",
    "mlflow.tracking_uri=http://127.0.0.1:9",
)  # fmt: skip
STEPS = 24
"""24 rows, 8 a step, 8 passes."""


def deployment(root, tiny_store, records):
    store, identity = tiny_store
    home = Home(root)
    shutil.copytree(store / identity, home.store / identity)
    write_samples(home.lake, records)
    return home


def start(home, identity, said):
    words = [sys.executable, "-c", RUNNER, json.dumps(SETTINGS), str(home.root), identity, "2026-11-30T13:00:00+00:00"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def victims(process):
    """The command, torchrun and the ranks, as far as they are there: (which, process)."""
    found = [("command", psutil.Process(process.pid))]
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [(word, child) for word in child.cmdline() if word in ("trainer.rank", "torch.distributed.run")]
    return found


def kill_at(process, home, moment_s, rng):
    """Kill one of a run's processes after so long; returns what was killed at which step, None when the run ended before.

    A good part of a run is its start, so half of the moments are counted from the first sign of training.
    """
    if rng.random() < 0.5:
        while process.poll() is None and not list(home.training.glob(f"*/{jobs.PROGRESS}")):
            time.sleep(0.01)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=moment_s)
        return None
    which, victim = rng.choice(victims(process))
    step = reached(home)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.kill()
    return which, step


def reached(home):
    """Newest checkpoint's step, 0 for none."""
    return max([int(path.name[5:]) for path in home.training.glob("*/checkpoints/step-*")], default=0)


def tensors(path):
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def same(made, whole):
    """Bit for bit, in weights and in what the manifest says of the training."""
    ours, theirs = tensors(made), tensors(whole)
    assert set(ours) == set(theirs)
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    assert candidates.read_manifest(made).training == candidates.read_manifest(whole).training


def test_an_update_killed_at_random_moments_equals_an_uninterrupted_one_bit_for_bit(tiny_store, tiny_folder, tmp_path):
    records, rng = on_policy_records(tiny_folder, 24), random.Random(5)
    begun = time.monotonic()
    with (
        (tmp_path / "whole.txt").open("wb") as said,
        start(deployment(tmp_path / "whole", tiny_store, records), tiny_store[1], said) as run,
    ):
        whole = Path(run.communicate(timeout=300)[0].strip())
    seconds = time.monotonic() - begun
    assert candidates.verify(whole).training["steps"] == STEPS
    kills, lives = [], 0
    while len(kills) < KILLS:
        lives += 1
        home, ended = deployment(tmp_path / f"life-{lives}", tiny_store, records), False
        while not ended:
            with (tmp_path / "said.txt").open("wb") as said, start(home, tiny_store[1], said) as run:
                killed = kill_at(run, home, rng.uniform(0, seconds / 2), rng) if len(kills) < KILLS else None
                made, code = run.communicate(timeout=300)[0].strip(), run.returncode
            words = (tmp_path / "said.txt").read_text()
            kills += [(*killed, code)] if killed else []
            # torchrun or a rank may be killed when its work is done; the command itself dies of it
            assert code == 0 or code == (-signal.SIGKILL if killed and killed[0] == "command" else 75), (kills, words)
            assert code != 75 or "the same command goes on from the last checkpoint" in words
            ended = code == 0
        same(Path(made), whole)
        assert sorted(path.name for path in home.store.iterdir()) == sorted({tiny_store[1], Path(made).name})
    print(f"{len(kills)} kills in {lives} updates, each {seconds:.1f} s when left alone; (process, steps done, exit code): {kills}")
