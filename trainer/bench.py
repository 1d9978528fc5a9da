"""`tidegate bench trainer`: trained tokens a second and peak memory of one step, ours beside TRL's and beside the bare limit.

Every way works on the same rows with the same threads in a process of its own, one after the other, a warm-up dropped. The gradients
of a few weights are compared in fp32 between our engine and the plain model, so that speed is never bought with another gradient.
Takes: a plan. Gives: a dict with a block a histogram, goals, and the planner's predictions with their error. Leaves out: the ways
themselves (`bench_worker.py`, `bench_trl.py`), words and pictures (`bench_report.py`).
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from pipelines.errors import TerminalError
from pipelines.storage import write_atomic
from pipelines.terminal import progress
from trainer import bench_rows, planner
from trainer.bench_rows import Task
from trainer.launch import environment
from trainer.packing import tokens_of

GRID: Final = tuple(
    f"{layout}-{head}-{tokens}" for layout in ("padded", "packed") for head in ("plain", "fused") for tokens in ("all", "trained")
)
GOALS: Final = {"trained10": {"speed": 3.0, "memory": 0.33}, "trained60": {"speed": 2.0, "memory": 0.5}}
"""Against TRL: trained tokens a second at least so many times as many, peak memory at most that share."""
BARE_GOAL: Final = {"ours": 0.90, "ours_reference": 0.70}
"""Share of the bare limit, without and with a forward pass for the reference."""
EFFICIENCY_GOAL: Final = 0.97
SCALING_GOAL: Final = 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    checkpoint: Path
    histograms: tuple[str, ...]
    rows: int = 24
    repeats: int = 3
    threads: int = 2
    adapter: str = "full"
    dtype: str = "bf16"
    max_tokens: int = 2048
    activation_checkpointing: bool = False
    grid: bool = False
    """Also {padded, packed} x {plain, fused} x {all, trained}."""
    ranks: bool = True
    """Also two ranks against one, a thread each."""


def _task(plan: Plan, way: str, histogram: str) -> Task:
    return Task(
        way=way, histogram=histogram, rows=plan.rows, checkpoint=str(plan.checkpoint), adapter=plan.adapter, dtype=plan.dtype,
        threads=plan.threads, repeats=plan.repeats, max_tokens=plan.max_tokens, activation_checkpointing=plan.activation_checkpointing,
    )  # fmt: skip


def run_task(task: Task, folder: Path, *, ranks: int = 1) -> list[dict[str, Any]] | None:
    """Run one way in its own process (or ranks); returns what each rank found, None for TRL where it is not installed.

    Raises:
        TerminalError: The process failed; its last lines are in the message.
    """
    path = folder / f"{task.histogram}-{task.way}-{task.dtype}-{ranks}.json"
    write_atomic(path, json.dumps(asdict(task)).encode())
    words = [sys.executable, "-m"]
    if task.way.startswith("ours"):
        words += ["torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={ranks}", "-m"]
    words += ["trainer.bench_trl" if task.way == "trl" else "trainer.bench_worker", str(path)]
    done = subprocess.run(words, env=environment(threads=task.threads), capture_output=True, text=True, check=False)
    results = [path.with_name(f"{path.stem}-result-{rank}.json") for rank in range(ranks)]
    if done.returncode or not all(result.exists() for result in results):
        if task.way == "trl" and "ModuleNotFoundError" in done.stderr:
            return None
        raise TerminalError(f"measuring {task.way} on {task.histogram} failed: ...{done.stderr.strip()[-1500:]}")
    return [json.loads(result.read_bytes()) for result in results]


def _figures(found: list[dict[str, Any]], trained: int, total: int) -> dict[str, Any]:
    """Sum up the ranks of one way."""
    seconds = [max(rank["seconds"][i] for rank in found) for i in range(len(found[0]["seconds"]))]
    middle = statistics.median(seconds)
    return {
        "seconds": seconds,
        "trained_tok_s": trained / middle,
        "total_tok_s": total / middle,
        "spread": [trained / max(seconds), trained / min(seconds)],
        "peak_bytes": sum(rank["peak_bytes"] for rank in found),
    }


def gradient_gap(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> tuple[float, float]:
    """Return the largest absolute difference of two sets of gradients, and that over the largest of theirs.

    Raises:
        TerminalError: They are of different weights.
    """
    if not ours or set(ours) != set(theirs):
        raise TerminalError(f"gradients of {sorted(ours)} and {sorted(theirs)} cannot be compared")
    pairs = [(a, b) for name in ours for a, b in zip(ours[name], theirs[name], strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    return worst, worst / max(abs(b) for _, b in pairs)


def measure(plan: Plan, histogram: str, folder: Path, *, vocabulary: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Measure all ways on one histogram."""
    rows = bench_rows.rows(histogram, number=plan.rows, vocabulary=vocabulary)
    trained, total = sum(len(row.trained) for row in rows), sum(map(tokens_of, rows))

    def one(way: str, *, ranks: int = 1, **changes: Any) -> list[dict[str, Any]] | None:
        found = run_task(replace(_task(plan, way, histogram), **changes), folder, ranks=ranks)
        advance(1)
        return found

    ways: dict[str, list[dict[str, Any]]] = {}
    for way in ("bare_single", "ours", "trl", "bare_packed", "ours_reference", *(GRID if plan.grid else ())):
        if (found := one(way)) is not None:
            ways[way] = found
    figures = {way: _figures(found, trained, total) for way, found in ways.items()}
    exact = {way: one(way, dtype="fp32", repeats=0, shortest=6) for way in ("ours", "bare_single")}
    parity = gradient_gap(*(found[0]["gradients"] for found in exact.values() if found))
    bare = max(("bare_single", "bare_packed"), key=lambda way: figures[way]["trained_tok_s"])
    scaling = None
    if plan.ranks:
        one_rank, two_ranks = ((_figures(one("ours", ranks=n, threads=1) or [], trained, total)) for n in (1, 2))
        scaling = two_ranks["trained_tok_s"] / one_rank["trained_tok_s"]
    trl = figures.get("trl")
    return {
        "rows": plan.rows, "tokens": total, "trained_tokens": trained,
        "trained_tok_s": {
            "ours": figures["ours"]["trained_tok_s"], "trl": trl and trl["trained_tok_s"], "bare": figures[bare]["trained_tok_s"],
        },
        "peak_bytes": {"ours": figures["ours"]["peak_bytes"], "trl": trl and trl["peak_bytes"]},
        "packing_efficiency": bench_rows.packing_efficiency(rows, max_tokens=plan.max_tokens, ranks=2),
        "rank_scaling": scaling,
        "gradient_parity_max_abs": parity[0], "gradient_parity_relative": parity[1],
        "bare_way": bare,
        "share_of_bare": {way: figures[way]["trained_tok_s"] / figures[bare]["trained_tok_s"] for way in BARE_GOAL},
        "gradient_apart_bf16": {way: gradient_gap(found[0]["gradients"], ways["bare_single"][0]["gradients"])[1]
                                for way, found in ways.items() if found[0]["gradients"] and way != "bare_single"},
        "ways": figures,
    }  # fmt: skip


