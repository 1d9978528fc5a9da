"""Benchmark tasks as folders in Harbor's layout.

    NAME/task.toml                   limits; [metadata] suite and why
    NAME/instruction.md              all that the policy is told
    NAME/environment/workspace/      the files it starts with (Dockerfile: the same for container backends)
    NAME/solution/solve.sh           the oracle
    NAME/tests/test.sh               writes 1 or 0 to /logs/verifier/reward.txt; shown only after the policy has stopped

Takes: a folder of such folders. Gives: `FolderTask`s, checked. Leaves out: running them (`attempts.py`).
Source: Harbor, "Task structure" (harborframework.com/docs/tasks).
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.errors import ConfigError

TASKS: Final = Path(__file__).parent / "tasks"
REQUIRED: Final = ("instruction.md", "environment/workspace", "solution/solve.sh", "tests/test.sh")


class _Table(BaseModel):
    """A table of task.toml; keys that other tools of the format use are left alone."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", frozen=True)


class _Metadata(_Table):
    suite: str = Field(min_length=1)
    why: str = ""


class _Timeout(_Table):
    timeout_sec: float = Field(gt=0)


class _Environment(_Table):
    memory_mb: int = Field(default=512, ge=32)
    allow_internet: bool = False


class _TaskFile(_Table):
    metadata: _Metadata
    agent: _Timeout
    verifier: _Timeout
    environment: _Environment = _Environment()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderTask:
    """One task."""

    name: str
    suite: str
    """solve, intent, eager_editing, ..."""
    instruction: str
    folder: Path
    agent_timeout_s: float
    verifier_timeout_s: float
    memory_bytes: int

    @property
    def workspace(self) -> Path:
        """The files to start with."""
        return self.folder / "environment" / "workspace"


def load_task(folder: Path) -> FolderTask:
    """Read one task folder.

    Raises:
        ConfigError: A part is missing or wrong, or it wants the network, which no attempt gets.
    """
    for name in REQUIRED:
        if not (folder / name).exists():
            raise ConfigError(f"benchmark task {folder} lacks {name}")
    try:
        values: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        parsed = _TaskFile.model_validate(values)
    except FileNotFoundError as error:
        raise ConfigError(f"benchmark task {folder} lacks task.toml") from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(f"{folder / 'task.toml'}: {error}") from error
    if parsed.environment.allow_internet:
        raise ConfigError(f"{folder / 'task.toml'}: allow_internet = true; attempts run without a network, make the task self-contained")
    return FolderTask(
        name=folder.name,
        suite=parsed.metadata.suite,
        instruction=(folder / "instruction.md").read_text(encoding="utf-8").strip(),
        folder=folder,
        agent_timeout_s=parsed.agent.timeout_sec,
        verifier_timeout_s=parsed.verifier.timeout_sec,
        memory_bytes=parsed.environment.memory_mb * 1024 * 1024,
    )


def load_tasks(root: Path = TASKS) -> list[FolderTask]:
    """Read all task folders, by name.

    Raises:
        ConfigError: There is none, or one is broken.
    """
    found = (
        [load_task(path) for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith((".", "_"))]
        if root.is_dir()
        else []
    )
    if not found:
        raise ConfigError(f"{root} holds no benchmark tasks")
    return found
