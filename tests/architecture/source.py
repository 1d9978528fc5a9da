"""What the architecture tests look at: the repository's tracked files and the packages' syntax trees, no code run."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipelines", "signals", "trainer", "deploy")
NOT_OURS = ("deploy/benchmark/tasks/",)
"""Programs that tasks are about, broken on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def modules(top: str = "") -> tuple[Module, ...]:
    """Return the modules of one package, or of all four."""
    found = []
    for package in (top,) if top else PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if _relative(path).startswith(NOT_OURS) or "__pycache__" in path.parts:
                continue
            text = path.read_text(encoding="utf-8")
            name = _relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found.append(Module(path=path, name=name, text=text, tree=ast.parse(text)))
    return tuple(found)


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files that git tracks and that are still there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
