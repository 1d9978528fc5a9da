"""Commands of the signal stage."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from pipelines.terminal import Common, run
from signals.config import SignalsConfig
from signals.survival_commands import survival

app = App(name="signals", help="Distil session events into rewards and training samples.")
explain_app = App(name="explain", help="Show every event, component, weight and rule behind one number.")
quarantine_app = App(name="quarantine", help="Look at records that are no valid events.")
app.command(explain_app)
app.command(quarantine_app)
app.command("signals.drift_commands:app", name="drift", help="Show what a policy does differently, and whose doing it is.")
app.command(survival)
app.command("signals.followup_commands:app", name="followup", help="Read what the next user message says about the answer before it.")
for _name, _line in (
    ("check", "Check that every Kafka offset that was read is in the lake exactly once."),
    ("compact", "Merge the small files of days that are over."),
    ("retain", "Delete events past their age and files of old table versions."),
    ("backfill", "Compute past rewards under other settings, beside the trained ones."),
    ("forget", "Remove one user everywhere."),
    ("dictionary", "Print every table and column with type, unit and meaning."),
):
    app.command(f"signals.maintenance_commands:{_name}", name=_name, help=_line)
app.command("signals.estimate_commands:baselines", name="baselines", help="Show what is usual, and freeze it for the next cycle.")
app.command("signals.estimate_commands:rates", name="rates", help="Show what each policy earns, late and missing outcomes allowed for.")
quarantine_app.command("signals.maintenance_commands:replay", name="replay", help="Judge the records again, as after an upgrade.")

Flag = Annotated[bool, Parameter(negative="")]


@app.command(name="run")
def run_(
    *,
    once: Flag = False,
    resume_from_ledger: Flag = False,
    accept_gap: Flag = False,
    everything: Flag = False,
    tombstoned: Path | None = None,
    common: Common = Common(),
) -> None:
    """Append new events to the lake and recompute the sessions they touch.

    Args:
        once: Read what is there now and end; without it, go on until stopped.
        resume_from_ledger: Start a new stream state where the lake ends (after the old state or the lake was lost or restored).
        accept_gap: Go on although Kafka deleted events before they were read; the loss is written to the table `gaps`.
        everything: Recompute all sessions, as after a change of reward settings.
        tombstoned: JSON file with a list of policy versions that were rolled back; what they sampled is not trainable. A run that goes on
            reads it again before each distil.
        common: Options of every command.
    """
    from signals import job

    config = common.tree(SignalsConfig)
    flags = job.Flags(
        once=once, resume_from_ledger=resume_from_ledger, accept_gap=accept_gap, everything=everything,
        tombstoned=tombstoned,
    )  # fmt: skip
    done = job.run(config, common.place(), flags)
    share = done["quarantine_share"]
    if share > config.signals.quarantine_alert_share:
        print(
            f"tidegate: {share:.1%} of the last day's records are no valid events; look at: tidegate signals quarantine show",
            file=sys.stderr,
        )
    common.show(done, lambda: _run_text(done))


def _run_text(done: dict[str, Any]) -> str:
    outcomes = ", ".join(f"{name} {number}" for name, number in done["distil"]["outcomes"].items()) or "none yet"
    return (
        f"events: {done['append']['rows']} appended, {done['append']['quarantined']} quarantined in {done['append']['batches']} batches\n"
        f"sessions: {done['distil']['sessions']} recomputed, {done['distil']['turns']} turns\n"
        f"turns in the lake: {outcomes}\n"
        f"seconds: {', '.join(f'{name} {value:.1f}' for name, value in done['seconds'].items())}"
    )


@app.command
def tables(*, common: Common = Common()) -> None:
    """List the lake's tables: rows, version, columns with units, and the line that opens each in DuckDB."""
    from signals import dictionary, lake
    from signals.tables import TABLES

    home = common.place()
    columns = {entry.name: entry.columns for entry in dictionary.entries()}
    listed = [
        {
            "table": name,
            "row": table.row,
            "rows": lake.count(home, name),
            "version": lake.open_table(home, name).version() if lake.exists(home, name) else None,
            "path": str(lake.path(home, name)),
            "columns": {column.name: {"type": column.type, "unit": column.unit, "doc": column.doc} for column in columns[name]},
            "duckdb": lake.duckdb_line(home, name),
        }
        for name, table in TABLES.items()
    ]

    def text() -> str:
        lines: list[str] = []
        for item in listed:
            lines.append(f"{item['table']}: {item['row']} ({item['rows']} rows, version {item['version']})")
            width = max(map(len, item["columns"]))
            for name, column in item["columns"].items():
                kind = column["type"] if len(column["type"]) < 30 else column["type"].split("<")[0]
                lines.append(f"    {name:{width}}  {kind:24}  {column['doc']}")
            lines.append(f"    python -c {shlex.quote(item['duckdb'])}\n")
        return "\n".join(lines)

    common.show({"tables": listed}, text)


