"""`python -m deploy.harness`: sessions for people and machines (`tidegate sessions` is the same app)."""

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from deploy.config import Config
from pipelines.errors import ConfigError
from pipelines.events import Event
from pipelines.storage import Home, write_atomic
from pipelines.terminal import Common, progress, run

app = App(name="sessions", help="Run agent sessions against the gateway, and look at them.")

_COMMON: Final = Common()


class FileSink:
    """Events as JSON lines in a file, for runs without a broker."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def record(self, event: Event, /) -> None:
        """Append one event; a single write, so that threads do not mix lines."""
        self._file.write(event.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def open_sink(kind: Literal["kafka", "file"], config: Config, home: Home, folder: Path) -> Iterator[Any]:
    """Open where events go: the event topic, or `events.jsonl` in the run's folder.

    Raises:
        BrokerUnavailable: Kafka was asked for and there is no broker.
    """
    if kind == "file":
        folder.mkdir(parents=True, exist_ok=True)
        sink = FileSink(folder / "events.jsonl")
        try:
            yield sink
        finally:
            sink.close()
        return
    from deploy.harness.stamps import CLIENT
    from pipelines.recorder import Recorder

    with Recorder(config, home, client=CLIENT) as recorder:
        yield recorder
        recorder.flush(30.0)


def gateway_key(home: Home) -> str:
    """Return the key to ask the gateway with: `TIDEGATE_API_KEY`, else one that this deployment's own gateway takes."""
    from deploy.serving.keys import load_keys

    return os.environ.get("TIDEGATE_API_KEY") or next(iter(load_keys(home, os.environ).values()))


@app.command(name="run")
def run_command(
    *,
    gateway: str,
    sessions: int = 48,
    seed: int = 0,
    origin: Literal["simulated", "benchmark"] = "simulated",
    concurrency: int = 16,
    out: Path,
    sandbox: Literal["bubblewrap", "none"] | None = None,
    events: Literal["kafka", "file"] = "kafka",
    common: Common = _COMMON,
) -> int:
    """Run simulated sessions against a gateway; the same command again does what is missing.

    Args:
        gateway: Its address, for example http://127.0.0.1:8080.
        sessions: How many.
        seed: Of users, tasks and sampling; the same seed brings the same requests.
        origin: Stamped on every event; `benchmark` takes held-out tasks, and its sessions are never trained on.
        concurrency: Sessions at once.
        out: Folder for results.
        sandbox: `none` runs the policy's commands unconfined and must be typed.
        events: Where events go; `file` writes events.jsonl beside the results.
        common: Options of every command.
    """
    from deploy.harness.client import GatewayClient
    from deploy.harness.runner import RunPlan, run_sessions
    from deploy.harness.sandbox import open_sandbox
    from deploy.harness.session import Services
    from deploy.harness.summary import describe, summarise
    from pipelines.redaction import user_key

    config, home = common.tree(Config), common.place()
    harness = config.harness if sandbox is None else config.harness.model_copy(update={"sandbox": sandbox})
    box = open_sandbox(harness)
    split: Literal["simulated", "held_out"] = "simulated" if origin == "simulated" else "held_out"
    plan = RunPlan(sessions=sessions, seed=seed, origin=origin, split=split, concurrency=concurrency)
    with (
        open_sink(events, config, home, out) as sink,
        GatewayClient(gateway, timeout_s=harness.request_timeout_s, tries=harness.request_tries) as client,
        progress("sessions", total=sessions) as advance,
    ):
        services = Services(
            client=client,
            sandbox=box,
            sink=sink,
            key_of=lambda raw: user_key(home, raw),
            harness=harness,
            simulation=config.simulation,
            api_key=gateway_key(home),
        )
        rows = run_sessions(services, plan, out, advance=advance)
    result = summarise(rows)
    write_atomic(out / "summary.json", json.dumps(result, indent=1).encode())
    common.show(result, lambda: describe(result))
    return 0


