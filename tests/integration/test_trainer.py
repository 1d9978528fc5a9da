"""Real DeepSpeed ranks by torchrun on a tiny model: one update end to end, kills, world sizes, refusals."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipelines.errors import CheckpointInvalid, ContractViolation, TransientError
from pipelines.storage import Home
from tests.support.model import on_policy_records, write_samples
from trainer import candidates
from trainer import job as jobs
from trainer.config import TrainerConfig
from trainer.update import open_job, prepare, read_state, update

pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),  # MLflow's own use of SQLAlchemy 2.1
]

NOW = datetime(2026, 11, 30, 13, tzinfo=UTC)
TRAINING = {
    "dtype": "fp32", "lora_rank": 4, "lr": 1e-3, "passes": 2, "rows_per_step": 12, "max_tokens_per_micro_batch": 128,
    "collective_timeout_s": 60, "timeout_s": 240, "kl_budget": 1.0,
}  # fmt: skip


NOBODY = "http://127.0.0.1:9"
"""Runs are tracked where nobody answers, but for the one whose figures are looked at: tracking never decides over training."""


def settings(*, tracking_uri=NOBODY, **changes):
    return TrainerConfig.model_validate({"trainer": TRAINING | changes, "mlflow": {"tracking_uri": tracking_uri}})


def weights(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def records(tiny_folder):
    return on_policy_records(tiny_folder, 24)


@pytest.fixture
def home(tiny_store, tmp_path):
    store, identity = tiny_store
    shutil.copytree(store / identity, tmp_path / "home" / "store" / identity)
    return Home(tmp_path / "home")


@pytest.fixture(scope="module")
def two_ranks(tiny_store, records, tmp_path_factory):
    """One update on two ranks, shared by the tests that look at it."""
    store, identity = tiny_store
    home = Home(tmp_path_factory.mktemp("two") / "home")
    shutil.copytree(store / identity, home.store / identity)
    extra = [records[0] | {"completion_id": "x1", "outcome": "pending", "reward": None}, records[1] | {"completion_id": "x2", "top_p": 0.9}]
    write_samples(home.lake, [*records, *extra])
    result = update(settings(world_size=2, tracking_uri=""), home, parent=identity, policy_version=1, lake_version=None, now=NOW)
    return home, identity, result


def test_an_update_on_two_ranks_seals_a_candidate_that_moved_towards_the_reward(two_ranks, records):
    from trainer.model import Policy, load, score
    from trainer.packing import reply_row

    home, parent, result = two_ranks
    manifest = candidates.verify(home.store / result["checkpoint"])
    assert (manifest.kind, manifest.parent, manifest.lake_version, manifest.reward_version) == ("update", parent, 0, "r1")
    assert manifest.training["rows"] == 24
    assert manifest.training["rejected.not_scored"] == 1
    assert manifest.training["rejected.truncated_sampling"] == 1
    assert manifest.training["steps"] == 4
    assert manifest.training["parity_median"] < 1e-5
    assert manifest.training["probe_gap_nats"] < 1e-4
    rows = [reply_row(np.frombuffer(r["prompt_ids"], "<i4"), np.frombuffer(r["response_ids"], "<i4")) for r in records]
    before = [np.frombuffer(r["behaviour_logprobs"], "<f4") for r in records]
    after = [logprobs for logprobs, _ in score(Policy(load(home.store / result["checkpoint"])).eval(), rows)]
    gain = np.asarray([new.mean() - old.mean() for new, old in zip(after, before, strict=True)])
    rewarded = np.asarray([r["reward"] > 0 for r in records])
    assert gain[rewarded].mean() > gain[~rewarded].mean() + 0.01


def test_the_same_update_again_is_the_same_candidate_at_once(two_ranks):
    home, parent, result = two_ranks
    started = time.monotonic()
    again = update(settings(world_size=2), home, parent=parent, policy_version=1, lake_version=0, now=NOW + timedelta(minutes=5))
    assert (again["checkpoint"], again["cached"]) == (result["checkpoint"], True)
    assert time.monotonic() - started < 10


def test_baselines_and_consumed_rows_follow_the_candidate(two_ranks, records):
    home, _, result = two_ranks
    state = read_state(home.store / result["checkpoint"])
    assert set(state["consumed"]) == {r["completion_id"] for r in records}
    assert set(state["ema"]) == {"rename/0/en", "rename/1/en"}
    nothing = update(settings(), home, parent=result["checkpoint"], policy_version=2, lake_version=None, now=NOW)
    assert nothing["checkpoint"] is None
    assert "consumed 24" in nothing["reason"]


def test_every_steps_figures_are_tracked(two_ranks):
    home, _, _ = two_ranks
    with sqlite3.connect(home.mlflow / "mlflow.sqlite") as database:
        steps = database.execute("select count(*) from metrics where key = 'loss'").fetchone()[0]
    assert steps == 4


def one_rank_job(tiny_store, records, root):
    """Write one and the same job into a folder of its own."""
    store, identity = tiny_store
    home = Home(root / "home")
    shutil.copytree(store / identity, home.store / identity)
    write_samples(home.lake, records)
    return home, identity


@pytest.fixture(scope="module")
def one_rank(tiny_store, records, tmp_path_factory):
    home, identity = one_rank_job(tiny_store, records, tmp_path_factory.mktemp("one"))
    return home, identity, update(settings(world_size=1), home, parent=identity, policy_version=1, lake_version=None, now=NOW)


def test_one_and_two_ranks_agree_to_a_hundredth_of_the_change(one_rank, two_ranks, tiny_folder):
    # the same sums in another order: fp32 rounding, amplified by Adam where a gradient is near zero
    one, two, parent = weights(Path(one_rank[2]["path"])), weights(Path(two_ranks[2]["path"])), weights(tiny_folder)
    apart = np.sqrt(sum(np.square(one[name] - two[name]).sum() for name in one))
    moved = np.sqrt(sum(np.square(one[name] - parent[name]).sum() for name in one))
    assert moved > 0
    assert apart / moved < 1e-2


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_nodes_that_meet_over_the_loopback_train_as_two_ranks_do(two_ranks, tiny_store, records, tiny_folder, tmp_path):
    home, identity = one_rank_job(tiny_store, records, tmp_path)
    meeting = {"world_size": 1, "nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    words = [sys.executable, "-m", "trainer", "join", "--home", str(home.root), "--json"]
    with (tmp_path / "said.txt").open("wb") as said, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said) as other:
        result = update(settings(**meeting), home, parent=identity, policy_version=1, lake_version=None, now=NOW)
        answer = json.loads(other.communicate(timeout=60)[0])
    assert (answer["exit_code"], other.returncode) == (0, 0)
    assert result["steps"] == 4
    one, two, parent = weights(Path(result["path"])), weights(Path(two_ranks[2]["path"])), weights(tiny_folder)
    apart = np.sqrt(sum(np.square(one[name] - two[name]).sum() for name in one))
    moved = np.sqrt(sum(np.square(one[name] - parent[name]).sum() for name in one))
    assert apart / moved < 1e-2


def test_a_node_that_never_comes_is_said_with_what_to_do(tiny_store, records, tmp_path):
    home, identity = one_rank_job(tiny_store, records, tmp_path)
    meeting = {"world_size": 1, "nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "collective_timeout_s": 3}
    with pytest.raises(TransientError, match=r"not all 2 nodes came .*`tidegate trainer join` on the others"):
        update(settings(**meeting), home, parent=identity, policy_version=1, lake_version=None, now=NOW)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_every_zero_stage_trains_the_same_candidate(zero_stage, two_ranks, tiny_store, records, tiny_folder, tmp_path):
    home, identity = one_rank_job(tiny_store, records, tmp_path)
    result = update(settings(zero_stage=zero_stage), home, parent=identity, policy_version=1, lake_version=None, now=NOW)
    one, two, parent = weights(Path(result["path"])), weights(Path(two_ranks[2]["path"])), weights(tiny_folder)
    apart = np.sqrt(sum(np.square(one[name] - two[name]).sum() for name in one))
    moved = np.sqrt(sum(np.square(one[name] - parent[name]).sum() for name in one))
    assert apart / moved < 1e-2


def test_hindsight_moves_the_update_and_says_on_how_many_rows(tiny_store, tiny_folder, tmp_path):
    made = {}
    records = on_policy_records(tiny_folder, 8, continued=True)
    for weight in (0.0, 1.0):
        home, identity = one_rank_job(tiny_store, records, tmp_path / str(weight))
        few = {"world_size": 1, "passes": 1, "rows_per_step": 8, "hindsight": weight}
        made[weight] = update(settings(**few), home, parent=identity, policy_version=1, lake_version=None, now=NOW)
    assert "hinted_rows" not in made[0.0]
    assert made[1.0]["hinted_rows"] == 4
    plain, hinted = (weights(Path(made[weight]["path"])) for weight in (0.0, 1.0))
    assert max(np.abs(plain[name] - hinted[name]).max() for name in plain) > 1e-5


def test_killed_twice_an_update_ends_bit_equal_to_an_uninterrupted_one(one_rank, tiny_store, records, tmp_path):
    home, identity = one_rank_job(tiny_store, records, tmp_path)
    write = ["--set", "trainer.world_size=1", "--set", f"mlflow.tracking_uri={NOBODY}"] + [
        part for name, value in TRAINING.items() for part in ("--set", f"trainer.{name}={json.dumps(value)}")
    ]
    runner = (
        "import sys, json; from datetime import datetime; from pathlib import Path; from pipelines.storage import Home; "
        "from pipelines.config import load; from trainer.config import TrainerConfig; from trainer.update import update; "
        "update(load(TrainerConfig, overrides=json.loads(sys.argv[1])), Home(Path(sys.argv[2])), parent=sys.argv[3], policy_version=1, "
        "lake_version=None, now=datetime.fromisoformat(sys.argv[4]))"
    )
    command = [sys.executable, "-c", runner, json.dumps(write[1::2]), str(home.root), identity, NOW.isoformat()]
    said = tmp_path / "said.txt"
    for steps, victim in ((1, "trainer.rank"), (3, "launcher")):
        with said.open("wb") as output:
            process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
        deadline = time.monotonic() + 150
        while not list(home.training.glob(f"*/checkpoints/step-*{steps}")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks = [child.pid for child in psutil.Process(process.pid).children(recursive=True) if "trainer.rank" in child.cmdline()]
        os.kill(ranks[-1] if victim == "trainer.rank" else process.pid, signal.SIGKILL)
        process.wait()
        if victim == "trainer.rank":
            assert "TransientError: a training rank was killed by the system" in said.read_text()
    result = update(settings(world_size=1), home, parent=identity, policy_version=1, lake_version=None, now=NOW + timedelta(minutes=1))
    assert result["checkpoint"] == one_rank[2]["checkpoint"]


def test_a_non_finite_row_is_skipped_counted_and_named_and_the_rest_is_trained(one_rank, tmp_path, monkeypatch):
    from dataclasses import replace

    from trainer import launch
    from trainer.dataset import read_rows

    home, _, _ = one_rank
    source = next(home.training.glob("update-*"))
    rows = read_rows(source / jobs.ROWS)
    rows[5] = replace(rows[5], advantage=float("nan"))
    job = jobs.read(source).model_copy(update={"store": str(tmp_path / "store")})
    folder = open_job(tmp_path / "training", job, rows)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    result = launch.run(folder, label="update")
    assert not [left.name for left in (tmp_path / "temporary").iterdir() if "torchelastic" in left.name]
    assert result["nonfinite_steps"] == 1
    assert result["quarantined_rows"] == 1
    assert all(np.isfinite(tensor).all() for tensor in weights(Path(result["path"])).values())


def test_rows_that_the_parent_did_not_sample_stop_the_update_before_training(home, tiny_store, records):
    off = [r | {"behaviour_logprobs": (np.frombuffer(r["behaviour_logprobs"], "<f4") - np.float32(0.5)).tobytes()} for r in records]
    write_samples(home.lake, off)
    with pytest.raises(ContractViolation, match="parity_median"):
        update(settings(world_size=1), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
    assert [path.name for path in home.store.iterdir()] == [tiny_store[1]]
    candidates.verify(home.store / tiny_store[1])


BAD = {
    "another tokenizer": ({"tokenizer_sha": "other"}, "tokenizer_drift 24"),
    "no log-probabilities": ({"behaviour_logprobs": None}, "len_mismatch 24"),
    "NaN rewards": ({"reward": float("nan")}, "nonfinite_reward 24"),
    "no consent": ({"consent": "measure"}, "no_consent 24"),
}


@pytest.mark.parametrize("what", BAD)
def test_unfit_rows_are_refused_with_their_count_and_the_parent_is_untouched(home, tiny_store, records, what):
    changes, words = BAD[what]
    write_samples(home.lake, [r | changes for r in records])
    nothing = update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
    assert nothing["checkpoint"] is None
    assert words in nothing["reason"]
    candidates.verify(home.store / tiny_store[1])
    assert len(list(home.store.iterdir())) == 1


def test_a_single_row_and_an_empty_or_missing_table_say_what_is_missing(home, tiny_store, records):
    with pytest.raises(ContractViolation, match="signals run"):
        update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
    write_samples(home.lake, [])
    empty = update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
    write_samples(home.lake, records[:1])
    single = update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
    assert (empty["checkpoint"], single["checkpoint"]) == (None, None)
    assert "window is empty" in empty["reason"]
    assert "1 of 1 samples" in single["reason"]
    with pytest.raises(ContractViolation, match="no version 77"):
        update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=77, now=NOW)


def test_a_single_users_rows_are_trained_against_the_running_mean_alone(tiny_folder, records):
    from trainer.update import limits_for

    config = settings().trainer
    limits = limits_for(tiny_folder, candidates.verify(tiny_folder), config, policy_version=1, consumed=())
    mine = [r | {"user_key": "one"} for r in records]
    prepared = prepare(mine, limits, config, state={"ema": {}, "consumed": []}, now=NOW)
    assert {row.omega for row in prepared.rows} == {16 / 24}
    assert prepared.facts["users"] == 1


def test_a_corrupt_parent_is_refused(home, tiny_store, records):
    write_samples(home.lake, records)
    with (home.store / tiny_store[1] / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(CheckpointInvalid, match="differs from its manifest"):
        update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
