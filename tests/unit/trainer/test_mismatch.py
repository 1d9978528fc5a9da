"""Logged against recomputed log-probabilities: which rows are looked at again, and when training is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import ContractViolation
from trainer import mismatch
from trainer.config import UpdateConfig
from trainer.dataset import TrainingRow
from trainer.packing import reply_row


def row(*, same: bool) -> TrainingRow:
    packed = reply_row(np.asarray([1]), np.arange(2))
    return TrainingRow(row_id="r", packed=packed, mu=np.zeros(2, np.float32), advantage=0.0, omega=1.0, same_version=same)


def test_four_tokens_worked_by_hand():
    logged = np.asarray([-1.0, -1.0, -1.0, -1.0], np.float32)
    found = mismatch.figures([(logged, np.asarray([-1.0, -1.01, -1.0, -1.2], np.float32))])
    assert found["parity_rows"] == 1
    assert found["parity_median"] == pytest.approx(0.005, abs=1e-6)
    assert found["parity_outside_share"] == 0.25
    with pytest.raises(ContractViolation, match=r"parity_outside_share 0\.2500 > trainer\.parity_outside_share 0\.1"):
        mismatch.check(found, UpdateConfig())


def test_a_nan_is_a_refusal_and_no_row_is_none():
    nan = np.asarray([np.nan, -1.0], np.float32)
    found = mismatch.figures([(np.zeros(2, np.float32), nan)])
    assert found["parity_outside_share"] == 1.0
    with pytest.raises(ContractViolation, match="parity_median"):
        mismatch.check(found, UpdateConfig())
    assert mismatch.figures([]) == {"parity_rows": 0.0}
    mismatch.check({"parity_rows": 0.0}, UpdateConfig())


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=20), st.integers(1, 30), st.integers(0, 5))
@settings(deadline=None)
def test_whole_chains_are_probed_until_there_are_enough_of_the_parents_own_rows(flags, number, seed):
    rows = [row(same=same) for chain in flags for same in chain]
    starts = np.cumsum([0, *(len(chain) for chain in flags)])
    chains = [list(range(start, start + len(chain))) for start, chain in zip(starts, flags, strict=False)]
    own = {i for i, item in enumerate(rows) if item.same_version}
    chosen = mismatch.probe_rows(rows, chains, number=number, seed=seed)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= own
    assert len(chosen) >= min(number, len(own))
    if len(own) <= number:
        assert set(chosen) == own
    for chain in chains:
        assert own & set(chain) <= set(chosen) or not set(chain) & set(chosen)
