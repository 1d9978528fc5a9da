"""The command `tidegate signals survival`: what stands of edits at commit and days later."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from pipelines.errors import ConfigError
from pipelines.terminal import Common, progress
from signals.config import SignalsConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelines.config import SurvivalConfig
    from pipelines.events import EditSurvival
    from pipelines.storage import Home
    from signals.survival_edits import History, Subject

Flag = Annotated[bool, Parameter(negative="")]


def survival(
    *,
    repo: Path | None = None,
    snapshots: Path | None = None,
    edits: Path | None = None,
    commits: str | None = None,
    since: str | None = None,
    until: str | None = None,
    ref: str = "HEAD",
    limit: int = 5_000,
    record: Flag = False,
    common: Common = Common(),
) -> None:
    """Measure how much of the agent's edits stands at commit and days later, from git history or from snapshots.

    Without --edits and --commits the edits are those of the edit tracker (exact, texts kept on this machine) and those of the lake whose
    path is in the repository (estimated from their sketch). The repository is only read.

    Args:
        repo: A git repository.
        snapshots: Instead of a repository: a folder with a copy of the tree per instant, each named by it (2026-11-30T06:50:00Z).
        edits: JSON lines of edits: edit_id, path, before, after, made_at_ms; to record also session_id and user_key.
        commits: Take the commits whose message contains this text as the edits, such as "Co-Authored-By: Claude"; "" takes all.
        since: Edits made from this instant on (ISO 8601). Default: 30 days ago, or the first of the edits file.
        until: The history is complete up to this instant. Default: now; for a clone that is not kept up to date, when it was.
        ref: The mainline, with its first parents.
        limit: Most edits to measure, the newest first.
        record: Send the measurements as `edit_survival` events.
        common: Options of every command.
    """
    config, home = common.tree(SignalsConfig), common.place()
    if (repo is None) == (snapshots is None):
        raise ConfigError("name either --repo or --snapshots")
    if snapshots is not None and commits is not None:
        raise ConfigError("--commits takes commits as edits, which needs --repo")
    if edits is not None and commits is not None:
        raise ConfigError("name either --edits or --commits")
    span = _since(since, edits), _instant(until, "--until") or time.time()
    if repo is not None:
        from signals.survival_git import Repository

        with Repository(repo, ref=ref, max_bytes=config.survival.max_file_bytes) as repository:
            result, made = _from_repository(repository, home, config.survival, span, edits=edits, commits=commits, limit=limit)
    else:
        from signals.survival_edits import Snapshots

        assert snapshots is not None
        history = Snapshots(snapshots, max_bytes=config.survival.max_file_bytes)
        result, made = _measured(_subjects(history, home, edits, span[0]), history, config.survival, limit=limit)
        result = {"snapshots": str(snapshots), **result}
    result["recordable"] = len(made)
    if record:
        _send(config, home, made)
    result["recorded"] = len(made) if record else 0
    common.show(result, lambda: _text(result))


def _instant(text: str | None, option: str) -> float | None:
    from signals.survival_edits import instant

    if text is None:
        return None
    at = instant(text)
    if at is None:
        raise ConfigError(f"{option} {text!r} is no instant; write it as 2026-11-30 or 2026-11-30T06:50:00Z")
    return at


def _since(text: str | None, edits: Path | None) -> float:
    """Return the instant from which edits count: as said, else the first of the file, else 30 days ago."""
    from signals.survival_edits import edit_lines

    given = _instant(text, "--since")
    if given is not None:
        return given
    if edits is not None:
        return min((edit.made_at_ms / 1000 for edit in edit_lines(edits)), default=0.0)
    return time.time() - 30 * 86_400


def _from_repository(
    repository: Any,
    home: "Home",
    config: "SurvivalConfig",
    span: tuple[float, float],
    *,
    edits: Path | None,
    commits: str | None,
    limit: int,
) -> tuple[dict[str, Any], "list[EditSurvival]"]:
    from signals.survival_edits import GitHistory, from_commits

    with progress("reading the history"):
        history = GitHistory(repository, since_s=span[0], until_s=span[1])
    if commits is not None:
        subjects = from_commits(history, repository, containing=commits, since_s=span[0], limit=limit)
        result, made = _measured(subjects, history, config, limit=limit)
    else:
        result, made = _measured(_subjects(history, home, edits, span[0]), history, config, limit=limit)
    head = {"repo": str(repository.root), "head": repository.head, "until": f"{datetime.fromtimestamp(span[1], UTC):%Y-%m-%dT%H:%M:%SZ}"}
    return head | result, made


def _subjects(history: "History", home: "Home", edits: Path | None, since_s: float) -> "list[Subject]":
    from signals.survival_edits import from_file, from_lake, from_tracker

    if edits is not None:
        found = from_file(edits, history.root)
    else:
        found = from_tracker(home, history.root)
        exact = {(subject.session_id, subject.edit_id) for subject in found}
        found += [item for item in from_lake(home, history, since_s=since_s) if (item.session_id, item.edit_id) not in exact]
    return [subject for subject in found if subject.made_at_s >= since_s]


def _measured(
    subjects: "Iterable[Subject]", history: "History", config: "SurvivalConfig", *, limit: int
) -> tuple[dict[str, Any], "list[EditSurvival]"]:
    from signals import survival_report as report

    left_out = 0
    if isinstance(subjects, list):
        left_out = max(0, len(subjects) - limit)
        subjects = sorted(subjects, key=lambda subject: subject.made_at_s)[left_out:]
    with progress("measuring edits", total=len(subjects) if isinstance(subjects, list) else None) as advance:
        outcome = report.measure_all(subjects, history, days=config.days, advance=advance)
    return report.as_dict(outcome) | {"left_out": left_out}, report.events(outcome, now_ms=int(time.time() * 1000))


def _send(config: SignalsConfig, home: "Home", made: "list[EditSurvival]") -> None:
    from pipelines import kafka
    from pipelines.codec import encode

    kafka.ensure_topics(config, home)
    with progress("recording", total=len(made)) as advance, kafka.Producer(config, home) as producer:
        for event in made:
            producer.send(encode(event), event.session_id)
            advance(1)


def _text(result: dict[str, Any]) -> str:
    where = f"{result['repo']} at {result['head'][:12]}, known until {result['until']}" if "repo" in result else result["snapshots"]
    lines = [f"{result['edits']} edits in {where}"]
    if result["left_out"]:
        lines.append(f"{result['left_out']} older edits are left out (--limit)")
    if result["by_horizon"]:
        lines.append(
            f"{'horizon':8} {'edits':>6} {'four-gram':>10} {'no-revert':>10} {'taken back':>11} {'file gone':>10} {'estimated':>10}"
        )
    lines += [
        f"{horizon:8} {row['edits']:>6} {row['four_gram']:>10.3f} {row['no_revert']:>10.3f} {row['taken_back_share']:>11.1%} "
        f"{row['gone_share']:>10.1%} {row['estimated']:>10}"
        for horizon, row in result["by_horizon"].items()
    ]
    for horizon, reasons in result["unmeasured"].items():
        lines.append(f"{horizon}: not measured " + ", ".join(f"{reason} {number}" for reason, number in sorted(reasons.items())))
    if result["recorded"]:
        lines.append(f"{result['recorded']} events recorded")
    elif result["recordable"]:
        lines.append(f"{result['recordable']} of the measurements can be recorded as events: --record")
    return "\n".join(lines)
