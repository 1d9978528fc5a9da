"""`tidegate signals followup`: fit the follow-up model on labels, score messages with it, ask the judge where it is unsure.

Takes: label and message files, the lake. Gives: a head file and its report; probabilities as JSON lines on stdout; frozen verdicts.
Leaves out: the model (`followups.py`) and its fit (`fitting.py`).
"""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from pipelines.errors import ConfigError
from pipelines.storage import Home, write_atomic
from pipelines.terminal import Common, progress
from signals.config import FollowupsConfig, SignalsConfig

if TYPE_CHECKING:
    from signals.followup_scoring import Row
    from signals.judge import HttpJudge

app = App(name="followup", help="Read what the next user message says about the answer before it.")

File = Annotated[str, Parameter(allow_leading_hyphen=True)]
Flag = Annotated[bool, Parameter(negative="")]
BATCH: Final = 512
"""Messages scored together; results appear after each."""
MAX_COMPLAINTS: Final = 20
"""Bad lines named one by one; further ones are only counted."""


@app.command
def fit(*, labels: Path | None = None, out: Path | None = None, plot: Path | None = None, common: Common = Common()) -> None:
    """Fit the model on labelled follow-ups and report how it does on ideas that it had not seen.

    Args:
        labels: JSON lines with id, family, language, shape, split (fit or held_out), previous, text, dissatisfied and, where known,
            stack_traces, reply_delay_ms, interrupted; default: the labels that come with Tidegate.
        out: Where to write the head; default: only report. The head in use is signals/data/followup_head.json.
        plot: Also write the report as .html, or its reliability curve as .svg.
        common: Options of every command.
    """
    import numpy as np

    from signals import fitting, followup_report

    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot writes .svg or .html, not {plot.suffix or plot.name}")
    rows = fitting.labelled(labels or fitting.LABELLED)
    with progress("fitting", total=1 + 2 * len(fitting.PENALTIES)) as step:
        fitted = fitting.fit(rows, progress=lambda _: step(1))
    held = [row for row in rows if row.split == "held_out"]
    truth = np.array([float(row.dissatisfied) for row in rows])
    threshold = fitted.head.threshold
    found: dict[str, Any] = {
        "rows": len(rows),
        "penalty": fitted.penalty,
        "held_out": followup_report.report(
            fitted.held_out,
            np.array([float(row.dissatisfied) for row in held]),
            families=[row.family for row in held],
            groups={"language": [row.language for row in held], "shape": [row.shape for row in held]},
            threshold=threshold,
        ),
        "out_of_fold": followup_report.report(
            fitted.out_of_fold,
            truth,
            families=[row.family for row in rows],
            groups={"language": [row.language for row in rows], "shape": [row.shape for row in rows]},
            threshold=threshold,
        ),
        "head": None if out is None else str(out),
    }
    if out is not None:
        write_atomic(out, fitting.as_json(fitted.head).encode())
    if plot is not None:
        make = followup_report.svg if plot.suffix == ".svg" else followup_report.html
        write_atomic(plot, make(found["held_out"]).encode())
    common.show(found, lambda: _fit_text(found))


def _fit_text(found: dict[str, Any]) -> str:
    lines: list[str] = []
    for part, what in (("held_out", "held out, from a fit without them"), ("out_of_fold", "all, each from a fit without its fold")):
        whole = found[part]["all"]
        lines.append(f"{what}: {whole['rows']} messages of {whole['families']} ideas, {whole['dissatisfied']} of them dissatisfied")
        lines += [
            f"  {name.replace('_', ' '):24} {whole[name]['value']:.3f}  ({whole[name]['low']:.3f} to {whole[name]['high']:.3f})"
            for name in ("auc", "calibration_error", "recall_at_90_precision", "brier")
        ]
        at = whole["at_threshold"]
        lines.append(f"  at threshold {at['threshold']}: {at['tpr']:.1%} of the dissatisfied, {at['fpr']:.1%} of the others")
    for part, grouping in (("held_out", "language"), ("out_of_fold", "language"), ("out_of_fold", "shape")):
        lines.append(f"{part.replace('_', ' ')} by {grouping}:")
        for group, f in found[part][f"by_{grouping}"].items():
            figures = "AUC {auc:.3f}  calibration error {calibration_error:.3f}  recall at 90 % precision {recall_at_90_precision:.2f}"
            both = "" if f["auc"] is None else figures.format(**f)
            lines.append(
                f"  {group:24} {f['rows']:5} rows, {f['dissatisfied']:4} dissatisfied  right {f['right_at_half']:6.1%}  {both}".rstrip()
            )
    return "\n".join(lines)


@app.command
def score(file: File, *, judge: Flag = False, common: Common = Common()) -> None:
    """Print P(dissatisfied) of follow-ups as JSON lines {id, p_dissatisfied}, in the order they come.

    Args:
        file: JSON lines with id, previous, text and, where known, stack_traces, reply_delay_ms, interrupted; - reads standard input.
        judge: Also ask the judge of the settings (followups.judge_url) where the model is unsure.
        common: Options of every command.
    """
    config = common.tree(SignalsConfig).followups
    counts = {"scored": 0, "bad": 0, "judged": 0}
    if file != "-" and not Path(file).is_file():
        raise ConfigError(f"{file} is no file; give a file of JSON lines, or - for standard input")
    with nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as lines:
        if judge:
            _score_judged(lines, counts, config, common.place())
        else:
            _score(lines, counts, config, None)
    print(f"tidegate: {counts['scored']} scored, {counts['bad']} bad lines", file=sys.stderr)
    if counts["bad"] and not counts["scored"]:
        raise ConfigError(f"no line of {'standard input' if file == '-' else file} is a follow-up {{id, previous, text}}")


