"""A git repository whose commits have the times that a test wants; git reads no settings of this machine."""

import os
import subprocess
from pathlib import Path

T0 = 1_764_000_000
"""When the first commit is made, epoch seconds."""


class Repo:
    """A new repository in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str, at_s: int = T0) -> str:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        for who in ("AUTHOR", "COMMITTER"):
            environment |= {f"GIT_{who}_NAME": "A", f"GIT_{who}_EMAIL": "a@example.org", f"GIT_{who}_DATE": f"{at_s} +0000"}
        done = subprocess.run(["git", *arguments], cwd=self.root, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, files: dict[str, str | bytes | None], *, at_s: int, message: str = "a change") -> str:
        """Write files (None deletes) and commit them; returns the id."""
        for name, content in files.items():
            path = self.root / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "-m", message, at_s=at_s)
        return self.git("rev-parse", "HEAD")
