"""`python -m trainer VERB`: import the base model, warm start, update, score, sabotage, check this stage."""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from pipelines.errors import ConfigError
from pipelines.terminal import Common, progress, run, waiting
from trainer.config import TrainerConfig

app = App(name="trainer", help="One update: samples and the serving checkpoint become a candidate checkpoint.")
app.command("trainer.bench_commands:plan_app", name="plan", help="How fast and how large an update of a model would be on so many GPUs.")


def _table(result: dict[str, Any]) -> str:
    shown = {key: value for key, value in result.items() if not isinstance(value, dict | list) and value is not None}
    return "\n".join(f"{key:<28} {f'{value:.5g}' if isinstance(value, float) else value}" for key, value in shown.items())


@app.command(name="import-base")
def import_base(*, common: Common = Common()) -> None:
    """Convert the packaged SmolLM2-135M-Instruct into a checkpoint in the store (once)."""
    from trainer import publish

    with progress("import base model", total=1) as advance:
        identity, path = publish.import_base(common.place().store, now=datetime.now(UTC))
        advance(1)
    common.show({"checkpoint": identity, "path": str(path)}, lambda: f"base checkpoint {identity}\n{path}")


@app.command
def warmstart(
    *,
    parent: str,
    text: Annotated[
        list[Path] | None, Parameter(negative="", help="Files or folders of text and code to go on pretraining on first; may repeat.")
    ] = None,
    data: Annotated[Path | None, Parameter(help="Demonstrations or trajectories, JSON lines of messages and tools.")] = None,
    rewarded: Annotated[float | None, Parameter(help="Learn from the lake's own completions whose turn earned this much.")] = None,
    stop_early: Annotated[int | None, Parameter(help="Stop after this many examples; default: warmstart.max_examples.")] = None,
    common: Common = Common(),
) -> None:
    """Prepare a checkpoint for reinforcement: pretrain on text, fine-tune on demonstrations (cached by content)."""
    from trainer import warmstart as job

    if not text and data is None and rewarded is None:
        raise ConfigError("nothing to learn from: give --text FOLDER, --data FILE.jsonl, --rewarded 0.5, or several of them")
    if stop_early is not None and stop_early < 1:
        raise ConfigError(f"--stop-early {stop_early} leaves nothing to learn from; give 1 or more")
    config, home, now = common.tree(TrainerConfig), common.place(), datetime.now(UTC)
    made: dict[str, Any] = {}
    if text:
        made = job.pretrain(config, home, parent=parent, places=text, now=now)
    if data is not None or rewarded is not None:
        first = {"pretrained": made["checkpoint"]} if made else {}
        made = first | job.warmstart(
            config, home, parent=made.get("checkpoint", parent), data=data, rewarded=rewarded, max_examples=stop_early, now=now
        )
    common.show(made, lambda: _table(made))


@app.command
def update(
    *,
    parent: str,
    policy_version: int,
    lake_version: Annotated[int | None, Parameter(help="Delta version of `samples`; default: the newest.")] = None,
    common: Common = Common(),
) -> None:
    """Make one candidate from the lake and the serving checkpoint; after a kill the same command goes on."""
    from trainer import update as job

    made = job.update(
        common.tree(TrainerConfig), common.place(), parent=parent, policy_version=policy_version, lake_version=lake_version,
        now=datetime.now(UTC),
    )  # fmt: skip
    common.show(made, lambda: _table(made))


@app.command
def join(
    job: Annotated[Path | None, Parameter(help="A job's folder; default: the newest open one of this home, waited for.")] = None,
    *,
    forever: Annotated[bool, Parameter(negative="", help="After a job wait for the next.")] = False,
    common: Common = Common(),
) -> int:
    """Lend this machine's ranks to a training job that another machine of the same home started (trainer.nodes > 1)."""
    from trainer import launch

    home, code = common.place(), 0
    while True:
        with waiting("training job"):
            while not (found := [job] if job else launch.open_jobs(home.training)):
                time.sleep(launch.POLL_S)
        code = launch.join(found[0])
        if not forever:
            common.show({"job": found[0].name, "exit_code": code}, lambda: f"{found[0].name} ended with code {code}")  # noqa: B023  shown at once
            return min(code, 1)


@app.command
def score(
    *,
    checkpoint: str,
    reference: str,
    policy_version: Annotated[int | None, Parameter(help="Rows of this version; default: the newest among the rows.")] = None,
    lake_version: int | None = None,
    limit: int = 256,
    dtype: Literal["fp32", "bf16"] = "bf16",
    common: Common = Common(),
) -> None:
    """Score logged rows with a candidate and the serving checkpoint: self-check, KL, ratio tails, entropies, finiteness."""
    from trainer import evaluate

    made = evaluate.score_pair(
        common.tree(TrainerConfig), common.place(), checkpoint=checkpoint, reference=reference, policy_version=policy_version,
        lake_version=lake_version, limit=limit, dtype=dtype, now=datetime.now(UTC),
    )  # fmt: skip
    common.show(made, lambda: _table(made))


@app.command
def sabotage(
    *,
    parent: str,
    kind: Literal["nan", "invalid-tools"],
    data: Annotated[Path | None, Parameter(help="Demonstrations of broken tool calls, for invalid-tools.")] = None,
    common: Common = Common(),
) -> None:
    """Make a checkpoint that the gate must refuse."""
    from trainer import sabotage as job

    made = job.sabotage(common.tree(TrainerConfig), common.place(), parent=parent, kind=kind, data=data, now=datetime.now(UTC))
    common.show(made, lambda: _table(made))


@app.command
def doctor(*, common: Common = Common()) -> int:
    """Check this stage: versions, base model, gradient parity of the training engine with plain torch."""
    from trainer import doctor as checks

    found = [check() for check in checks.CHECKS]
    made = {"checks": [entry.as_dict() for entry in found]}
    lines = [f"{'ok  ' if entry.ok else 'FAIL'} {entry.name}: {entry.detail}" for entry in found]
    common.show(made, lambda: "\n".join(lines))
    return 0 if all(entry.ok for entry in found) else 1


if __name__ == "__main__":
    sys.exit(run(app))
