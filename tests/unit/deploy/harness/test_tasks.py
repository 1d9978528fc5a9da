"""Tasks: both ways of writing a change are right, a wrong one is not, and the form rule by hand."""

import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.harness.sandbox import Bubblewrap
from deploy.harness.tasks import FORMS, KINDS, Task, check_program, form_of, make_task

SEEDS = st.tuples(st.sampled_from(["simulated", "demonstrations", "held_out"]), st.integers(0, 10_000), st.integers(0, 500))


def passes(task: Task, text: str, folder: Path, sandbox: Bubblewrap) -> bool:
    (folder / task.path).write_text(text)
    mark = uuid.uuid4().hex
    finished = sandbox.run(["python3", "-c", check_program(task)], folder, stdin=f"{mark}\n".encode())
    return finished.exit_code == 0 and finished.output.rstrip().endswith(mark)


@pytest.mark.sandbox
@pytest.mark.parametrize("index", range(18))
def test_both_forms_pass_the_check_and_the_untouched_file_fails(index: int, workspace: Path, sandbox: Bubblewrap) -> None:
    task = make_task("simulated", 7, index)
    assert not passes(task, task.text, workspace, sandbox)
    for form in FORMS:
        assert passes(task, task.solved(form), workspace, sandbox)


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_edit_that_only_adds_the_comment_fails_the_check(kind: str, workspace: Path, sandbox: Bubblewrap) -> None:
    task = next(task for task in (make_task("held_out", 3, index) for index in range(12)) if task.kind == kind)
    assert not passes(task, f"# ref {task.ticket}\n{task.text}", workspace, sandbox)


@pytest.mark.sandbox
def test_a_file_that_ends_the_check_early_does_not_pass(workspace: Path, sandbox: Bubblewrap) -> None:
    task = make_task("simulated", 7, 0)
    assert not passes(task, "import os\nos._exit(0)\n", workspace, sandbox)
    assert not passes(task, "import sys\nsys.exit(0)\n", workspace, sandbox)


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_task_is_the_same_for_the_same_seed_and_well_formed(seed: tuple[str, int, int]) -> None:
    task = make_task(*seed)  # type: ignore[arg-type]
    assert task == make_task(*seed)  # type: ignore[arg-type]
    assert task.text.count(task.change.old) == 1
    assert len(task.text.splitlines()) <= 12
    assert task.ticket in task.request
    assert task.path in task.request
    for form in FORMS:
        assert form_of(task.text, task.solved(form), task.ticket) == form


def test_splits_do_not_share_tasks() -> None:
    held_out = {(task.text, task.request) for task in (make_task("held_out", 0, index) for index in range(200))}
    trained = {(task.text, task.request) for task in (make_task("demonstrations", 0, index) for index in range(200))}
    assert not held_out & trained


def test_six_tasks_in_a_row_hold_each_kind_once() -> None:
    assert {make_task("simulated", 1, index).kind for index in range(6, 12)} == set(KINDS)


BEFORE = "A = 1\nB = 2\n"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("A = 5  # see T-41\nB = 2\n", "see"),
        ("A = 5  # ref T-41\nB = 2\n", "ref"),
        ("A = 5  #ref  T-41\nB = 2\n", "ref"),
        ("A = 5\nB = 2\n", None),
        ("A = 5  # T-41\nB = 2\n", None),
        ("# ref T-41\nA = 5\nB = 2\n", None),
        ("A = 5  # ref T-411\nB = 2\n", None),
        ("A = 5  # reference T-41\nB = 2\n", None),
        ("A = 1  # ref T-41\nB = 2\n", None),
        ("A = 5\nB = 2  # ref T-41\n", None),
        ("A = 5  # ref T-41\nB = 9  # ref T-41\n", "ref"),
        ("A = 5  # ref T-41\nB = 9  # see T-41\n", None),
        ("A = 1\nB = 2\nC = 3  # see T-41\n", "see"),
    ],
)
def test_the_form_by_hand(after: str, expected: str | None) -> None:
    assert form_of(BEFORE, after, "T-41") == expected
