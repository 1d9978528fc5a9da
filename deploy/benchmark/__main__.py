"""`python -m deploy.benchmark`: score what a gateway serves on task folders and held-out sessions."""

import json
import sys
from pathlib import Path
from typing import Final, Literal

from cyclopts import App

from deploy.config import Config
from pipelines.errors import ContractViolation
from pipelines.storage import write_atomic
from pipelines.terminal import Common, progress, run

app = App(name="benchmark", help="Score a checkpoint on task folders and held-out sessions.")

_COMMON: Final = Common()


@app.command(name="run")
def run_command(
    *,
    gateway: str,
    out: Path,
    attempts: int | None = None,
    sessions: int | None = None,
    seed: int = 0,
    concurrency: int | None = None,
    tasks: Path | None = None,
    events: Literal["kafka", "file"] = "file",
    common: Common = _COMMON,
) -> int:
    """Run the benchmark against a gateway (usually one that is pinned to a checkpoint); the same command resumes.

    Args:
        gateway: Its address.
        out: Folder for results.jsonl, transcripts and events.
        attempts: Tries of each task folder; default benchmark.attempts.
        sessions: Held-out simulated sessions; default benchmark.simulated_sessions.
        seed: Of users, tasks and sampling; the same for two checkpoints pairs them.
        concurrency: Attempts at once; default benchmark.concurrency.
        tasks: Folder of task folders; default: those that come with Tidegate.
        events: Where the harness's events go: a file beside the results, or the event topic.
        common: Options of every command.
    """
    from deploy.benchmark.folders import TASKS, load_tasks
    from deploy.benchmark.runner import BenchmarkPlan, describe, run_benchmark, summarise
    from deploy.harness.__main__ import gateway_key, open_sink
    from deploy.harness.client import GatewayClient
    from deploy.harness.sandbox import open_sandbox
    from deploy.harness.session import Services
    from pipelines.redaction import user_key

    config, home = common.tree(Config), common.place()
    plan = BenchmarkPlan(
        tasks=tuple(load_tasks(tasks or TASKS)),
        attempts=config.benchmark.attempts if attempts is None else attempts,
        sessions=config.benchmark.simulated_sessions if sessions is None else sessions,
        seed=seed,
        concurrency=concurrency or config.benchmark.concurrency,
    )
    box = open_sandbox(config.harness)
    with (
        open_sink(events, config, home, out) as sink,
        GatewayClient(gateway, timeout_s=config.harness.request_timeout_s, tries=config.harness.request_tries) as client,
        progress("benchmark", total=len(plan.tasks) * plan.attempts + plan.sessions) as advance,
    ):
        services = Services(
            client=client,
            sandbox=box,
            sink=sink,
            key_of=lambda raw: user_key(home, raw),
            harness=config.harness,
            simulation=config.simulation,
            api_key=gateway_key(home),
        )
        rows = run_benchmark(services, plan, out, advance=advance)
    summary = summarise(rows)
    write_atomic(out / "summary.json", json.dumps(summary, indent=1).encode())
    common.show({"results": str(out / "results.jsonl"), "suites": summary}, lambda: describe(summary))
    return 0


@app.command
def check(*, tasks: Path | None = None, common: Common = _COMMON) -> int:
    """Prove the task folders: each task's own solution passes, doing nothing fails. Needs no gateway.

    Args:
        tasks: Folder of task folders; default: those that come with Tidegate.
        common: Options of every command.
    """
    from deploy.benchmark.attempts import null, oracle, try_task
    from deploy.benchmark.folders import TASKS, load_tasks
    from deploy.harness.sandbox import open_sandbox

    config = common.tree(Config)
    found = load_tasks(tasks or TASKS)
    box = open_sandbox(config.harness)
    verdicts = {
        task.name: {"oracle": try_task(task, oracle(box, config.harness), box, config.harness)[0],
                    "null": try_task(task, null, box, config.harness)[0]}
        for task in found
    }  # fmt: skip
    unsound = sorted(name for name, verdict in verdicts.items() if verdict != {"oracle": "pass", "null": "fail"})
    lines = [f"{name:<24} oracle {verdict['oracle']:<12} null {verdict['null']}" for name, verdict in verdicts.items()]
    common.show({"tasks": verdicts, "unsound": unsound}, lambda: "\n".join(lines))
    if unsound:
        raise ContractViolation(f"benchmark tasks measure nothing: {', '.join(unsound)}")
    return 0


if __name__ == "__main__":
    sys.exit(run(app))