@app.command
def judge(*, withdraw: Flag = False, common: Common = Common()) -> None:
    """Ask the judge of the settings about the lake's follow-ups that the model is unsure of, and freeze its verdicts for rewards.

    What is frozen is used from the next distil on, under another reward version; for turns of before:
    tidegate signals run --once --everything.

    Args:
        withdraw: Ask nothing; take the verdicts out of force.
        common: Options of every command.
    """
    from signals import verdict_store
    from signals.judge import HttpJudge

    home, config = common.place(), common.tree(SignalsConfig).followups
    if withdraw:
        verdict_store.withdraw(home)
        common.show({"withdrawn": True, "verdicts": 0, "version": ""}, lambda: "no verdicts are in force")
        return
    with HttpJudge(config, verdict_store.asked(home, config)) as asked, progress("asking about follow-ups") as step:
        found = verdict_store.ask(home, config, asked, now=datetime.now(UTC), step=step)
    spent = asked.spent
    result: dict[str, Any] = {
        "withdrawn": False, "follow_ups": found.follow_ups, "unsure": found.unsure, "verdicts": len(found.judged.verdicts),
        "version": found.judged.version, "share": found.judged.share, "known_before": spent.cached, "requests": spent.calls,
        "tokens": spent.tokens, "without_verdict": dict(sorted(spent.failures.items())),
    }  # fmt: skip
    common.show(result, lambda: _judge_text(result))


def _judge_text(found: dict[str, Any]) -> str:
    reasons = ", ".join(f"{reason} {number}" for reason, number in found["without_verdict"].items()) or "none"
    force = f"frozen as {found['version']}, share {found['share']}" if found["verdicts"] else "none is in force"
    return (
        f"{found['follow_ups']} follow-ups, {found['unsure']} unsure; verdicts on {found['verdicts']} ({found['known_before']} known "
        f"before): {force}\n{found['requests']} requests, {found['tokens']} tokens; without a verdict: {reasons}\n"
        "used from the next distil on; for all turns: tidegate signals run --once --everything"
    )


def _score_judged(lines: Iterable[bytes], counts: dict[str, int], config: FollowupsConfig, home: Home) -> None:
    from signals.judge import HttpJudge
    from signals.verdict_store import asked as answers

    with HttpJudge(config, answers(home, config)) as asked:
        _score(lines, counts, config, asked)
    failures = ", ".join(f"{reason} {number}" for reason, number in sorted(asked.spent.failures.items())) or "none"
    print(
        f"tidegate: judge: {counts['judged']} verdicts ({asked.spent.cached} known before), {asked.spent.calls} requests, "
        f"{asked.spent.tokens} tokens, without a verdict: {failures}",
        file=sys.stderr,
    )


def _score(lines: Iterable[bytes], counts: dict[str, int], config: FollowupsConfig, judge: "HttpJudge | None") -> None:
    from signals.followup_scoring import scorer
    from signals.judge import mixed

    batch: list[tuple[Any, Row]] = []

    def flush() -> None:
        rows = [row for _, row in batch]
        for (identity, row), p in zip(batch, scorer().score(rows), strict=True):
            unsure = judge is not None and abs(p - 0.5) <= config.judge_margin
            verdict = judge.verdict(row.message, row.previous) if judge is not None and unsure else None
            counts["judged"] += verdict is not None
            mixed_p = p if verdict is None else mixed(p, verdict, config.judge_share)
            print(json.dumps({"id": identity, "p_dissatisfied": mixed_p}, ensure_ascii=False))
        counts["scored"] += len(batch)
        batch.clear()

    for number, item in _parsed(lines):
        if isinstance(item, str):
            counts["bad"] += 1
            if counts["bad"] <= MAX_COMPLAINTS:
                print(f"tidegate: line {number}: {item}", file=sys.stderr)
            continue
        batch.append(item)
        if len(batch) == BATCH:
            flush()
    flush()


def _parsed(lines: Iterable[bytes]) -> Iterator[tuple[int, "tuple[Any, Row] | str"]]:
    """Yield line number and id with row, or what is wrong with the line; empty lines are passed over."""
    from signals.followup_scoring import Row

    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            yield number, "no JSON"
            continue
        if not isinstance(item, dict):
            yield number, "no JSON object"
        elif problem := _problem(item):
            yield number, problem
        else:
            yield (
                number,
                (
                    item["id"],
                    Row(
                        message=item["text"],
                        previous=item.get("previous"),
                        stack_traces=item.get("stack_traces") or 0,
                        reply_delay_ms=item.get("reply_delay_ms"),
                        interrupted=bool(item.get("interrupted")),
                    ),
                ),
            )


def _problem(item: dict[str, Any]) -> str | None:
    """Return what keeps a line from being a follow-up."""
    if not isinstance(item.get("id"), str | int) or isinstance(item.get("id"), bool):
        return "id is no string or whole number"
    if not isinstance(item.get("text"), str):
        return "text is no string"
    if not isinstance(item.get("previous"), str | None):
        return "previous is neither a string nor null"
    for name in ("stack_traces", "reply_delay_ms"):
        value = item.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            return f"{name} is no whole number"
    if not isinstance(item.get("interrupted"), bool | None):
        return "interrupted is neither true nor false"
    return None
