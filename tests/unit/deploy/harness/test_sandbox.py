"""The sandbox confines for real: no network, no writes outside, and bombs are stopped."""

import shutil
import socket
import statistics
import time
from pathlib import Path

import psutil
import pytest

from deploy.harness.config import HarnessConfig
from deploy.harness.sandbox import SANDBOXES, Bubblewrap, Limits, Mount, Unconfined, open_sandbox
from pipelines.errors import MissingDependency

pytestmark = pytest.mark.sandbox


def shell(sandbox: Bubblewrap, command: str, workspace: Path, **limits: float):
    bounds = Limits(**({"wall_s": 5.0, "memory_bytes": 256 * 1024 * 1024} | limits))  # type: ignore[arg-type]
    return sandbox.run(["sh", "-c", command], workspace, limits=bounds)


def test_output_and_exit_code_come_back(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "echo out; echo err >&2; exit 3", workspace)
    assert (finished.exit_code, finished.output, finished.output_bytes, finished.stopped) == (3, "out\nerr\n", 8, None)


def test_stdin_is_given(sandbox: Bubblewrap, workspace: Path) -> None:
    assert sandbox.run(["cat"], workspace, stdin=b"hello").output == "hello"


def test_a_command_starts_within_a_tenth_of_a_second(sandbox: Bubblewrap, workspace: Path) -> None:
    assert statistics.median(shell(sandbox, "true", workspace).duration_ms for _ in range(9)) < 100


def test_the_workspace_is_writable_and_outlives_the_command(sandbox: Bubblewrap, workspace: Path) -> None:
    assert shell(sandbox, "echo kept > note; pwd", workspace).output == "/workspace\n"
    assert (workspace / "note").read_text() == "kept\n"


@pytest.mark.parametrize("place", ["/usr/x", "/etc/x", "/x", "/bin/x", "/workspace/../x", "/proc/sys/kernel/x"])
def test_nothing_else_is_writable(place: str, sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, f"echo x > {place}", workspace)
    assert finished.exit_code != 0
    assert "Read-only" in finished.output or "Permission denied" in finished.output or "nonexistent" in finished.output


def test_the_network_is_off_even_towards_ourselves(sandbox: Bubblewrap, workspace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        finished = sandbox.run(["python3", "-c", program], workspace)
    assert finished.exit_code == 1
    assert "ConnectionRefusedError" in finished.output


def test_our_files_environment_and_processes_cannot_be_seen(
    sandbox: Bubblewrap, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    monkeypatch.setenv("TIDEGATE_API_KEY", "token")
    finished = shell(
        sandbox, f"cat {secret} /etc/shadow /etc/passwd; env; ls /root /home; ls /proc | grep -c '^[0-9]'; ps -A | wc -l", workspace
    )
    assert "token" not in finished.output
    assert "root:x" not in finished.output
    assert "root:*" not in finished.output
    assert max(int(line) for line in finished.output.splitlines() if line.strip().isdigit()) < 12


def test_no_capability_is_left_and_none_can_be_had(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "grep CapEff /proc/self/status; mount -t tmpfs x /tmp && echo mounted; chroot / && echo rooted", workspace)
    assert "CapEff:\t0000000000000000" in finished.output
    assert "mounted" not in finished.output
    assert "rooted" not in finished.output


def test_a_time_bomb_is_stopped_at_the_wall_time(sandbox: Bubblewrap, workspace: Path) -> None:
    started = time.monotonic()
    finished = shell(sandbox, "sleep 60", workspace, wall_s=0.5)
    assert finished.stopped == "wall_time"
    assert time.monotonic() - started < 3


def test_a_command_that_closes_its_output_is_still_under_the_wall_time(sandbox: Bubblewrap, workspace: Path) -> None:
    assert shell(sandbox, "exec >&- 2>&-; sleep 60", workspace, wall_s=0.5).stopped == "wall_time"


def test_cpu_time_is_bounded(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "python3 -c 'while True: pass'; echo ended $?", workspace, cpu_s=1, wall_s=20)
    assert "ended 137" in finished.output or "ended 152" in finished.output


def test_a_fork_bomb_is_stopped_and_leaves_nothing(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "python3 -c 'import os\nwhile True: os.fork()'", workspace, processes=40)
    assert finished.stopped in ("processes", "memory")
    deadline = time.monotonic() + 5
    while psutil.Process().children(recursive=True) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in psutil.Process().children(recursive=True) if "bwrap" in child.name()]


def test_one_process_cannot_take_more_than_the_memory_limit(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "python3 -c 'x = bytearray(10**9)'", workspace)
    assert finished.exit_code == 1
    assert "MemoryError" in finished.output


def test_many_processes_together_cannot_take_more_than_the_memory_limit(sandbox: Bubblewrap, workspace: Path) -> None:
    program = "python3 -c 'import time; x = b\"x\" * 60_000_000; time.sleep(30)' &"
    finished = shell(sandbox, f"{program} {program} {program} {program} {program} {program} wait", workspace, wall_s=20)
    assert finished.stopped == "memory"


def test_a_flood_of_output_is_cut_and_stopped(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "yes", workspace, output_bytes=1000)
    assert finished.stopped == "output"
    assert len(finished.output) == 1000
    assert finished.output_bytes > 64_000


def test_a_large_file_cannot_be_written(sandbox: Bubblewrap, workspace: Path) -> None:
    finished = shell(sandbox, "head -c 5000000 /dev/zero > big", workspace, file_bytes=1_000_000)
    assert finished.exit_code != 0
    assert (workspace / "big").stat().st_size <= 1_000_000


def test_a_background_process_dies_with_the_command(sandbox: Bubblewrap, workspace: Path) -> None:
    shell(sandbox, "(sleep 1; touch late) >/dev/null 2>&1 &", workspace)
    time.sleep(1.5)
    assert not (workspace / "late").exists()


def test_mounts_are_read_only_unless_said(sandbox: Bubblewrap, workspace: Path, tmp_path: Path) -> None:
    for name in ("tests", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "t").write_text("secret test")
    mounts = {"/tests": Mount(source=tmp_path / "tests"), "/logs/verifier": Mount(source=tmp_path / "logs", writable="yes")}
    finished = sandbox.run(["sh", "-c", "cat /tests/t; echo 1 > /logs/verifier/r; echo x > /tests/t"], workspace, mounts=mounts)
    assert finished.output.startswith("secret test")
    assert "Read-only" in finished.output
    assert (tmp_path / "logs" / "r").read_text() == "1\n"


def test_several_threads_may_run_commands_at_once(sandbox: Bubblewrap, workspace: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: shell(sandbox, f"echo {n}", workspace).output, range(24)))
    assert found == [f"{n}\n" for n in range(24)]


def test_without_bubblewrap_the_preflight_fails_closed_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="apt-get install bubblewrap"):
        open_sandbox(HarnessConfig())


def test_where_namespaces_are_forbidden_the_preflight_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    (tmp_path / "prlimit").symlink_to(str(shutil.which("prlimit")))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(MissingDependency, match="allow user namespaces"):
        open_sandbox(HarnessConfig())


def test_running_unconfined_must_be_chosen_and_still_has_limits(workspace: Path) -> None:
    assert isinstance(open_sandbox(HarnessConfig(sandbox="none")), Unconfined)
    assert isinstance(open_sandbox(HarnessConfig()), Bubblewrap)
    assert set(SANDBOXES) == {"bubblewrap", "none"}
    finished = Unconfined().run(["sh", "-c", "sleep 60"], workspace, limits=Limits(wall_s=0.3))
    assert finished.stopped == "wall_time"