@app.command
def counts(*, common: Common = Common()) -> None:
    """Show what became of every turn, by policy version."""
    from signals import lake

    rows = lake.counts(common.place())

    def text() -> str:
        lines = [f"{'policy':>8}  {'arm':10} {'origin':10} {'outcome':14} {'reason':20} {'turns':>7}"]
        for row in rows:
            policy = "foreign" if row["policy_version"] is None else row["policy_version"]
            lines.append(
                f"{policy:>8}  {row['arm']:10} {row['origin']:10} {row['outcome']:14} {row['outcome_reason'] or '':20} {row['turns']:>7}"
            )
        return "\n".join(lines)

    common.show({"counts": rows}, text)


@quarantine_app.command
def show(*, limit: int = 20, common: Common = Common()) -> None:
    """Show why records were set aside, and the newest of them (never their content).

    Args:
        limit: Records to list.
        common: Options of every command.
    """
    from signals import lake

    home = common.place()
    columns = ["topic", "partition", "offset", "arrived_at", "reason", "detail", "raw"]
    found = lake.read(home, "quarantine", columns=columns).to_pylist()
    conflicts = lake.read(home, "conflicts", columns=["event_id", "session_id", "topic", "partition", "offset"]).to_pylist()
    reasons: dict[str, int] = {}
    for row in found:
        reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    if conflicts:
        reasons["conflicting_duplicate"] = len(conflicts)
    newest = sorted(found, key=lambda row: row["arrived_at"], reverse=True)[:limit]
    records = [{**{key: value for key, value in row.items() if key != "raw"}, "bytes": len(row["raw"] or b"")} for row in newest]

    def text() -> str:
        lines = [f"{number:>7}  {reason}" for reason, number in sorted(reasons.items())] or ["nothing is in quarantine"]
        lines += [
            f"{row['arrived_at']:%Y-%m-%d %H:%M:%S}  {row['topic']}-{row['partition']}@{row['offset']}  {row['bytes']} bytes  "
            f"{row['reason']} {row['detail'] or ''}"
            for row in records
        ]
        return "\n".join(lines)

    common.show({"reasons": reasons, "records": records, "conflicts": conflicts[:limit]}, text)


@explain_app.command
def reward(turn_id: str, *, common: Common = Common()) -> None:
    """Explain the reward of a turn.

    Args:
        turn_id: The turn.
        common: Options of every command.
    """
    _explain(turn_id, common, whole_session=False)


@explain_app.command
def turn(turn_id: str, *, common: Common = Common()) -> None:
    """Explain the outcome and reward of a turn.

    Args:
        turn_id: The turn.
        common: Options of every command.
    """
    _explain(turn_id, common, whole_session=False)


@explain_app.command
def session(session_id: str, *, common: Common = Common()) -> None:
    """Explain every turn of a session.

    Args:
        session_id: The session.
        common: Options of every command.
    """
    _explain(session_id, common, whole_session=True)


def _explain(identity: str, common: Common, *, whole_session: bool) -> None:
    from signals import explain

    home, config = common.place(), common.tree(SignalsConfig)
    explained = explain.session(home, config.rewards, identity) if whole_session else [explain.turn(home, config.rewards, identity)]
    common.show({"turns": explained}, lambda: "\n\n".join(map(explain.text, explained)))


if __name__ == "__main__":
    sys.exit(run(app))
