"""Set-up: nothing to do the second time, altered jars refused by name, a missing Java said in one sentence."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import ROOT

SETUP = ROOT / "infra" / "scripts" / "setup"


def _load_jars() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jars", ROOT / "infra" / "jvm" / "jars.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


jars = _load_jars()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one-1.0.jar").write_bytes(b"one")
    (tmp_path / "two-2.0.jar").write_bytes(b"two")
    return tmp_path


LISTED = {"one-1.0.jar": _digest(b"one"), "two-2.0.jar": _digest(b"two")}


def test_jars_as_listed_pass(folder: Path) -> None:
    jars.check(folder, LISTED)  # raises where one differs
    assert {path.name for path in folder.iterdir()} == set(LISTED), "checking removes nothing"


def test_an_altered_jar_is_refused_by_name_with_both_digests(folder: Path) -> None:
    (folder / "two-2.0.jar").write_bytes(b"twO")
    with pytest.raises(
        jars.JarError, match=rf"two-2\.0\.jar is not the jar that was pinned: sha256 {_digest(b'twO')}, expected {_digest(b'two')}"
    ):
        jars.check(folder, LISTED)


def test_a_jar_no_list_names_is_refused(folder: Path) -> None:
    (folder / "extra-0.1.jar").write_bytes(b"x")
    with pytest.raises(jars.JarError, match=r"holds extra-0\.1\.jar, which no list names"):
        jars.check(folder, LISTED)


def test_a_missing_jar_is_named(folder: Path) -> None:
    (folder / "one-1.0.jar").unlink()
    with pytest.raises(jars.JarError, match=r"lacks one-1\.0\.jar; run infra/scripts/setup"):
        jars.check(folder, LISTED)


def test_the_command_says_it_in_one_line_and_exits_2(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "infra" / "jvm" / "jars.py", "check", "spark", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("setup: ")
    assert "delta-spark_4.2_2.13-4.4.0.jar" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", jars.SETS)
def test_every_pinned_module_has_a_digest_and_every_digest_a_module(name: str) -> None:
    text = (ROOT / "infra" / "jvm" / f"{name}.xml").read_text(encoding="utf-8")
    modules = re.findall(r'name="([^"]+)" rev="([^"]+)" transitive="false"', text)
    assert len(modules) == text.count("<dependency ")
    assert {f"{module}-{version}.jar" for module, version in modules} == set(jars.listed(name))


@pytest.mark.parametrize("name", jars.SETS)
def test_the_installed_jars_are_the_listed_ones(name: str) -> None:
    folder = Path(sys.prefix) / "share" / "tidegate" / "jars" / name
    jars.check(folder, jars.listed(name))  # raises where one differs
    assert {path.name for path in folder.glob("*.jar")} == set(jars.listed(name))


def _tools(tmp_path: Path, *names: str) -> Path:
    """A PATH with these programs only."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


def _setup(path: Path, home: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "HOME": str(home), "LANG": "C.UTF-8"}
    script = repository / "infra" / "scripts" / "setup"
    return subprocess.run(["/bin/bash", script], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


BASICS = ("bash", "sh", "dirname", "id", "sed", "awk", "cut", "grep", "cat", "git", "bwrap", "sha256sum", "mkdir", "rm")


def test_without_java_setup_says_which_command_installs_it_and_exits_2(tmp_path: Path) -> None:
    repository = tmp_path / "copy"
    shutil.copytree(ROOT / "infra", repository / "infra")
    done = _setup(_tools(tmp_path, *BASICS), tmp_path, repository)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "setup: Java 17.0.11 or later is not installed; on Debian or Ubuntu: "
        "sudo apt-get install openjdk-17-jre-headless (or set JAVA_HOME to one you have)"
    )
    assert not (repository / ".venv").exists()


def test_an_old_java_does_not_pass_for_a_new_one(tmp_path: Path) -> None:
    repository = tmp_path / "copy"
    shutil.copytree(ROOT / "infra", repository / "infra")
    tools = _tools(tmp_path, *BASICS)
    (tools / "java").write_text("#!/bin/sh\necho 'openjdk version \"17.0.9\" 2023-10-17' >&2\n")
    (tools / "java").chmod(0o755)
    done = _setup(tools, tmp_path, repository)
    assert done.returncode == 2
    assert "Java 17.0.11 or later is not installed" in done.stderr


def test_a_second_run_does_nothing_and_is_quick() -> None:
    first = subprocess.run([SETUP], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    begun = time.monotonic()
    second = subprocess.run([SETUP], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    took = time.monotonic() - begun
    assert second.stderr.splitlines() == ["setup: ready (nothing to do)"]
    assert took < 3 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
