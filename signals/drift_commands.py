"""`tidegate signals drift`: what each policy does differently, whether that is the policy or the traffic, and what to do."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from pipelines.errors import ConfigError
from pipelines.terminal import Common, progress
from signals.config import SignalsConfig

if TYPE_CHECKING:
    from signals.monitors import Drift

app = App(name="drift", help="Show what a policy does differently, whether it is the policy or the traffic, and what to do.")

UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}


def parse_since(text: str, *, now: datetime) -> datetime:
    """Return the instant that `--since` names: 90m, 48h, 7d before now, or an ISO date or time (UTC where it says none).

    Raises:
        ConfigError: It is neither.
    """
    number, unit = text[:-1], text[-1:]
    if unit in UNITS and number.isdigit():
        return now - timedelta(**{UNITS[unit]: int(number)})
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--since {text!r}: write 90m, 48h, 7d, or a date such as 2026-11-30 or 2026-11-30T14:00") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@app.default
def drift(
    *,
    since: str | None = None,
    reference: int | None = None,
    plot: Path | None = None,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    common: Common = Common(),
) -> int:
    """Run the monitors now and show the newest hour; exit code 0 whatever they say.

    Args:
        since: Look at every hour since then (90m, 48h, 7d, or a date) and write them again; by default the hours that are new.
        reference: Compare with this policy version instead of the one before, without writing the result down.
        plot: Draw the reward by hour with its confidence sequence into this file (SVG or PNG).
        everything: Show every row of the newest hour, not only means and alarms.
        common: Options of every command.
    """
    from signals import monitors

    home, config, now = common.place(), common.tree(SignalsConfig), datetime.now(UTC)
    start = parse_since(since, now=now) if since else None
    with progress("looking at the policies"):
        if reference is None:
            found = monitors.run(home, config, now=now, since=start)
        else:
            fixed = config.model_copy(update={"monitors": config.monitors.model_copy(update={"reference_version": reference})})
            first = monitors.floor_hour(start or now - timedelta(hours=monitors.FIRST_HOURS))
            found = monitors.examine(home, fixed, now=now, since=first)
        if plot:
            from signals.monitors_plot import draw

            draw(home, config, plot, now=now)
    rows = monitors.of_latest_hour(found.rows)
    result = {
        "state": found.latest.state, "sentence": found.latest.sentence, "do": found.latest.do, "rows": rows, "written": reference is None,
        "plot": str(plot) if plot else None,
    }  # fmt: skip
    common.show(result, lambda: to_text(found, rows, everything=everything))
    return 0


def to_text(found: "Drift", rows: Sequence[Mapping[str, Any]], *, everything: bool) -> str:
    """Return the newest hour as a table and the sentence that it amounts to."""
    from signals.monitors import SHARES
    from signals.monitors_alarms import shown

    chosen = [row for row in rows if everything or row["alarm"] or row["kind"] in ("mean", "correlation")]
    lines: list[str] = []
    for version in sorted({row["policy_version"] for row in rows}):
        own = [row for row in chosen if row["policy_version"] == version]
        first = own[0]
        against = first["reference_version"]
        than = "nothing to compare with" if against is None else "its own past" if against == version else f"against policy {against}"
        lines.append(f"policy {version}, {than}, {first['window_start']:%Y-%m-%d %H:%M} to {first['window_end']:%H:%M} UTC")
        lines.append(f"  {'metric':20} {'kind':12} {'value':>9} {'expected':>9} {'effect':>8} {'n':>7} {'m':>7} {'p':>8}  alarm")
        for row in own:
            share = row["metric"] in SHARES and row["kind"] == "mean"
            usual = row["reference"] if row["expected"] is None else row["expected"]
            effect = "-" if row["effect"] is None else f"{row['effect']:+.2f}"
            p = "-" if row["p"] is None else f"{row['p']:.1g}"
            mark = f"{(row['cause'] or '').upper()}: {row['reason']}" if row["alarm"] else ""
            lines.append(
                f"  {row['metric']:20} {row['kind']:12} {shown(row['value'], share=share):>9} {shown(usual, share=share):>9} {effect:>8} "
                f"{row['n']:>7} {row['m']:>7} {p:>8}  {mark}".rstrip()
            )
        lines.append("")
    lines.append(found.latest.sentence)
    lines += [f"-> {found.latest.do}"] if found.latest.do else []
    return "\n".join(lines)
