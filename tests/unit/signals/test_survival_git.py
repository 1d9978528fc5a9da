"""Survival from git history and snapshots: real repositories with commits at known times."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.codec import decode, encode
from pipelines.errors import ConfigError, ContractViolation, MissingDependency, Rejected
from pipelines.events import Client, EditProposed, EditProposedPayload
from pipelines.redaction import hasher
from pipelines.storage import Home
from pipelines.survival import added_grams, sketch, track
from pipelines.tracker import EditMade, EditTracker
from signals import survival_report as report
from signals.survival_edits import GitHistory, Snapshots, Subject, from_commits, from_file, from_lake, from_tracker, inside, instant
from signals.survival_git import Repository, Unreadable
from tests.support.repository import T0, Repo

DAY = 86_400
BEFORE, AFTER = "a = 1\nb = 2\n", "a = 1\nb = 2\nc = compute(a)\n"


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    made = Repo(tmp_path / "repo")
    made.commit({"src/a.py": BEFORE}, at_s=T0)
    return made


@pytest.fixture
def opened(repo: Repo) -> Iterator[Repository]:
    with Repository(repo.root) as repository:
        yield repository


def subject(path: str = "src/a.py", *, before: str | None = BEFORE, after: str = AFTER, made_at_s: float = T0 + 100, **more) -> Subject:
    return Subject(edit_id="e1", path=path, made_at_s=made_at_s, tracked=track(before, after), session_id="s1", user_key="u", **more)


def measured(repo: Repo, edit: Subject, *, until_s: float = T0 + 30 * DAY) -> dict[str, tuple[float, float] | str]:
    with Repository(repo.root) as repository:
        found = report.measure(edit, GitHistory(repository, since_s=T0 + 1, until_s=until_s), days=(1, 7))
    return {name: row if isinstance(row, str) else (row.four_gram, row.no_revert) for name, row in found.items()}


def test_an_edit_is_measured_at_its_commit_and_days_later(repo: Repo) -> None:
    repo.commit({"src/a.py": "# top\n" + AFTER}, at_s=T0 + 400)
    repo.commit({"src/a.py": "# top\n" + BEFORE}, at_s=T0 + 100 + 3 * DAY)
    assert measured(repo, subject()) == {"commit": (1.0, 1.0), "1d": (1.0, 1.0), "7d": (0.0, 0.0)}


def test_what_was_changed_before_the_commit_shows_at_the_commit(repo: Repo) -> None:
    repo.commit({"src/a.py": BEFORE + "c = other()\n"}, at_s=T0 + 400)
    four_gram, no_revert = measured(repo, subject())["commit"]
    # "c = compute(a)\n" has 12 grams, "c = other()\n" 9; shared: "c = "
    assert four_gram == pytest.approx(2 * 1 / 21)
    assert no_revert == 1.0


def test_horizons_say_how_long_it_took_and_which_commit_it_was(repo: Repo) -> None:
    taken_up = repo.commit({"src/a.py": AFTER}, at_s=T0 + 400)
    with Repository(repo.root) as repository:
        found = report.measure(subject(), GitHistory(repository, since_s=T0, until_s=T0 + 30 * DAY), days=(1,))
    at_commit, day = found["commit"], found["1d"]
    assert isinstance(at_commit, report.Measured)
    assert isinstance(day, report.Measured)
    assert (at_commit.horizon_s, at_commit.version, day.horizon_s, day.version) == (300, taken_up, DAY, taken_up)


def test_an_edit_that_was_never_committed_or_whose_day_has_not_come_is_not_measured(repo: Repo) -> None:
    assert measured(repo, subject()) == {"commit": "not_committed", "1d": "not_committed", "7d": "not_committed"}
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 3 * DAY)
    assert measured(repo, subject(), until_s=T0 + 4 * DAY) == {"commit": (1.0, 1.0), "1d": "not_committed", "7d": "open"}
    assert measured(repo, subject(made_at_s=T0 + 5 * DAY))["commit"] == "not_committed"  # that commit was before it
    assert set(measured(repo, subject(path="other.py")).values()) == {"not_committed"}


def test_a_moved_file_is_followed_and_a_deleted_one_is_gone(repo: Repo) -> None:
    long = "".join(f"line {number}\n" for number in range(40))
    repo.commit({"src/a.py": long + AFTER}, at_s=T0 + 300)
    repo.commit({"src/a.py": None, "lib/b.py": long + AFTER + "more\n"}, at_s=T0 + 500)
    repo.commit({"lib/b.py": None}, at_s=T0 + 100 + 2 * DAY)
    edit = subject(before=long + BEFORE, after=long + AFTER)
    # a line that was added and is gone with its file: nothing stands, all was taken back
    assert measured(repo, edit) == {"commit": (1.0, 1.0), "1d": (1.0, 1.0), "7d": (0.0, 0.0)}


def test_a_branch_shows_when_it_is_merged(repo: Repo) -> None:
    repo.git("checkout", "--quiet", "-b", "feature")
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    repo.git("checkout", "--quiet", "main")
    repo.commit({"other.py": "x\n"}, at_s=T0 + 350)
    assert measured(repo, subject())["commit"] == "not_committed"
    repo.git("merge", "--quiet", "--no-ff", "-m", "merge", "feature", at_s=T0 + 700)
    with Repository(repo.root) as repository:
        row = report.measure(subject(), GitHistory(repository, since_s=T0, until_s=T0 + 900), days=())["commit"]
    assert isinstance(row, report.Measured)
    assert (row.horizon_s, row.four_gram) == (600, 1.0)


@pytest.mark.parametrize(
    "name", ["with space.py", "naïve 🎉.py", "-dash.py", ":colon", "tab\there.py", "new\nline.py", '"quoted".py', "\x01.py"]
)
def test_paths_of_all_kinds(repo: Repo, name: str) -> None:
    repo.commit({name: AFTER}, at_s=T0 + 300)
    assert measured(repo, subject(path=name, before=None))["commit"] == (1.0, 1.0)


def test_a_path_that_is_no_utf8(repo: Repo) -> None:
    (repo.root / "na\udcefve.py").write_text(AFTER)
    repo.git("add", "--all")
    repo.git("commit", "--quiet", "-m", "x", at_s=T0 + 300)
    assert measured(repo, subject(path="na\udcefve.py", before=None))["commit"] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"x" * 2_000_000, "too_large"), (b"a\0b", "binary"), (b"na\xefve\n", None)], ids=["large", "binary", "latin-1"]
)
def test_files_that_are_no_text_are_reasons(repo: Repo, content: bytes, reason: str | None) -> None:
    repo.commit({"src/a.py": content}, at_s=T0 + 300)
    assert (measured(repo, subject())["commit"] == reason) is (reason is not None)


def test_a_link_in_the_files_place_is_no_file(repo: Repo) -> None:
    (repo.root / "src/a.py").unlink()
    (repo.root / "src/a.py").symlink_to("/etc/hostname")
    repo.git("add", "--all")
    repo.git("commit", "--quiet", "-m", "x", at_s=T0 + 300)
    assert measured(repo, subject())["commit"] == "not_a_file"


def test_a_repositorys_own_settings_start_nothing(repo: Repo, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    script.chmod(0o755)
    repo.commit({"src/a.py": AFTER, ".gitattributes": "*.py diff=evil filter=evil\n"}, at_s=T0 + 300)
    for key in (
        "core.pager", "core.fsmonitor", "core.sshCommand", "diff.external", "diff.evil.textconv", "diff.evil.command",
        "filter.evil.smudge", "gpg.program", "core.editor", "credential.helper",
    ):  # fmt: skip
        repo.git("config", key, str(script))
    repo.git("config", "log.showSignature", "true")
    assert measured(repo, subject())["commit"] == (1.0, 1.0)
    assert not mark.exists()


def test_reading_leaves_the_repository_as_it_was(repo: Repo) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    files = {path: path.stat().st_mtime_ns for path in repo.root.rglob("*")}
    measured(repo, subject())
    assert {path: path.stat().st_mtime_ns for path in repo.root.rglob("*")} == files


def test_what_is_no_usable_repository_is_said_in_a_sentence(tmp_path: Path, repo: Repo) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="no git repository"):
        Repository(tmp_path / "plain")
    with pytest.raises(ConfigError, match="no folder"):
        Repository(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no commit 'nope'"):
        Repository(repo.root, ref="nope")
    with pytest.raises(ConfigError, match="no commit"):
        Repository(repo.root, ref="--output=/tmp/x")
    with pytest.raises(ConfigError, match="no commit 'HEAD'"):
        Repository(Repo(tmp_path / "empty").root)


def test_a_machine_without_git_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="git is not installed"):
        Repository(tmp_path)


def test_a_shallow_clone_is_refused_where_its_history_is_too_short(repo: Repo, tmp_path: Path) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{repo.root}", str(clone)], check=True, capture_output=True)
    with Repository(clone) as repository:
        with pytest.raises(ConfigError, match=r"shallow clone .* fetch --unshallow"):
            GitHistory(repository, since_s=T0, until_s=T0 + DAY)
        assert GitHistory(repository, since_s=T0 + 300, until_s=T0 + DAY).changes


def test_a_bare_clone_is_read_too(repo: Repo, tmp_path: Path) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(repo.root), str(tmp_path / "bare")], check=True, capture_output=True)
    with Repository(tmp_path / "bare") as repository:
        history = GitHistory(repository, since_s=T0, until_s=T0 + DAY)
        assert report.measure(subject(), history, days=())["commit"] != "not_committed"


def test_a_damaged_repository_is_a_clear_failure(repo: Repo) -> None:
    blob = repo.git("rev-parse", "HEAD:src/a.py")
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    with Repository(repo.root) as repository:
        (repo.root / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
        with pytest.raises(Unreadable, match="missing_object"):
            repository.text(blob)
    tree = repo.git("rev-parse", "HEAD^{tree}")
    (repo.root / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    with Repository(repo.root) as repository, pytest.raises(ContractViolation, match="fsck"):
        repository.changes(0)


def test_a_clone_that_lacks_texts_is_read_as_far_as_it_goes(repo: Repo) -> None:
    long = "".join(f"line {number}\n" for number in range(40))
    repo.commit({"src/a.py": None, "old.py": long}, at_s=T0 + 200)
    moved = repo.git("rev-parse", "HEAD:old.py")
    repo.commit({"old.py": None, "new.py": long + "more\n", "b.py": AFTER}, at_s=T0 + 300)
    (repo.root / ".git" / "objects" / moved[:2] / moved[2:]).unlink()
    assert measured(repo, subject(path="b.py", before=None))["commit"] == (1.0, 1.0)
    assert measured(repo, subject(path="old.py", before=None, after=long))["commit"] == "missing_object"


def test_commits_that_say_so_are_the_edits(repo: Repo) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300, message="Add c\n\nCo-Authored-By: Claude <x@example.org>")
    repo.commit({"src/a.py": BEFORE}, at_s=T0 + 300 + 2 * DAY, message="Take it back")
    repo.commit({"by_hand.py": "x\n"}, at_s=T0 + 400 + 2 * DAY)
    with Repository(repo.root) as repository:
        history = GitHistory(repository, since_s=T0, until_s=T0 + 30 * DAY)
        subjects = from_commits(history, repository, containing="co-authored-by: claude", since_s=T0, limit=10)
        outcome = report.measure_all(subjects, history, days=(1, 7), advance=lambda _: None)
    assert [(row.path, row.horizon, row.four_gram, row.no_revert) for _, row in outcome.rows] == [
        ("src/a.py", "1d", 1.0, 1.0),
        ("src/a.py", "7d", 0.0, 0.0),
    ]
    assert report.events(outcome, now_ms=0) == []  # no session to record them for


def test_commit_times_that_go_backwards_do_not_turn_history_around(repo: Repo) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 2 * DAY)
    repo.commit({"src/a.py": BEFORE}, at_s=T0 + DAY // 2)  # a clock that was wrong
    assert measured(repo, subject())["7d"] == (0.0, 0.0)
    assert measured(repo, subject())["1d"] == "not_committed"


def snapshot(root: Path, name: str, files: dict[str, str]) -> None:
    for path, content in files.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(content)


def test_snapshots_are_measured_by_the_last_one_before_each_horizon(tmp_path: Path) -> None:
    snapshot(tmp_path, str(T0), {"src/a.py": BEFORE})
    snapshot(tmp_path, str(T0 + DAY), {"src/a.py": AFTER})
    snapshot(tmp_path, "2025-11-28T16:00:00Z", {"src/b.py": ""})
    (tmp_path / "notes").mkdir()
    history = Snapshots(tmp_path, max_bytes=1_000)
    found = report.measure(subject(), history, days=(1, 2, 7))
    assert {name: row if isinstance(row, str) else (row.four_gram, row.gone) for name, row in found.items()} == {
        "1d": (1.0, False), "2d": (1.0, False), "7d": "open",
    }  # fmt: skip
    outside = report.measure(subject(path="../../etc/hostname"), history, days=(1,))
    assert outside == {"1d": "not_a_file"}
    with pytest.raises(ConfigError, match="named by an instant"):
        Snapshots(tmp_path / "notes", max_bytes=1)


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("2025-11-24T16:00:00Z", T0),
        ("2025-11-24T17:00:00+01:00", T0),
        ("20251124T160000Z", T0),
        ("1764000000", T0),
        ("soon", None),
        ("12", None),
    ],
)
def test_instants(text: str, at_s: float | None) -> None:
    assert instant(text) == at_s


def test_an_edits_file_is_read_and_a_wrong_line_is_named(tmp_path: Path, repo: Repo) -> None:
    good = {"edit_id": "e1", "path": str(repo.root / "src/a.py"), "before": BEFORE, "after": AFTER, "made_at_ms": (T0 + 100) * 1000}
    file = tmp_path / "edits.jsonl"
    file.write_text(json.dumps(good) + "\n\n" + json.dumps(good | {"path": "/elsewhere/a.py", "session_id": "s"}) + "\n")
    first, second = from_file(file, repo.root)
    assert (first.path, first.made_at_s, first.session_id) == ("src/a.py", T0 + 100, None)
    assert (second.path, second.session_id) == (None, "s")
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    assert set(measured(repo, second).values()) == {"outside"}
    file.write_text(json.dumps(good) + "\n" + json.dumps(good | {"after": 3}) + "\n")
    with pytest.raises(ContractViolation, match=r"edits\.jsonl:2: after"):
        from_file(file, repo.root)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_file(tmp_path / "none", repo.root)


def test_paths_are_taken_relative_to_the_repository(tmp_path: Path) -> None:
    assert inside(tmp_path, "src/../a.py") == "a.py"
    assert inside(tmp_path, "../a.py") is None
    assert inside(tmp_path, str(tmp_path / "src" / "a.py")) == "src/a.py"
    assert inside(tmp_path, "/etc/hostname") is None


def test_what_the_tracker_kept_is_measured_in_git(tmp_path: Path, repo: Repo) -> None:
    home = Home(tmp_path / "home")

    class Sink:
        def record(self, event: object) -> None: ...

    with EditTracker(Sink(), home, client=Client(name="t"), now_ms=lambda: (T0 + 100) * 1000) as tracker:
        tracker.edited(
            EditMade(edit_id="e1", path=repo.root / "src/a.py", before=BEFORE, after=AFTER, session_id="s1", turn_id="t1", user_key="u")
        )
        tracker.edited(EditMade(edit_id="e2", path=tmp_path / "b.py", before="", after="xyz", session_id="s1", user_key="u"))
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    (edit,) = from_tracker(home, repo.root)
    assert (edit.edit_id, edit.path, edit.session_id, edit.turn_id) == ("e1", "src/a.py", "s1", "t1")
    assert measured(repo, edit)["7d"] == (1.0, 1.0)


def test_an_edit_of_which_only_the_sketch_is_known_is_estimated(repo: Repo) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    repo.commit({"src/a.py": BEFORE + "c = compute(b)\n"}, at_s=T0 + 2 * DAY)
    packed = sketch(added_grams(track(BEFORE, AFTER)))
    edit = Subject(edit_id="e1", path="src/a.py", made_at_s=T0 + 100, sketch=packed)
    # 12 grams of "c = compute(a)\n", none in the file before; "te(a", "e(a)", "(a)\n" are gone after the change
    assert measured(repo, edit) == {"commit": (1.0, 1.0), "1d": (1.0, 1.0), "7d": (pytest.approx(9 / 12), pytest.approx(9 / 12))}
    known = Subject(edit_id="e2", path="src/a.py", made_at_s=T0 + 100, sketch=sketch(added_grams(track("", "a = 1\n"))))
    assert measured(repo, known)["commit"] == "indistinct"


def test_measurements_become_events_that_are_the_same_each_time(repo: Repo) -> None:
    repo.commit({"src/a.py": AFTER}, at_s=T0 + 400)
    made = []
    for now_ms in (1, 2):
        with Repository(repo.root) as repository:
            history = GitHistory(repository, since_s=T0, until_s=T0 + 2 * DAY)
            outcome = report.measure_all([subject(turn_id="t1", policy_version=3)], history, days=(1, 7), advance=lambda _: None)
        made.append(report.events(outcome, now_ms=now_ms))
    assert [event.model_copy(update={"recorded_at_ms": 0}) for event in made[0]] == [
        event.model_copy(update={"recorded_at_ms": 0}) for event in made[1]
    ]
    at_commit, day = made[0]
    assert (at_commit.payload.milestone, at_commit.payload.horizon_s, at_commit.occurred_at_ms) == ("commit", 300, (T0 + 400) * 1000)
    assert (day.payload.milestone, day.payload.horizon_s, day.payload.estimated) == (None, DAY, False)
    assert (day.session_id, day.turn_id, day.policy_version) == ("s1", "t1", 3)
    assert not isinstance(decode(encode(day), 10_000), Rejected)
    assert outcome.unmeasured == {"7d": {"open": 1}}
    assert report.summary(outcome)["1d"] == {
        "edits": 1, "four_gram": 1.0, "no_revert": 1.0, "taken_back_share": 0.0, "gone_share": 0.0, "estimated": 0,
    }  # fmt: skip


def test_edits_of_the_lake_are_found_by_the_hash_of_their_path(repo: Repo, tmp_path: Path) -> None:
    from signals import lake
    from signals.tables import TABLES

    repo.commit({"src/a.py": AFTER}, at_s=T0 + 300)
    home = Home(tmp_path / "home")
    packed = sketch(added_grams(track(BEFORE, AFTER)))
    rows = []
    for number, (path, what) in enumerate(
        [("src/a.py", packed), (str(repo.root / "src/a.py"), packed), ("none.py", packed), ("src/a.py", None)]
    ):
        payload = EditProposedPayload(edit_id=f"e{number}", path_hash=hasher(home)("path", path), sketch=what)
        event = EditProposed(
            event_id=f"v{number}", session_id="s1", turn_id="t1", occurred_at_ms=(T0 + 100) * 1000, recorded_at_ms=0, origin="live",
            user_key="u", client=Client(name="t"), payload=payload,
        )  # fmt: skip
        rows += [event.model_dump()] * 2
    lake.create_missing(home)
    known = {field.name for field in TABLES["events"].schema}
    lake.append(home, "events", [{key: value for key, value in row.items() if key in known} for row in rows])
    with Repository(repo.root) as repository:
        history = GitHistory(repository, since_s=T0, until_s=T0 + 2 * DAY)
        found = from_lake(home, history, since_s=T0)
        assert [(edit.edit_id, edit.path, edit.session_id) for edit in found] == [("e0", "src/a.py", "s1"), ("e1", "src/a.py", "s1")]
        assert from_lake(home, history, since_s=T0 + DAY) == []
    assert measured(repo, found[1])["commit"] == (1.0, 1.0)
