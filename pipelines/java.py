"""Where Java and the pinned jars are.

Takes: `JAVA_HOME`, `PATH` and the running environment's folder. Gives: the `java` to run and a folder of jars, or one sentence
on what to install. Leaves out: what the jars do (`broker.py`, `signals.spark`).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pipelines.errors import MissingDependency

MINIMUM: Final = (17, 0, 11)
"""Spark 4.2 needs 17.0.11; Kafka 4 brokers need 17."""
INSTALL: Final = "on Debian or Ubuntu: sudo apt-get install openjdk-17-jre-headless (or set JAVA_HOME to one you have)"


def version_of(banner: str) -> tuple[int, ...]:
    """Return the version in the output of `java -version`, e.g. (17, 0, 15); empty when there is none."""
    found = re.search(r'version "(\d+(?:\.\d+)*)', banner)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def find_java(environment: Mapping[str, str] | None = None) -> Path:
    """Find a Java that is new enough: `$JAVA_HOME/bin/java`, else the first on the path.

    Args:
        environment: Variables to look at; None means this process's.

    Raises:
        MissingDependency: There is none, it does not run, or it is too old; says which command installs one.
    """
    variables = os.environ if environment is None else environment
    home = variables.get("JAVA_HOME")
    own = Path(home) / "bin" / "java" if home else None
    found = str(own) if own and own.exists() else shutil.which("java", path=variables.get("PATH", ""))
    wanted = ".".join(map(str, MINIMUM))
    if found is None:
        raise MissingDependency(f"Java {wanted} or later is not installed; {INSTALL}")
    try:
        shown = subprocess.run([found, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise MissingDependency(f"{found} does not run ({error.strerror}); {INSTALL}") from error
    version = version_of(shown.stderr + shown.stdout)
    if version < MINIMUM:
        raise MissingDependency(f"{found} is Java {'.'.join(map(str, version)) or 'of an unknown version'}, {wanted} is needed; {INSTALL}")
    return Path(found)


def jars_folder(name: Literal["kafka", "spark"]) -> Path:
    """Return the folder of pinned jars that infra/scripts/setup filled.

    Raises:
        MissingDependency: It was not filled in this environment.
    """
    folder = Path(sys.prefix) / "share" / "tidegate" / "jars" / name
    if next(folder.glob("*.jar"), None) is None:
        raise MissingDependency(f"the {name} jars are not in {folder}; run: bash infra/scripts/setup")
    return folder
