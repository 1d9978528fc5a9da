"""What the doctor says of training settings, before a job finds out."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy import doctor
from deploy.config import Config
from pipelines.errors import ConfigError
from pipelines.storage import Home


def found(home: Path, **trainer: object) -> list[doctor.Finding]:
    config = Config.model_validate({"trainer": trainer})
    return list(doctor.training(doctor.Place(config=config, home=Home(home), now=datetime(2026, 5, 4, tzinfo=UTC))))


def test_settings_that_fit_are_told(tmp_path: Path) -> None:
    (item,) = found(tmp_path, world_size=1)
    assert (item.level, item.found) == ("ok", "1 ranks of 1 threads, ZeRO 1, lora, bf16")


def test_more_threads_than_cores_are_a_warning_where_ranks_have_no_gpus(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    (item,) = found(tmp_path, world_size=cores, threads_per_rank=2)
    on_cores = not Path("/dev/nvidia0").exists()
    assert (item.level == "warn", f"there are {cores} cores" in item.do) == (on_cores, on_cores)


def test_what_a_stage_cannot_offload_is_a_failure_with_the_stages_that_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.offload='parameters' needs trainer.zero_stage=3, not 1"):
        found(tmp_path, offload="parameters")
