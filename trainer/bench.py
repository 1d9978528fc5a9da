"""`tidegate bench trainer`: trained tokens a second and peak memory of one step, ours beside TRL's and beside the bare limit.

Every way works on the same rows with the same threads in a process of its own, one after the other, a warm-up dropped. The gradients
of a few weights are compared in fp32 with the plain model's, so that speed is never bought with another gradient.
Takes: a plan. Gives: a dict with a block a histogram, goals, and the planner's predictions with their error. Leaves out: the ways
themselves (`bench_worker.py`, `bench_trl.py`), words and pictures (`bench_report.py`).
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pipelines.errors import TerminalError
from pipelines.storage import write_atomic
from pipelines.terminal import progress
from trainer import bench_rows, planner
from trainer.bench_rows import Task
from trainer.launch import environment, terminate_with
from trainer.packing import tokens_of

GRID: Final = tuple(
    f"{layout}-{head}-{tokens}" for layout in ("padded", "packed") for head in ("plain", "fused") for tokens in ("all", "trained")
)
WAYS: Final = ("bare_single", "ours", "trl", "bare_packed")
GOALS: Final = {"trained10": {"speed": 3.0, "memory": 0.33}, "trained60": {"speed": 2.0, "memory": 0.5}}
"""Against TRL: trained tokens a second at least so many times as many, peak memory at most that share."""
BARE_GOAL: Final = {"ours": 0.90, "ours_reference": 0.70}
"""Share of the bare limit, without and with a forward pass for the reference."""
ROUNDING_GOAL: Final = 1.1
"""Rounded to bf16, our gradient may be at most so many times as far from the exact one as the plain model's."""
EFFICIENCY_GOAL: Final = 0.97
SCALING_GOAL: Final = 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    checkpoint: Path
    histograms: tuple[str, ...]
    rows: int = 24
    repeats: int = 3
    trl_repeats: int = 1
    """TRL's step takes several times as long as ours; more of them show its spread."""
    threads: int = 2
    adapter: str = "full"
    dtype: str = "bf16"
    max_tokens: int = 2048
    activation_checkpointing: bool = True
    """As TRL has it at its defaults; without it, TRL needs more than 20 GB for these rows."""
    grid: bool = False
    """Also {padded, packed} x {plain, fused} x {all, trained}."""
    ranks: bool = True
    """Also two ranks against one, a thread each."""
    trl: bool = True
    """Also TRL, where it is installed."""


WITHOUT_TRL: Final = (
    "TRL was not measured: it is no dependency. `uv pip install --target DIR --no-deps trl datasets dill multiprocess xxhash`, then "
    "PYTHONPATH=DIR tidegate bench trainer"
)
EXACT_ROWS: Final = 4
"""Rows whose gradient is compared in fp32."""
RANKS_EVERY: Final = 2
"""One and two ranks with a thread each share out every other row: a ratio, and the same spread of lengths at half the time."""


def task_of(plan: Plan, way: str, histogram: str) -> Task:
    """Return what one way is to do."""
    return Task(
        way=way, histogram=histogram, rows=plan.rows, checkpoint=str(plan.checkpoint), adapter=plan.adapter, dtype=plan.dtype,
        threads=plan.threads, repeats=plan.trl_repeats if way == "trl" else plan.repeats, max_tokens=plan.max_tokens,
        activation_checkpointing=plan.activation_checkpointing, exact_rows=0 if way in GRID else EXACT_ROWS,
    )  # fmt: skip


class NotMeasured(TerminalError):
    """TRL could not be measured here; the bench goes on without."""


