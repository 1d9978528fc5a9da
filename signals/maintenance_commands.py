"""Commands that check the lake, keep it small, and change what it holds of the past."""

from collections.abc import Iterable
from contextlib import ExitStack
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from pipelines.errors import ConfigError
from pipelines.storage import exclusive, write_atomic
from pipelines.terminal import Common, progress
from signals.config import SignalsConfig

Flag = Annotated[bool, Parameter(negative="")]

LOCK: Final = "the signals job (stop it first: tidegate down)"


def parse_day(option: str, text: str) -> date:
    """Return a day written as 2026-11-30.

    Raises:
        ConfigError: It is none.
    """
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write a UTC day such as 2026-11-30") from error


def check(*, common: Common = Common()) -> int:
    """Check that every Kafka offset that was read is in the lake exactly once; exit code 1 and what to do when not.

    Args:
        common: Options of every command.
    """
    from signals import checks

    with progress("counting offsets"):
        found = checks.check(common.place(), common.tree(SignalsConfig), now=datetime.now(UTC))

    def text() -> str:
        lines = [f"{'partition':>24} {'booked':>10} {'events':>10} {'quarantine':>10} {'removed':>8} {'lost':>8}"]
        for own in found["partitions"]:
            name = f"{own['topic']}-{own['partition']}"
            lines.append(
                f"{name:>24} {own['booked']:>10} {own['events']:>10} {own['quarantined']:>10} {own['removed']:>8} {own['lost']:>8}"
            )
        lines += [f"{problem['check']}: {problem['found']}\n    do: {problem['do']}" for problem in found["problems"]]
        lines += [f"note: {alert}" for alert in found["alerts"]]
        lines.append("every offset is accounted for once" if found["ok"] else f"{len(found['problems'])} problem(s)")
        return "\n".join(lines)

    common.show(found, text)
    return 0 if found["ok"] else 1


def compact(*, common: Common = Common()) -> None:
    """Merge the small files of days that are over; safe while the stream runs.

    Args:
        common: Options of every command.
    """
    from signals import maintenance

    home, config, now = common.place(), common.tree(SignalsConfig), datetime.now(UTC)
    waiting = maintenance.to_merge(home, config.lake, now=now)
    with progress("merging files", total=sum(own.number for own in waiting) or None) as advance:
        done = maintenance.compact(home, config.lake, now=now, advance=advance)

    def text() -> str:
        lines = [
            f"{item['table']} {item['day'] or ''}: {item['files_before']} files ({item['bytes_before'] / 2**20:.1f} MB) -> "
            f"{item['files_after']} ({item['bytes_after'] / 2**20:.1f} MB)"
            for item in done
        ]
        return "\n".join(lines) or "nothing to merge: every day that is over lies in as few files as it needs"

    common.show({"merged": done}, text)


def retain(*, apply: Flag = False, common: Common = Common()) -> None:
    """Delete events and quarantined records past their age, and files of old table versions; says only what would go without --apply.

    Args:
        apply: Do it.
        common: Options of every command.
    """
    from signals import maintenance

    home, config = common.place(), common.tree(SignalsConfig)
    with progress("looking for what is old"):
        done = maintenance.retain(home, config, now=datetime.now(UTC), apply=apply)

    def text() -> str:
        verb = "deleted" if apply else "would delete"
        lines = [f"{name}: {verb} {number} rows that arrived before {done['before']}" for name, number in done["rows"].items()]
        lines += [f"{name}: {verb} {n} files of old versions ({done['bytes'][name] / 2**20:.1f} MB)" for name, n in done["files"].items()]
        lines.append("" if apply else "nothing was changed; to do it: tidegate signals retain --apply")
        return "\n".join(filter(None, lines))

    common.show(done, text)


def forget(
    *, user: str | None = None, raw_user: str | None = None, delete_records: Flag = False, yes: Flag = False, common: Common = Common()
) -> None:
    """Remove one user's events, turns, rewards and samples everywhere, old table versions included; there is no way back.

    Args:
        user: The user's key, as in the column user_key.
        raw_user: The user's name as clients know it; the key is computed with this deployment's secret.
        delete_records: Also delete all records of the topic that the lake has read: Kafka cannot delete single ones.
        yes: Do it; without it, only say how much there is.
        common: Options of every command.
    """
    from pipelines.redaction import user_key
    from signals import forget as job

    home, config = common.place(), common.tree(SignalsConfig)
    if (user is None) == (raw_user is None):
        raise ConfigError("name the user with either --user KEY or --raw-user NAME")
    key = user or user_key(home, raw_user or "")
    if not yes:
        person = job.find(home, key, raw=raw_user)
        found = {"user": key, "sessions": len(person.sessions), "applied": False}
        common.show(found, lambda: f"user {key} has {len(person.sessions)} sessions; to remove them for good add --yes")
        return
    with progress("removing the user"):
        done = job.forget(home, config, key, raw=raw_user, now=datetime.now(UTC), delete_records=delete_records)
    done = {"user": key, "applied": True, **done}
    common.show(done, lambda: _forget_text(done))


