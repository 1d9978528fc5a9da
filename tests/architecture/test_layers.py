"""The arrows between stages, rooms and engines, as import-linter reads them from pyproject.toml."""

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp

from tests.architecture.source import PACKAGES, ROOT


def test_every_contract_about_imports_is_kept() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_contracts_cover_stages_every_engine_and_the_rooms_of_every_stage() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = {contract["id"]: contract for contract in tomllib.load(file)["tool"]["importlinter"]["contracts"]}
    assert contracts["stages"]["layers"] == ["deploy", "trainer", "signals", "pipelines"]
    banned = {module for contract in contracts.values() for module in contract.get("forbidden_modules", [])}
    assert {"kafka", "pyspark", "torch", "deepspeed", "transformers", "peft", "prefect", "mlflow"} <= banned
    rooms = {container for contract in contracts.values() for container in contract.get("containers", [])}
    assert {"pipelines", "signals", "trainer", "deploy.release", "deploy.serving", "deploy.harness"} <= rooms


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    circles = [module for module in sorted(imported) if _reaches(imported, module)]
    assert circles == []


def _reaches(imported: dict[str, set[str]], module: str) -> bool:
    """Whether following imports from `module` leads back to it."""
    seen: set[str] = set()
    waiting = list(imported[module])
    while waiting:
        current = waiting.pop()
        if current == module:
            return True
        if current not in seen:
            seen.add(current)
            waiting += imported[current]
    return False