def goals(histogram: str, block: dict[str, Any]) -> dict[str, bool | None]:
    """Say which goals a histogram's figures meet; None where one was not measured."""
    speed, memory = block["trained_tok_s"], block["peak_bytes"]
    wanted = GOALS[histogram]
    return {
        f"trained tok/s >= {wanted['speed']:g} x TRL": None if speed["trl"] is None else speed["ours"] >= wanted["speed"] * speed["trl"],
        f"peak memory <= {wanted['memory']:g} of TRL's": None
        if memory["trl"] is None
        else memory["ours"] <= wanted["memory"] * memory["trl"],
        **{f"{way} >= {share:g} of the bare limit": block["share_of_bare"][way] >= share for way, share in BARE_GOAL.items()},
        f"packing efficiency >= {EFFICIENCY_GOAL:g}": block["packing_efficiency"] >= EFFICIENCY_GOAL,
        f"2 ranks >= {SCALING_GOAL:g} x 1 rank": None if block["rank_scaling"] is None else block["rank_scaling"] >= SCALING_GOAL,
    }


def predictions(plan: Plan, shape: planner.Shape, blocks: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Calibrate the planner's rate on the first histogram and say how far its other predictions lie from what was measured."""
    setup = planner.Setup(
        adapter=plan.adapter, bytes_per_weight=2 if plan.dtype == "bf16" else 4, micro_batch_tokens=plan.max_tokens,
        activation_checkpointing=plan.activation_checkpointing,
    )  # fmt: skip
    rate = None
    made: list[dict[str, Any]] = []
    for histogram, block in blocks.items():
        segments = bench_rows.lengths(plan.rows)
        for way, ours in (("ours", setup), ("ours_reference", replace(setup, reference_pass=True))):
            seconds = block["trained_tokens"] / block["ways"][way]["trained_tok_s"]
            flops = planner.step_flops(shape, ours, segments=segments, trained=block["trained_tokens"])
            first = rate is None
            rate = rate or flops / seconds
            guess = planner.predicted(
                shape, ours, segments=segments, trained=block["trained_tokens"], flop_per_s=rate, base_bytes=PROCESS_BYTES
            )
            peak = block["ways"][way]["peak_bytes"]
            made.append(
                {
                    "histogram": histogram, "way": way, "flop_per_s": rate, "calibrated_on": first,
                    "trained_tok_s": {"predicted": guess["trained_tok_s"], "measured": block["ways"][way]["trained_tok_s"],
                                      "error": guess["trained_tok_s"] / block["ways"][way]["trained_tok_s"] - 1},
                    "peak_bytes": {"predicted": guess["rank_bytes"], "measured": peak, "error": guess["rank_bytes"] / peak - 1},
                }
            )  # fmt: skip
    return made


PROCESS_BYTES: Final = 0.75e9
"""Resident memory of a rank before its model: torch, DeepSpeed and transformers, measured."""


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Measure; `folder` gets the tasks and their raw results.

    Raises:
        TerminalError: A way failed.
    """
    import importlib.metadata

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((plan.checkpoint / "config.json").read_bytes())
    ways = 5 + 2 + (len(GRID) if plan.grid else 0) + (2 if plan.ranks else 0)
    blocks: dict[str, dict[str, Any]] = {}
    with progress("bench trainer", total=ways * len(plan.histograms)) as advance:
        for histogram in plan.histograms:
            blocks[histogram] = measure(plan, histogram, folder, vocabulary=config["vocab_size"], advance=advance)
    return {
        **blocks,
        "goals": {histogram: goals(histogram, block) for histogram, block in blocks.items()},
        "planner": predictions(plan, planner.shape_of(config), blocks),
        "plan": asdict(plan) | {"checkpoint": plan.checkpoint.name},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers", "peft")},
        "cores": len(os.sched_getaffinity(0)),
    }
