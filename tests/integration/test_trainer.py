"""Real DeepSpeed ranks by torchrun on a tiny model: one update end to end, kills, world sizes, refusals."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.errors import CheckpointInvalid, ContractViolation, TransientError
from pipelines.storage import Home
from tests.support.model import on_policy_records, write_samples
from trainer import candidates, launch
from trainer import job as jobs
from trainer.config import TrainerConfig
from trainer.update import limits_for, open_job, prepare, read_state, rows_digest, update

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
        counts = dict(database.execute("select key, max(value) from metrics where key like 'rejected.%' or key = 'seen' group by key"))
    assert steps == 4
    assert counts == {"seen": 26, "rejected.not_scored": 1, "rejected.truncated_sampling": 1}


def test_a_finished_job_keeps_neither_checkpoints_nor_rows(two_ranks):
    home, _, result = two_ranks
    (folder,) = home.training.glob("update-*")
    assert {path.name for path in folder.iterdir() if path.suffix != ".lock"} == {jobs.JOB, jobs.RESULT, jobs.PROGRESS, launch.LOG}
    assert sorted(path.name for path in home.store.iterdir()) == sorted([result["parent"], result["checkpoint"]])


def test_a_window_without_rows_is_tracked_with_its_counts_too(home, tiny_store, records):
    write_samples(home.lake, [r | {"tokenizer_sha": "other"} for r in records])
    nothing = update(settings(tracking_uri=""), home, parent=tiny_store[1], policy_version=1, lake_version=None, now=NOW)
    assert (nothing["seen"], nothing["rows"], nothing["rejected.tokenizer_drift"]) == (24, 0, 24)
    with sqlite3.connect(home.mlflow / "mlflow.sqlite") as database:
        counts = dict(database.execute("select key, value from metrics"))
    assert counts == {"seen": 24, "rows": 0, "rejected.tokenizer_drift": 24}


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


def with_nan_advantages(one_rank, tiny_folder, records, root, which, **changes):
    """A job like the one-rank update's in which some rows have a NaN advantage: its folder."""
    config = settings(world_size=1, **changes).trainer
    limits = limits_for(tiny_folder, candidates.verify(tiny_folder), config, policy_version=1, consumed=())
    rows = prepare(records, limits, config, state={"ema": {}, "consumed": []}, now=NOW).rows
    rows = [replace(row, advantage=float("nan")) if which(k) else row for k, row in enumerate(rows)]
    job = jobs.read(next(one_rank[0].training.glob("update-*"))).model_copy(update={"store": str(root / "store"), "settings": config})
    open_job(root / "job", job, rows)
    return root / "job"


def test_a_non_finite_row_is_skipped_counted_and_named_and_the_rest_is_trained(one_rank, tiny_folder, records, tmp_path, monkeypatch):
    folder = with_nan_advantages(one_rank, tiny_folder, records, tmp_path, lambda k: k == 5)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    result = launch.run(folder, label="update")
    assert not [left.name for left in (tmp_path / "temporary").iterdir() if "torchelastic" in left.name]
    assert result["nonfinite_steps"] == 1
    assert (result["quarantined_rows"], result["quarantined"]) == (1, ["c005"])
    assert all(np.isfinite(tensor).all() for tensor in weights(Path(result["path"])).values())


def test_steps_that_are_not_finite_one_after_another_end_the_update_and_nothing_is_exported(one_rank, tiny_folder, records, tmp_path):
    folder = with_nan_advantages(one_rank, tiny_folder, records, tmp_path, lambda k: True, max_nonfinite_steps=2)
    with pytest.raises(ContractViolation, match=r"2 steps in a row had a non-finite loss or gradient \(rows .*c0.*nothing was exported"):
        launch.run(folder, label="update")
    assert not (tmp_path / "store").exists()
    (saved,) = folder.glob(f"{jobs.CHECKPOINTS}/step-*1/engine/mp_rank_00_model_states.pt")
    kept = torch.load(saved, weights_only=False)["module"]
    assert kept
    assert [name for name in kept if "lora_" not in name] == []  # the output layer is the frozen embedding under a second name


def test_over_its_divergence_budget_an_update_stops_and_emits_what_exists(tiny_store, records, tmp_path):
    home, identity = one_rank_job(tiny_store, records, tmp_path)
    tight = {"world_size": 1, "kl_budget": 1e-6, "kl_target": 1e-7}
    result = update(settings(**tight), home, parent=identity, policy_version=1, lake_version=None, now=NOW)
    assert (result["stop_reason"], result["steps"]) == ("kl_budget", 2)  # the second step sees what the first did, and is not taken
    assert result["kl_nats_per_token"] > 1e-6
    assert candidates.verify(home.store / result["checkpoint"]).training["stop_reason"] == "kl_budget"


def test_with_a_learning_rate_of_zero_nothing_moves_and_nothing_is_made(tiny_store, records, tmp_path):
    home, identity = one_rank_job(tiny_store, records, tmp_path)
    result = update(settings(lr=0.0), home, parent=identity, policy_version=1, lake_version=None, now=NOW)
    assert (result["checkpoint"], result["self_test"], result["steps"]) == (None, "flat", 4)
    assert [path.name for path in home.store.iterdir()] == [identity]


def test_duplicates_late_records_and_their_order_do_not_change_an_update(tiny_folder, records):
    config = settings().trainer
    limits = limits_for(tiny_folder, candidates.verify(tiny_folder), config, policy_version=1, consumed=())
    made = []
    for seen in (records, [*reversed(records), *records[::3]], [*records[12:], *records[:12]]):
        prepared = prepare(seen, limits, config, state={"ema": {}, "consumed": []}, now=NOW)
        made.append((rows_digest(prepared.rows), prepared.state))
    assert made[0] == made[1] == made[2]


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
    assert "1 of 1 samples can be trained on, fewer than trainer.min_rows = 2; no candidate" in single["reason"]
    with pytest.raises(ContractViolation, match="no version 77"):
        update(settings(), home, parent=tiny_store[1], policy_version=1, lake_version=77, now=NOW)


def test_a_single_users_rows_are_trained_against_the_running_mean_alone(tiny_folder, records):
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