def run_task(task: Task, folder: Path, *, ranks: int = 1) -> list[dict[str, Any]]:
    """Run one way in its own process (or ranks); returns what each rank found.

    Raises:
        NotMeasured: TRL is not installed, or was killed, as Linux does to the largest process when memory runs out.
        TerminalError: The process failed; its last lines are in the message.
    """
    path = folder / f"{task.histogram}-{task.way}-{task.dtype}-{ranks}.json"
    write_atomic(path, json.dumps(asdict(task)).encode())
    words = [sys.executable, "-m"]
    if task.way.startswith("ours"):
        own = [f"--log-dir={path.with_suffix('')}", "--nnodes=1", f"--nproc-per-node={ranks}"]  # else it leaves a temporary folder behind
        words += ["torch.distributed.run", "--standalone", *own, "-m"]
    words += ["trainer.bench_trl" if task.way == "trl" else "trainer.bench_worker", str(path)]
    done = subprocess.run(
        words, env=environment(threads=task.threads), capture_output=True, text=True, check=False,
        preexec_fn=partial(terminate_with, os.getpid()),
    )  # fmt: skip
    results = [path.with_name(f"{path.stem}-result-{rank}.json") for rank in range(ranks)]
    if done.returncode or not all(result.exists() for result in results):
        if task.way == "trl" and "ModuleNotFoundError" in done.stderr:
            raise NotMeasured(WITHOUT_TRL)
        if task.way == "trl" and done.returncode == -signal.SIGKILL:
            raise NotMeasured(f"TRL was killed on {task.histogram}, probably for want of memory; fewer --rows need less")
        raise TerminalError(f"measuring {task.way} on {task.histogram} failed: ...{done.stderr.strip()[-1500:]}")
    return [json.loads(result.read_bytes()) for result in results]


