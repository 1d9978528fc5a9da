"""`tidegate bench trainer` as a person runs it, on a tiny model: real processes, real DeepSpeed, small enough to be quick."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from trainer import bench, bench_worker
from trainer.bench_rows import Task


@pytest.mark.slow
def test_the_bench_measures_every_way_and_all_of_them_have_the_same_gradient(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["--rows", "6", "--repeats", "1", "--threads", "1", "--histograms", "trained10", "--no-trl", "--checkpoint", str(tiny_folder)]
    command = [sys.executable, "-m", "deploy", "bench", "trainer", *options, "--work", str(tmp_path / "work"), "--json"]
    (own := tmp_path / "own").mkdir()
    ran = subprocess.run(
        [*command, "--plot", str(tmp_path / "b.svg")], capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(own)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert [path for path in own.iterdir() if path.name.startswith("torchelastic")] == []
    done = json.loads(ran.stdout)
    block = done["trained10"]
    assert block["gradient_parity_max_abs"] < 1e-5
    assert block["gradient_parity_relative"].keys() == {"ours", "bare_packed"}
    assert max(block["gradient_parity_relative"].values()) < 1e-5
    assert block["gradient_error"].keys() == {"ours", "bare_single", "bare_packed"}
    assert block["gradient_error"]["ours"] < 0.2
    assert block["trained_tok_s"].keys() == {"ours", "trl", "bare"}
    assert block["trained_tok_s"]["trl"] is None
    assert block["peak_bytes"]["trl"] is None
    ways = block["ways"]
    assert ways["ours_reference"]["trained_tok_s"] < ways["ours"]["trained_tok_s"]
    assert block["trained_tok_s"]["bare"] == max(ways["bare_single"]["trained_tok_s"], ways["bare_packed"]["trained_tok_s"])
    assert 2e8 < block["peak_bytes"]["ours"] < 3e9
    assert block["rank_scaling"] > 0
    assert [entry["calibrated_on"] for entry in done["planner"]] == [True, False]
    assert abs(done["planner"][0]["trained_tok_s"]["error"]) < 1e-9
    assert (tmp_path / "b.svg").stat().st_size > 5_000


def test_points_of_the_grid_and_adapters_have_one_gradient(tiny_folder: Path, tmp_path: Path) -> None:
    plain = Task(
        way="bare_single", histogram="trained60", rows=5, checkpoint=str(tiny_folder), adapter="lora", dtype="fp32", threads=1, repeats=1,
        max_tokens=2048, activation_checkpointing=True,
    )  # fmt: skip
    ways = ("bare_single", "padded-fused-all", "packed-plain-trained")
    gradients = {way: bench_worker.plain(replace(plain, way=way))["gradients"] for way in ways}
    ranks = bench.run_task(replace(plain, way="ours", exact_rows=5), tmp_path)
    gradients["ours"] = ranks[0]["gradients"]
    assert {name.rsplit(".", 4)[-4] for name in gradients["ours"]} == {"q_proj", "down_proj"}
    for way in ("ours", "padded-fused-all", "packed-plain-trained"):
        assert bench.gradient_gap(gradients[way], gradients["bare_single"])[1] < 1e-4, way


def test_a_library_that_is_not_there_or_is_killed_for_its_memory_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bench.Plan(checkpoint=tmp_path, histograms=("trained10",))
    with pytest.raises(bench.NotMeasured, match="no dependency"):
        bench.run_task(bench.task_of(plan, "trl", "trained10"), tmp_path)
    (tmp_path / "datasets.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")  # TRL's first import
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(bench.NotMeasured, match="TRL was killed on trained10, probably for want of memory"):
        bench.run_task(bench.task_of(plan, "trl", "trained10"), tmp_path)


def test_what_is_being_measured_ends_with_the_bench(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy", "bench", "trainer", "--checkpoint", str(tiny_folder), "--work", str(tmp_path / "work")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        until = time.monotonic() + 60
        while not (workers := psutil.Process(running.pid).children(recursive=True)) and time.monotonic() < until:
            time.sleep(0.1)
        running.kill()
    assert workers
    assert psutil.wait_procs(workers, timeout=20)[1] == []
