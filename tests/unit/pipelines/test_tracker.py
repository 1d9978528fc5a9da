"""The edit tracker: when it looks, what it says, what survives a restart. Clock and reader are the test's, files where it matters."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.codec import decode, encode
from pipelines.config import ConfigError, PipelinesConfig, SurvivalConfig, load
from pipelines.errors import Rejected
from pipelines.events import EditSurvival, Event
from pipelines.storage import Home
from pipelines.survival import track
from pipelines.tracker import EditMade, EditTracker
from pipelines.watched import branch_of, kept, read_text
from tests.support.events_for_tests import CLIENT

UNHURRIED = settings(deadline=None)
"""The machine may be busy."""
HORIZONS = (0, 5, 30, 120, 300, 600, 900)
START_MS = 1_764_000_000_000


class World:
    """A clock, files and a branch that the test moves, and the events that came out."""

    def __init__(self, home: Home, config: SurvivalConfig | None = None) -> None:
        self.now_ms = START_MS
        self.files: dict[str, str | OSError | None] = {}
        self.branch: str | None = "ref: refs/heads/main"
        self.events: list[Event] = []
        self.home, self.config = home, config
        self.tracker = self.start()

    def start(self) -> EditTracker:
        self.tracker = EditTracker(
            self, self.home, client=CLIENT, config=self.config, now_ms=lambda: self.now_ms, read=self.read, branch=lambda _: self.branch
        )
        return self.tracker

    def record(self, event: Event) -> None:
        self.events.append(event)

    def read(self, path: Path, max_bytes: int) -> str | None:
        found = self.files.get(str(path))
        if isinstance(found, OSError):
            raise found
        return found

    def edit(
        self, edit_id: str = "e1", *, path: str = "/repo/a.py", before: str | None = "a\n", after: str = "a\nnew line\n", **more
    ) -> None:
        self.files[path] = after
        self.tracker.edited(
            EditMade(edit_id=edit_id, path=Path(path), before=before, after=after, session_id="s1", turn_id="t1", user_key="u", **more)
        )

    def at(self, second: float) -> None:
        self.now_ms = START_MS + int(second * 1000)
        self.tracker.step()

    def said(self, edit_id: str = "e1") -> list[tuple[int, float, float]]:
        payloads = [event.payload for event in self.events if isinstance(event, EditSurvival) and event.payload.edit_id == edit_id]
        return [(p.horizon_s, p.survival_four_gram, p.survival_no_revert) for p in payloads]


class Collected(list[Event]):
    def record(self, event: Event) -> None:
        self.append(event)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(Home(tmp_path))
    yield world
    world.tracker.close()


def balanced(tracker: EditTracker) -> bool:
    counts = tracker.counts()
    return counts.edited + counts.adopted == counts.queued + counts.pending + counts.finished + sum(counts.refused.values())


def test_an_edit_is_measured_at_each_horizon_and_then_no_more(world: World) -> None:
    world.edit()
    for second in range(0, 2000, 5):
        world.at(second)
    assert world.said() == [(horizon, 1.0, 1.0) for horizon in HORIZONS]
    assert world.tracker.counts().finished == 1
    assert balanced(world.tracker)


def test_a_step_says_how_long_the_next_may_wait(world: World) -> None:
    world.edit()
    assert world.tracker.step() == 1.0
    world.now_ms += 4_600
    assert world.tracker.step() == pytest.approx(0.4)


def test_what_happens_between_horizons_shows_in_the_figures(world: World) -> None:
    world.edit(before="keep\n", after="keep\naaaaaaaa\n")  # "aaaaaaaa\n": aaaa five times, aaa\n
    world.at(0)
    world.files["/repo/a.py"] = "# top\nkeep\naaaa\n"  # aaaa, aaa\n: 2 of 6 and 2 shared
    world.at(30)
    world.files["/repo/a.py"] = "keep\n"
    world.at(120)
    world.files["/repo/a.py"] = None
    world.at(300)
    assert world.said() == [(0, 1.0, 1.0), (30, pytest.approx(2 * 2 / 8), 1.0), (120, 0.0, 0.0), (300, 0.0, 0.0)]


def test_a_new_file_that_is_deleted_was_taken_back(world: World) -> None:
    world.edit(before=None, after="x = 1\n")
    world.files["/repo/a.py"] = None
    world.at(5)
    assert world.said() == [(5, 0.0, 0.0)]


def test_an_event_carries_the_edits_ids_and_passes_the_contract(world: World) -> None:
    world.edit(policy_version=7, arm="candidate", origin="simulated", consent="train")
    world.at(0)
    (event,) = world.events
    assert isinstance(event, EditSurvival)
    assert (event.session_id, event.turn_id, event.policy_version, event.arm, event.origin, event.user_key, event.consent) == (
        "s1", "t1", 7, "candidate", "simulated", "u", "train",
    )  # fmt: skip
    assert event.occurred_at_ms == START_MS
    assert not isinstance(decode(encode(event), 10_000), Rejected)


def test_another_branch_is_told_and_does_not_disturb_the_tracking(world: World) -> None:
    world.edit()
    world.at(0)
    world.branch, world.files["/repo/a.py"] = "ref: refs/heads/other", "something else\n"
    world.at(5)
    world.branch, world.files["/repo/a.py"] = "ref: refs/heads/main", "a\nnew line\n"
    world.at(30)
    flags = [event.payload.branch_changed for event in world.events if isinstance(event, EditSurvival)]
    assert flags == [False, True, False]
    assert world.said()[2] == (30, 1.0, 1.0)


def test_a_folder_without_a_repository_has_no_branch_to_change(world: World) -> None:
    world.branch = None
    world.edit()
    world.at(0)
    world.branch = "ref: refs/heads/main"  # git init
    world.at(5)
    assert [event.payload.branch_changed for event in world.events if isinstance(event, EditSurvival)] == [False, False]


def test_a_later_edit_of_the_same_file_moves_the_region_of_the_earlier_one(world: World) -> None:
    world.edit("e1", before="f\n", after="f\nfirst\n")
    world.at(0)
    world.edit("e2", before="f\nfirst\n", after="import x\nf\nfirst\nsecond\n")
    world.at(5)
    world.files["/repo/a.py"] = "import x\nf\nsecond\n"  # the first is taken back, the second stands
    world.at(30)
    assert world.said("e1")[-1] == (30, 0.0, 0.0)
    assert world.said("e2") == [(5, 1.0, 1.0), (30, 1.0, 1.0)]


def test_a_renamed_file_is_looked_for_in_its_new_place(world: World) -> None:
    world.edit()
    world.at(0)
    world.files["/repo/b.py"], world.files["/repo/a.py"] = world.files["/repo/a.py"], None
    world.tracker.renamed(Path("/repo/a.py"), Path("/repo/b.py"))
    world.at(5)
    assert world.said()[-1] == (5, 1.0, 1.0)


def test_a_file_that_cannot_be_read_is_counted_and_looked_at_again(world: World) -> None:
    world.edit()
    world.files["/repo/a.py"] = PermissionError(13, "no")
    world.at(0)
    assert (world.said(), world.tracker.counts().unreadable) == ([], 1)
    world.files["/repo/a.py"] = "a\nnew line\n"
    world.at(5)
    assert world.said() == [(5, 1.0, 1.0)]


def test_a_client_that_restarts_goes_on_measuring_and_skips_what_it_slept_through(world: World) -> None:
    world.edit()
    world.at(5)
    assert world.tracker.close().pending == 1
    world.start()
    assert (world.tracker.counts().adopted, world.tracker.counts().pending) == (1, 1)
    world.at(200)  # 30 and 120 are over, 120 by 80 s: what is seen now is told as of now
    world.at(300)
    assert world.said() == [(5, 1.0, 1.0), (200, 1.0, 1.0), (300, 1.0, 1.0)]
    assert balanced(world.tracker)


def test_a_client_that_was_off_for_more_than_a_day_leaves_it_to_git(world: World) -> None:
    world.edit()
    world.at(0)
    world.tracker.close()
    world.start()
    world.at(86_400 + 1)
    assert len(world.said()) == 1
    assert world.tracker.counts().refused == {"gave_up": 1}
    assert [item.edit_id for item in kept(world.home)] == ["e1"]


def test_an_adopted_edit_from_settings_with_more_horizons_ends_at_the_last_of_ours(world: World) -> None:
    world.edit()
    world.at(120)
    world.tracker.close()
    world.config = SurvivalConfig(horizons_s=(0, 60))
    world.start()
    world.at(121)
    assert world.tracker.counts().finished == 1


def test_two_trackers_share_a_home_without_taking_each_others_edits(world: World) -> None:
    world.edit()
    world.at(0)
    other = EditTracker(world, world.home, client=CLIENT, now_ms=lambda: world.now_ms)
    assert other.counts().adopted == 0
    assert other.close().pending == 0
    assert world.tracker.counts().pending == 1


def test_a_damaged_file_in_the_spool_is_dropped(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.edit("e1")
    world.edit("e2", path="/repo/b.py")
    world.at(0)
    world.tracker.close()
    first = min((world.home.spool / "survival").glob("tracker-*/*.json"))
    first.write_bytes(first.read_bytes()[:-20])
    world.start()
    assert world.tracker.counts().adopted == 1
    assert "damaged" in caplog.text


def test_bounds_refuse_and_count(tmp_path: Path) -> None:
    world = World(Home(tmp_path), SurvivalConfig(max_edits=2, max_file_bytes=100))
    world.edit("big", after="x" * 101)
    world.at(0)
    world.edit("same", before="a\n", after="a\n")
    world.at(0)
    for number in range(4):
        world.edit(f"e{number}")
    world.at(0)
    world.edit("e0")
    assert world.tracker.counts().refused == {"too_large": 1, "unchanged": 1, "full": 3}
    world.tracker.close()
    world.edit("late")
    assert world.tracker.counts().refused["closed"] == 1
    assert balanced(world.tracker)


def test_a_spool_at_its_bound_refuses(tmp_path: Path) -> None:
    world = World(Home(tmp_path), SurvivalConfig(spool_max_bytes=1_500))
    world.edit("e1", after="x" * 900)
    world.edit("e2", after="y" * 900, path="/repo/b.py")
    world.at(0)
    assert world.tracker.counts().refused == {"full": 1}
    world.tracker.close()


@pytest.mark.parametrize("field", [{"before": 3}, {"after": None}, {"session_id": ""}, {"user_key": 5}, {"region": "x"}, {"path": "a.py"}])
def test_an_edit_of_nonsense_is_refused_and_the_tracker_lives_on(world: World, field: dict) -> None:
    good = EditMade(edit_id="e0", path=Path("/repo/a.py"), before="", after="xyz", session_id="s1", user_key="u")
    world.tracker.edited(replace(good, **field))
    world.edit("e1")
    world.at(0)
    assert world.tracker.counts().refused == {"invalid": 1}
    assert world.said("e1") == [(0, 1.0, 1.0)]


def test_texts_that_utf8_cannot_carry_are_followed_all_the_same(world: World) -> None:
    world.edit(before="a\n", after="a\n\ud800 new\n")
    world.files["/repo/a.py"] = "a\n? new\n"
    world.at(0)
    assert world.said() == [(0, 1.0, 1.0)]


def test_the_texts_of_finished_edits_are_kept_for_some_days_and_without_consent_not_at_all(tmp_path: Path) -> None:
    world = World(Home(tmp_path), SurvivalConfig(horizons_s=(0,), keep_days=8))
    world.edit("e1")
    world.edit("e2", consent="none", path="/repo/c.py")
    world.at(0)
    assert [(item.edit_id, item.tracked) for item in kept(world.home)] == [("e1", track("a\n", "a\nnew line\n"))]
    world.now_ms += 9 * 86_400_000
    world.tracker.edited(EditMade(edit_id="e3", path=Path("/repo/d.py"), before="", after="zz", session_id="s1", user_key="u"))
    world.tracker.step()
    assert [item.edit_id for item in kept(world.home)] == ["e3"]
    world.tracker.close()


@UNHURRIED
@given(steps=st.lists(st.integers(0, 400), min_size=1, max_size=30))
def test_horizons_ascend_whenever_it_looks(steps: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    world = World(Home(tmp_path_factory.mktemp("home")))
    world.edit()
    second = 0
    for step in steps:
        second += step
        world.at(second)
    told = [horizon for horizon, _, _ in world.said()]
    assert told == sorted(set(told))
    assert all(horizon <= second for horizon in told)
    assert balanced(world.tracker)
    world.tracker.close()


def test_the_thread_measures_real_files_on_a_real_branch(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    (repo / ".git").mkdir(parents=True)
    (repo / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    file = repo / "src" / "a.py"
    file.parent.mkdir()
    file.write_text("a\r\nnew line\r\n")
    events = Collected()
    with EditTracker(events, Home(tmp_path / "home"), client=CLIENT, config=SurvivalConfig(horizons_s=(0, 1))) as tracker:
        tracker.edited(EditMade(edit_id="e1", path=file, before="a\n", after="a\nnew line\n", session_id="s1", user_key="u"))
        _until(lambda: len(events) == 1)
        file.write_text("a\n")
        (repo / ".git" / "HEAD").write_text("ref: refs/heads/other\n")
        _until(lambda: len(events) == 2)
    told = [event.payload for event in events if isinstance(event, EditSurvival)]
    assert [(p.horizon_s, p.survival_no_revert, p.branch_changed) for p in told] == [(0, 1.0, False), (1, 0.0, True)]


def _until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_process_leaves_its_edits_to_the_next(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from pipelines.events import Client
        from pipelines.storage import Home
        from pipelines.tracker import EditMade, EditTracker
        class Sink:
            def record(self, event): pass
        tracker = EditTracker(Sink(), Home(Path({str(tmp_path)!r})), client=Client(name="killed"))
        tracker.edited(EditMade(edit_id="e1", path=Path("/nowhere/a.py"), before="", after="xyz", session_id="s1", user_key="u"))
        tracker.step()
        print("ready", flush=True)
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    blocked = EditTracker(Collected(), Home(tmp_path), client=CLIENT)
    assert blocked.counts().adopted == 0  # its owner lives
    blocked.close()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    heir = EditTracker(Collected(), Home(tmp_path), client=CLIENT)
    assert heir.counts().adopted == 1
    heir.close()
    assert len(list((tmp_path / "spool" / "survival").glob("tracker-*/*.json"))) == 1


def test_reading_a_file_never_blocks_and_says_what_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\xff\n")
    assert read_text(tmp_path / "a", 10) == "x\ufffd\n"
    assert read_text(tmp_path / "missing", 10) is None
    assert read_text(tmp_path / "a" / "below", 10) is None
    assert read_text(tmp_path, 10) is None
    assert read_text(tmp_path / "nul\0", 10) is None
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_text(tmp_path / "a", 2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_text(tmp_path / "pipe", 10)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert read_text(tmp_path / "loop", 10) is None


def test_the_branch_is_read_from_folders_worktrees_and_nowhere(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    (main / ".git" / "worktrees" / "tree").mkdir(parents=True)
    (main / "deep" / "er").mkdir(parents=True)
    tree.mkdir()
    (main / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (main / ".git" / "worktrees" / "tree" / "HEAD").write_text("0123abc\n")
    (tree / ".git").write_text("gitdir: ../main/.git/worktrees/tree\n")
    assert branch_of(main / "deep" / "er" / "a.py") == "ref: refs/heads/main"
    assert branch_of(tree / "a.py") == "0123abc"
    (tree / ".git").write_text("nonsense")
    assert branch_of(tree / "a.py") is None
    (main / ".git" / "HEAD").unlink()
    assert branch_of(main / "a.py") is None


def test_settings_of_horizons_are_checked() -> None:
    assert load(PipelinesConfig, overrides=["survival.horizons_s=[0, 60]"]).survival.horizons_s == (0, 60)
    for bad in ("[5, 5]", "[30, 5]", "[-1]", "[]"):
        with pytest.raises(ConfigError):
            load(PipelinesConfig, overrides=[f"survival.horizons_s={bad}"])


def test_what_waits_on_disk_is_readable_json(world: World) -> None:
    world.edit()
    world.at(0)
    (path,) = (world.home.spool / "survival").glob("tracker-*/*.json")
    assert json.loads(path.read_bytes())["done"] == 1