def figures(found: list[dict[str, Any]], parts: tuple[str, ...], *, trained: int, total: int, threads: int) -> dict[str, Any]:
    """Sum up the ranks of one way.

    Args:
        found: What each rank found.
        parts: What belongs to a step.
        trained: Trained tokens of a step.
        total: All tokens of a step.
        threads: Of each rank.

    Returns:
        `seconds` of each repeat (a step lasts as long as its slowest rank), tokens a second at their median, `spread` from the
        slowest to the fastest repeat, `peak_bytes` over all ranks, and `cores`, the share of its threads' time that the machine gave.
    """

    def summed(what: str) -> list[list[float]]:
        return [[sum(at) for at in zip(*(rank[what][part] for part in parts), strict=True)] for rank in found]

    seconds = [max(at) for at in zip(*summed("seconds"), strict=True)]
    middle = statistics.median(seconds)
    used = sum(sum(rank) for rank in summed("cpu_seconds"))
    return {
        "seconds": seconds,
        "trained_tok_s": trained / middle,
        "total_tok_s": total / middle,
        "spread": [trained / max(seconds), trained / min(seconds)],
        "peak_bytes": sum(rank["peak_bytes"] for rank in found),
        "cores": used / (sum(seconds) * threads * len(found)),
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


def gradient_error(rough: dict[str, list[float]], exact: dict[str, list[float]]) -> float:
    """Return the largest, over weights, of |rough - exact| / |exact| in Euclidean norm."""
    return max(
        sum((a - b) ** 2 for a, b in zip(rough[name], exact[name], strict=True)) ** 0.5 / sum(b * b for b in exact[name]) ** 0.5
        for name in exact
    )


def _rank_scaling(plan: Plan, histogram: str, folder: Path, *, advance: Callable[[int], None]) -> float:
    """Return how many times as fast two ranks of one thread are as one, on every other row; at the median of their repeats."""
    task = replace(task_of(plan, "ours", histogram), threads=1, every=RANKS_EVERY, exact_rows=0)
    seconds: list[float] = []
    for ranks in (1, 2):
        found = run_task(task, folder, ranks=ranks)
        seconds.append(statistics.median(figures(found, ("step",), trained=1, total=1, threads=1)["seconds"]))
        advance(1)
    return seconds[0] / seconds[1]


def measure(plan: Plan, histogram: str, folder: Path, *, vocabulary: int, advance: Callable[[int], None]) -> dict[str, Any]:
    """Measure all ways on one histogram."""
    rows = bench_rows.rows(histogram, number=plan.rows, vocabulary=vocabulary)
    trained, total = sum(len(row.trained) for row in rows), sum(map(tokens_of, rows))
    found: dict[str, list[dict[str, Any]]] = {}
    left_out: dict[str, str] = {}
    for way in (*WAYS, *(GRID if plan.grid else ())):
        try:
            if way != "trl" or plan.trl:
                found[way] = run_task(task_of(plan, way, histogram), folder)
        except NotMeasured as reason:
            left_out[way] = str(reason)
        advance(1)
    parts = {way: (way, ("step",)) for way in found} | {"ours_reference": ("ours", ("step", "reference"))}
    ways = {
        name: figures(found[way], what, trained=trained, total=total, threads=plan.threads) for name, (way, what) in parts.items()
    }  # fmt: skip
    bare = max(("bare_single", "bare_packed"), key=lambda way: ways[way]["trained_tok_s"])
    exact = {way: gradient_gap(ranks[0]["exact"], found["bare_single"][0]["exact"]) for way, ranks in found.items() if ranks[0]["exact"]}
    truth = found["bare_single"][0]["exact"]
    rough = {way: gradient_error(ranks[0]["rough"], truth) for way, ranks in found.items() if ranks[0].get("rough")}
    trl = ways.get("trl", {"trained_tok_s": None, "peak_bytes": None})
    return {
        "rows": plan.rows, "tokens": total, "trained_tokens": trained,
        "trained_tok_s": {"ours": ways["ours"]["trained_tok_s"], "trl": trl["trained_tok_s"], "bare": ways[bare]["trained_tok_s"]},
        "peak_bytes": {"ours": ways["ours"]["peak_bytes"], "trl": trl["peak_bytes"]},
        "packing_efficiency": bench_rows.packing_efficiency(rows, max_tokens=plan.max_tokens, ranks=2),
        "rank_scaling": _rank_scaling(plan, histogram, folder, advance=advance) if plan.ranks else None,
        "gradient_parity_max_abs": exact["ours"][0],
        "gradient_parity_relative": {way: gap[1] for way, gap in exact.items() if way != "bare_single"},
        "gradient_error": rough,
        "left_out": left_out,
        "bare_way": bare,
        "share_of_bare": {way: ways[way]["trained_tok_s"] / ways[bare]["trained_tok_s"] for way in BARE_GOAL},
        "ways": ways,
    }  # fmt: skip


def _rounding(errors: dict[str, float]) -> float:
    """Return how many times as far our gradient is from the exact one as the bare one that is farther."""
    return errors["ours"] / max(errors["bare_single"], errors["bare_packed"], 1e-6)  # in fp32 all are next to nothing


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
        f"rounding of gradients <= {ROUNDING_GOAL:g} of the bare model's": _rounding(block["gradient_error"]) <= ROUNDING_GOAL,
        f"packing efficiency >= {EFFICIENCY_GOAL:g}": block["packing_efficiency"] >= EFFICIENCY_GOAL,
        f"2 ranks >= {SCALING_GOAL:g} x 1 rank": None if block["rank_scaling"] is None else block["rank_scaling"] >= SCALING_GOAL,
    }


def predictions(plan: Plan, shape: planner.Shape, blocks: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Calibrate the planner's rate on the first histogram and say how far its other predictions lie from what was measured."""
    setup = planner.Setup(
        adapter=plan.adapter, bytes_per_weight=2 if plan.dtype == "bf16" else 4, micro_batch_tokens=plan.max_tokens,
        activation_checkpointing=plan.activation_checkpointing, head_bytes=planner.CPU_HEAD_BYTES,
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


PROCESS_BYTES: Final = 0.82e9
"""Resident memory of a rank before its model: torch, DeepSpeed and transformers, measured."""


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Measure; `folder` gets the tasks and their raw results.

    Raises:
        TerminalError: A way failed.
    """
    import importlib.metadata

    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((plan.checkpoint / "config.json").read_bytes())
    ways = len(WAYS) + (len(GRID) if plan.grid else 0) + (2 if plan.ranks else 0)
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
