"""Distances between two checkpoints against numbers worked by hand; sabotaged weights are found."""

import math
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.storage import Home
from trainer import candidates, deepspeed_config
from trainer.evaluate import nonfinite_weights, relative_change, row_figures, totals
from trainer.packing import order
from trainer.rank import Run
from trainer.sabotage import NAN_TENSOR, nan_weights
from trainer.selection import Row

pytestmark = pytest.mark.model

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def row(mu, name="c"):
    return Row(
        completion_id=name, session_id="s", turn_id="t", turn_index=0, user_key="u", task_bucket=None, language=None, policy_version=1,
        served_at=NOW, prompt_ids=np.asarray([1]), response_ids=np.arange(len(mu)), mu=np.asarray(mu), temperature=1.0, reward=0.0,
        reward_version=None,
    )  # fmt: skip


def scored(logprobs, entropy=1.0):
    return np.asarray(logprobs, np.float32), np.full(len(logprobs), entropy, np.float32)


def test_a_rows_distances_are_the_formulas():
    found = row_figures(row([-1.0, -2.0]), scored([-1.1, -1.8], 0.5), scored([-1.0, -2.1]))
    # ln r = (-.1, +.3); r - 1 - ln r = e^-.1 - 1 + .1 = .0048374 and e^.3 - 1 - .3 = .0498588
    assert found["kl"] == pytest.approx((0.0048374 + 0.0498588) / 2, abs=1e-6)
    assert found["self_gap"] == pytest.approx(0.05, abs=1e-6)
    assert found["max_abs_log_ratio"] == pytest.approx(0.3, abs=1e-6)
    assert (found["entropy"], found["reference_entropy"], found["n_tokens"]) == (0.5, 1.0, 2)


def test_totals_weigh_tokens_and_count_effective_rows():
    ours, theirs = [scored([-1.0]), scored([-1.0, -1.0, -1.0])], [scored([-1.0 - math.log(2)]), scored([-1.0, -1.0, -1.0])]
    rows = [row_figures(row(other[0]), mine, other) for mine, other in zip(ours, theirs, strict=True)]
    found = totals(rows, ours, theirs)
    assert found["tokens"] == 4
    assert found["kl_mean"] == pytest.approx((2 - 1 - math.log(2)) / 4, abs=1e-6)
    # row weights 2 and 1: (2 + 1)^2 / (2 (4 + 1)) = .9
    assert found["ess_share"] == pytest.approx(0.9, abs=1e-6)
    assert found["entropy_ratio"] == pytest.approx(1.0)


def test_a_nan_makes_figures_unknown_not_good():
    ours, theirs = [scored([float("nan")])], [scored([-1.0])]
    rows = [row_figures(row([-1.0]), ours[0], theirs[0])]
    found = totals(rows, ours, theirs)
    assert rows[0]["kl"] is None
    assert (found["kl_mean"], found["ess_share"], found["p99_abs_log_ratio"]) == (None, None, None)


def test_sabotaged_weights_are_sealed_as_such_and_found_by_looking(tiny_store, tmp_path):
    import shutil

    store, identity = tiny_store
    home = Home(tmp_path)
    shutil.copytree(store / identity, home.store / identity)
    made = nan_weights(home, parent=identity, now=NOW)
    folder = home.store / made["checkpoint"]
    assert candidates.verify(folder).kind == "sabotage"
    assert nonfinite_weights(folder) == [NAN_TENSOR]
    assert nonfinite_weights(home.store / identity) == []
    assert relative_change(home.store / identity, home.store / identity) == 0.0


def test_every_pass_visits_every_row_once_in_an_order_of_its_own():
    alone = [[i] for i in range(25)]
    batches = order(alone, per_step=8, passes=3, seed=1)
    assert [len(batch) for batch in batches] == [8, 8, 9] * 3
    passes = [[*batches[k], *batches[k + 1], *batches[k + 2]] for k in (0, 3, 6)]
    assert all(sorted(visited) == list(range(25)) for visited in passes)
    assert passes[0] != passes[1]
    assert batches == order(alone, per_step=8, passes=3, seed=1)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 10), st.integers(0, 5))
def test_a_chain_stays_in_one_optimizer_batch_unless_it_is_longer_than_one(sizes, per_step, seed):
    starts = np.cumsum([0, *sizes]).tolist()
    chains = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
    batches = order(chains, per_step=per_step, passes=1, seed=seed)
    assert sorted(i for batch in batches for i in batch) == list(range(starts[-1]))
    homes = {i: number for number, batch in enumerate(batches) for i in batch}
    assert all(len({homes[i] for i in chain}) == 1 for chain in chains if len(chain) <= per_step)
    assert all(len(batch) < 2 * per_step for batch in batches)


def test_a_runs_state_is_json_and_complete():
    import json

    assert set(json.loads(json.dumps(Run().state()))) == set(Run.__slots__)


@pytest.mark.parametrize(
    ("version", "fine"), [("0.18.2", True), ("0.18.3", False), ("0.19.0", False), ("0.19.3", False), ("0.19.4", True), ("0.19.8+cpu", True)]
)
def test_deepspeed_versions_with_wrong_gradients_are_refused(version, fine):
    assert (deepspeed_config.version_fault(version) is None) is fine


def test_an_unreadable_deepspeed_version_is_refused():
    assert "cannot be read" in deepspeed_config.version_fault("from source")