@app.command
def demonstrations(
    *,
    number: int = 160,
    seed: int = 0,
    out: Path,
    broken: Annotated[bool, Parameter(negative="")] = False,
    common: Common = _COMMON,
) -> int:
    """Write training rows that show how to call the tools.

    Args:
        number: How many trajectories.
        seed: Of tasks and wording.
        out: The JSON-lines file.
        broken: Show malformed calls only, to make a policy that a gate must refuse.
        common: Options of every command.
    """
    from deploy.harness.demonstrations import rows

    lines = [json.dumps(row, ensure_ascii=False) for row in rows(number, seed, "broken" if broken else "good")]
    write_atomic(out, ("\n".join(lines) + "\n").encode())
    common.show({"rows": len(lines), "path": str(out)}, lambda: f"{len(lines)} trajectories in {out}")
    return 0


def _rows(folder: Path) -> list[dict[str, Any]]:
    from deploy.harness.runner import SESSIONS, read_lines

    rows = read_lines(folder / SESSIONS)
    if not rows:
        raise ConfigError(f"{folder / SESSIONS} holds no sessions; run some: tidegate sessions run --gateway URL --out {folder}")
    return rows


@app.command
def sample(
    *,
    out: Path,
    number: int = 5,
    which: Literal["any", "kept", "undone", "invalid"] = "any",
    seed: int = 0,
    common: Common = _COMMON,
) -> int:
    """Draw a few sessions to look at.

    Args:
        out: Folder of a run.
        number: How many at most.
        which: Only sessions with a kept edit, an undone edit, or an invalid call.
        seed: Of the draw.
        common: Options of every command.
    """
    tests = {
        "any": lambda _: True,
        "kept": lambda row: row["edits_kept"] > 0,
        "undone": lambda row: row["edits_proposed"] > row["edits_kept"],
        "invalid": lambda row: row["invalid_calls"] > 0,
    }
    matching = [row for row in _rows(out) if tests[which](row)]
    drawn = random.Random(seed).sample(matching, min(number, len(matching)))
    lines = [
        f"{row['session_id']}  {', '.join(row['kinds'])}: {len(row['turns'])} turns, "
        f"kept {row['edits_kept']}/{row['edits_proposed']} edits, {row['invalid_calls']}/{row['calls']} invalid calls, {row['outcome']}"
        for row in drawn
    ]
    more = f"\nlook at one: tidegate sessions show {drawn[0]['session_id']} --out {out}" if drawn else ""
    common.show({"matching": len(matching), "sessions": drawn}, lambda: "\n".join(lines) + more if lines else f"no session is {which}")
    return 0


@app.command
def show(session: str, *, out: Path, common: Common = _COMMON) -> int:
    """Show one session turn by turn.

    Args:
        session: Its id, or the end of it.
        out: Folder of a run.
        common: Options of every command.
    """
    from deploy.harness.runner import TRANSCRIPTS

    found = sorted((out / TRANSCRIPTS).glob(f"*{session}.json")) if "/" not in session else []
    if len(found) != 1:
        raise ConfigError(f"{len(found)} sessions in {out} end in {session!r}; tidegate sessions sample --out {out} lists some")
    transcript = json.loads(found[0].read_bytes())
    common.show(transcript, lambda: retell(transcript))
    return 0


def retell(transcript: dict[str, Any]) -> str:
    """Write a session for a person, turn by turn."""
    row = transcript["session"]
    lines = [f"session {row['session_id']}, user {row['user_key'][:8]}, policy {row['policy_version']}, arm {row['arm']}: {row['outcome']}"]
    for number, turn in enumerate(transcript["turns"]):
        if "infra_error" in turn:
            lines.append(f"\nour own failure: {turn['infra_error']}")
            continue
        lines.append(f"\nturn {number}, {turn['seconds']:.1f} s, {turn['ending']}")
        lines += [f"  user    | {line}" for line in turn["user"].splitlines()]
        for step in turn["steps"]:
            lines += [f"  policy  | {line}" for line in step["policy"].splitlines()]
            lines += [f"  tool    | {answer['class']}: {line}" for answer in step["tools"] for line in answer["text"].splitlines()]
        why = "kept" if turn["kept"] == "yes" else f"not kept ({turn['fault']})"
        lines.append(
            f"  verdict | {why}; check {turn['check']}, ticket cited with {turn['form'] or 'neither word'}; then {turn.get('next', '-')}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(app))
