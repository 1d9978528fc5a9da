"""What is committed: locked requirements, scripts that parse, a README whose commands exist, nothing private."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, tracked

SCRIPTS = ("setup", "check", "test", "demo", "up", "down")
REQUIREMENTS = sorted((ROOT / "infra" / "requirements").glob("*.txt"))
ROOT_ENTRIES = {
    "pipelines", "signals", "trainer", "deploy", "tests", "infra", "notebooks",
    "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml",
}  # fmt: skip
HOSTS = re.compile(
    "|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "repo1?" + r"\.maven", "registry" + r"\.npmjs", "deb" + r"\.debian\.org"])
)
MACHINE_PATHS = re.compile("/" + r"(?:work|root|home/[a-z]+)/(?!\.\.\.)[\w.-]+")
SECRETS = re.compile(
    "-----BEGIN [A-Z ]*PRIVATE" + r" KEY-----|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}\b|\bsk-(?:ant-)?[A-Za-z0-9_-]{32,}\b"
)
MADE_UP = ("tests/", "pipelines/importers/samples/", "signals/data/", "deploy/benchmark/tasks/")
"""Folders of examples: they hold invented paths and invented secrets, which redaction is tested with."""


def _texts(excluded: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    found = []
    for path in tracked():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(excluded) or not excluded:
            data = path.read_bytes()
            if b"\0" not in data[:8000]:
                found.append((name, data.decode("utf-8", errors="replace")))
    return found


@pytest.mark.parametrize("path", [path for path in REQUIREMENTS if path.stem != "overrides"], ids=lambda path: path.name)
def test_every_locked_package_has_one_version_and_hashes_and_no_index_is_named(path: Path) -> None:
    entries = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip())
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9][a-z0-9._-]*(\[[a-z0-9,_-]+\])?==\S+", entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]
    assert not re.search(r"--index-url|--extra-index-url|--find-links|https?://", path.read_text(encoding="utf-8"))


def test_every_direct_dependency_is_locked() -> None:
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=!~ ]", item)[0].lower().replace("_", "-") for item in wanted}
    locked = {line.split("==")[0].split("[")[0] for line in (ROOT / "infra/requirements/all.txt").read_text().splitlines() if "==" in line}
    assert names - locked == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_parses_and_can_be_run(name: str) -> None:
    script = ROOT / "infra" / "scripts" / name
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_ci_runs_the_same_as_a_person() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "infra/scripts/test" in text
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


def test_the_readme_shows_both_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "bash infra/scripts/demo" in text
    assert "bash infra/scripts/test" in text


def _readme_commands() -> list[str]:
    """Every `tidegate <verb> [<verb>]` in README.md, in code blocks and inline code."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = [*re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    found = re.findall(r"(?<![\w/.-])tidegate((?: [a-z][a-z-]*)+)", "\n".join(code))
    return sorted({match.strip() for match in found})


def test_every_command_in_the_readme_exists() -> None:
    commands = _readme_commands()
    assert commands
    for command in commands:
        words = command.split()
        accepted = [words[:length] for length in range(len(words), 0, -1) if _has_help(words[:length])]
        assert accepted, f"README names `tidegate {command}`, which does not exist"


def _has_help(words: list[str]) -> bool:
    done = subprocess.run([sys.executable, "-m", "deploy", *words, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode == 0


def test_the_root_holds_the_agreed_entries_and_dotfiles_only() -> None:
    entries = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {entry for entry in entries if not entry.startswith(".")} <= ROOT_ENTRIES


def test_the_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert len(text.splitlines()) > 150


def test_no_registry_host_is_written_down() -> None:
    assert [(name, HOSTS.findall(text)) for name, text in _texts() if HOSTS.search(text)] == []


def test_no_machines_paths_are_written_down() -> None:
    assert [(name, MACHINE_PATHS.findall(text)[:3]) for name, text in _texts(MADE_UP) if MACHINE_PATHS.search(text)] == []


def test_no_secret_is_written_down() -> None:
    assert [name for name, text in _texts(MADE_UP) if SECRETS.search(text)] == []