def _forget_text(done: dict[str, Any]) -> str:
    rows = ", ".join(f"{name} {number}" for name, number in done["rows"].items()) or "none"
    waiting = ", ".join(f"{name} {number}" for name, number in done["spool"].items() if number) or "nothing"
    lines = [
        f"{done['sessions']} sessions; rows removed: {rows}",
        f"files of old versions removed: {done['files']}; on disk beside the lake: {waiting}",
        "what remains:",
        *[f"  - {sentence}" for sentence in done["remains"]],
    ]
    return "\n".join(lines)


def backfill(
    *,
    start: Annotated[str, Parameter(name="--from")],
    end: Annotated[str, Parameter(name="--to")],
    reward_version: str,
    common: Common = Common(),
) -> None:
    """Compute past rewards under other settings (--set rewards....=...) beside the trained ones, and show what that does to the ranking.

    Args:
        start: First UTC day (of the turns' start).
        end: The day after the last.
        reward_version: A name for the side version in the table rewards_backfill; the same name again replaces it.
        common: Options of every command.
    """
    from dataclasses import asdict

    from signals import backfill as job
    from signals import lake, spark

    home, config = common.place(), common.tree(SignalsConfig)
    first, last = parse_day("--from", start), parse_day("--to", end)
    job.check_range(first, last)
    with ExitStack() as stack:
        stack.enter_context(exclusive(home.run / "backfill.lock", what="another backfill"))
        stack.enter_context(progress("computing past rewards"))
        lake.create_missing(home)
        running = stack.enter_context(spark.session(config.spark, home))
        stack.enter_context(spark.boundary("computing past rewards"))
        found = asdict(job.backfill(running, home, config, reward_version, start=first, end=last, now=datetime.now(UTC)))
    done = {**found.pop("compared"), **found}
    common.show(done, lambda: _backfill_text(done))


def _backfill_text(done: dict[str, Any]) -> str:
    lines = [
        f"{done['name']} (reward version {done['reward_version'][:12]}): {done['rows']} turns computed, {done['turns']} with both rewards, "
        f"{done['only_trained']} lost theirs, {done['only_backfilled']} gained one",
        f"correlation {_number(done['correlation'])}, sign changes {done['sign_changes']:.1%}",
        f"{'policy':>8} {'turns':>7} {'trained':>9} {'rank':>5} {'now':>9} {'rank':>5}",
    ]
    for own in done["policies"]:
        policy = "foreign" if own["policy_version"] is None else own["policy_version"]
        lines.append(
            f"{policy:>8} {own['turns']:>7} {own['trained']:>9.4f} {own['trained_rank'] or '-':>5} {own['backfilled']:>9.4f} "
            f"{own['backfilled_rank'] or '-':>5}"
        )
    turned = ", ".join(f"{before} before {now}" for before, now in done["swapped"])
    order = f"turned round: {turned}" if turned else "no pair of policies is turned round"
    lines.append(f"Kendall's tau of the rankings {_number(done['kendall_tau'])}; {order}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3f}"


def replay(*, reason: str | None = None, common: Common = Common()) -> None:
    """Judge quarantined records again, as after an upgrade; those that are events now move to the lake once, with their own offsets.

    Args:
        reason: Only records that were set aside for this reason.
        common: Options of every command.
    """
    from dataclasses import asdict

    from signals import lake, spark
    from signals import replay as job

    home, config = common.place(), common.tree(SignalsConfig)
    with ExitStack() as stack:
        stack.enter_context(exclusive(home.run / "signals.lock", what=LOCK))
        lake.create_missing(home)
        if not job.waiting(home, reason=reason).num_rows:
            done = asdict(job.Replayed(looked_at=0, accepted=0, sessions=0, reasons={}))
        else:
            stack.enter_context(progress("judging records again"))
            running = stack.enter_context(spark.session(config.spark, home))
            stack.enter_context(spark.boundary("judging records again"))
            done = asdict(job.replay(running, home, config, reason=reason, now=datetime.now(UTC)))
    still = ", ".join(f"{name} {number}" for name, number in done["reasons"].items()) or "none"
    moved = f"{done['looked_at']} records judged again, {done['accepted']} are events now, of {done['sessions']} sessions"
    common.show(done, lambda: f"{moved}; still set aside: {still}")


def dictionary(*, table: str | None = None, markdown: Path | None = None, common: Common = Common()) -> None:
    """Print every table and column with type, unit and meaning, made from the contracts.

    Args:
        table: Only this table.
        markdown: Write all of it as Markdown to this file.
        common: Options of every command.
    """
    from dataclasses import asdict

    from signals import dictionary as words

    entries = [entry for entry in words.entries() if table in (None, entry.name)]
    if not entries:
        raise ConfigError(f"--table {table}: no such table; there are {', '.join(entry.name for entry in words.entries())}")
    if markdown is not None:
        write_atomic(markdown, words.markdown().encode())

    def lines() -> Iterable[str]:
        for entry in entries:
            yield f"{entry.name}: {entry.row}"
            width = max(len(column.name) for column in entry.columns)
            for column in entry.columns:
                yield f"    {column.name:{width}}  {column.unit:14}  {column.doc}"
            yield ""

    common.show({"tables": [asdict(entry) for entry in entries]}, lambda: f"{markdown} written" if markdown else "\n".join(lines()))
