"""The console script `tidegate`: every verb of every stage, each loaded only when it is called.

A verb's help line stands here, so that `tidegate --help` imports no stage.
"""

import sys
from typing import Final

from cyclopts import App

from pipelines.terminal import run

app = App(
    name="tidegate",
    help="Turn an agent's live sessions into a better checkpoint of that agent, several times a day.",
    help_format="plaintext",  # markdown would load a parser and a highlighter for every `--help`
)

VERBS: Final = (
    ("demo", "deploy.commands:app", "Run the whole loop once on this machine and write a report."),
    ("up", "deploy.supervise:up_command", "Start broker, stream, gateway, Prefect and the five-hour schedule."),
    ("down", "deploy.supervise:down_command", "Stop what `up` started."),
    ("reset", "deploy.supervise:reset_command", "Remove all state of this deployment, after asking."),
    ("cycle", "deploy.orchestrator:app", "Freeze a window, train, evaluate, gate, ship or keep: once, now."),
    ("status", "deploy.status:app", "Show what serves, what shipped, how far the lake is."),
    ("doctor", "deploy.doctor:app", "Find what is wrong with this machine or deployment, and say what to do."),
    ("import", "pipelines.__main__:app", "Turn transcripts you already have into session events."),
    ("bench", "deploy.bench_commands:app", "Measure speed and memory of a stage on this machine."),
    ("collect", "pipelines.collector_commands:app", "Take session events over HTTP: native JSON and OpenTelemetry."),
    ("signals", "signals.__main__:app", "Append events to the lake, distil rewards, explain them."),
    ("trainer", "trainer.__main__:app", "Warm start, update and score checkpoints."),
    ("warmstart", "trainer.__main__:warmstart", "Prepare a checkpoint for reinforcement: pretrain on text, fine-tune on demonstrations."),
    ("serve", "deploy.serving.__main__:app", "Serve the current checkpoint behind the OpenAI-compatible gateway."),
    ("sessions", "deploy.harness.__main__:app", "Run agent sessions against the gateway, and look at them."),
    ("benchmark", "deploy.benchmark.__main__:app", "Score a checkpoint on task folders and held-out sessions."),
    ("gate", "deploy.release.__main__:gate", "Plan, run and explain the gate."),
    ("ship", "deploy.release.__main__:ship", "Ships: list, show, status."),
    ("rollback", "deploy.release.__main__:rollback", "Serve the previous checkpoint again, now."),
    ("freeze", "deploy.release.__main__:freeze", "Stop promotions until `thaw`."),
    ("thaw", "deploy.release.__main__:thaw", "Allow promotions again."),
    ("anchor", "deploy.release.__main__:anchor", "Set or show the checkpoint that drift is measured against."),
    ("ckpt", "deploy.release.__main__:ckpt", "Checkpoints: list, verify, collect garbage."),
)
"""Verb, where it lives, and its line in `tidegate --help`."""

for name, place, line in VERBS:
    app.command(place, name=name, help=line)


def main() -> None:
    """Run `tidegate` and exit with the command's code."""
    sys.exit(run(app))


if __name__ == "__main__":
    main()
