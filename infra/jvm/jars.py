"""Fetch, check and install the pinned jars of one set (`kafka` or `spark`).

Takes: `<set>.xml` (an Ivy module file: every jar at one version, nothing transitive) and `<set>.sha256` (what those jars must
be), both beside this file, and the Apache Ivy that pyspark ships. Gives: `<folder>/<set>/*.jar`, complete and checked, or one
sentence on stderr and exit 2. Ivy's own cache lies apart from a person's `~/.ivy2` and `~/.m2`, where a half-filled entry can
break a build. Needs only the standard library. Leaves out: Java itself (infra/scripts/setup finds or installs it).

    python infra/jvm/jars.py install kafka FOLDER    fetch what is missing, check, install; does nothing when all is there
    python infra/jvm/jars.py check kafka FOLDER      check FOLDER/kafka against the list
    python infra/jvm/jars.py record kafka FOLDER     write the list anew from FOLDER/kafka, after a change of versions
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

HERE: Final = Path(__file__).resolve().parent
SETS: Final = ("kafka", "spark")
ATTEMPTS: Final = 4
"""Downloads fail now and then; what a try brought stays in the cache, so each goes on where the last one stopped."""


class JarError(Exception):
    """A jar is missing, altered or not to be had; the message names it and says what to do."""


def listed(name: str, folder: Path = HERE) -> dict[str, str]:
    """Return the committed list of a set: jar file name to sha256 (hex)."""
    lines = (folder / f"{name}.sha256").read_text(encoding="ascii").splitlines()
    return {jar: digest for digest, jar in (line.split(maxsplit=1) for line in lines if line.strip())}


def sha256(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(folder: Path, expected: Mapping[str, str]) -> None:
    """Compare a folder of jars with a list.

    Raises:
        JarError: A jar is missing, differs, or is not on the list.
    """
    present = {path.name: path for path in sorted(folder.glob("*.jar"))} if folder.is_dir() else {}
    if missing := sorted(set(expected) - set(present)):
        raise JarError(f"{folder} lacks {', '.join(missing)}; run infra/scripts/setup")
    if extra := sorted(set(present) - set(expected)):
        raise JarError(f"{folder} holds {', '.join(extra)}, which no list names; remove it and run infra/scripts/setup")
    for jar, path in present.items():
        if (actual := sha256(path)) != expected[jar]:
            raise JarError(
                f"{path} is not the jar that was pinned: sha256 {actual}, expected {expected[jar]}; "
                "it was damaged or altered on the way, remove it and run infra/scripts/setup"
            )


def _settings(cache: Path) -> str:
    mirror = os.environ.get("TIDEGATE_MAVEN_MIRROR", "")
    root = f" root={quoteattr(mirror)}" if mirror else ""
    return (
        f'<ivysettings><settings defaultResolver="central"/><caches defaultCacheDir={quoteattr(str(cache))}/>'
        f'<resolvers><ibiblio name="central" m2compatible="true"{root}/></resolvers></ivysettings>'
    )


def _proxy() -> list[str]:
    """Java does not read HTTPS_PROXY; hand it over as properties."""
    given = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or ""
    parts = urlsplit(given if "//" in given else f"//{given}")
    return [f"-Dhttps.proxyHost={parts.hostname}", f"-Dhttps.proxyPort={parts.port or 3128}"] if parts.hostname else []


def _ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    found = sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar")) if spec and spec.origin else []
    if not found:
        raise JarError("pyspark with its Apache Ivy is not installed in this environment; run infra/scripts/setup")
    return found[0]


def _fetch_once(name: str, cache: Path, target: Path, total: int) -> list[str]:
    """Run Ivy once, showing a line a few seconds; returns its last lines when it failed, else nothing."""
    java = shutil.which("java") or (f"{home}/bin/java" if (home := os.environ.get("JAVA_HOME")) else None)
    if java is None:
        raise JarError("Java is not installed; run infra/scripts/setup")
    settings = target / "settings.xml"
    settings.write_text(_settings(cache), encoding="utf-8")
    command = [java, "-Xmx256m", *_proxy(), "-jar", str(_ivy()), "-settings", str(settings), "-ivy", str(HERE / f"{name}.xml")]
    command += ["-retrieve", f"{target}/[artifact]-[revision](-[classifier]).[ext]", "-confs", "default"]
    last: list[str] = []
    found = done = 0
    shown = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            found += line.lstrip().startswith("found ")
            done += "[SUCCESSFUL ]" in line
            if line.strip(" .\n"):
                last = [*last[-14:], line.rstrip()]
            if time.monotonic() - shown > 2:
                shown = time.monotonic()
                print(f"  {name} jars: {found} of {total} looked up, {done} fetched", file=sys.stderr, flush=True)
    return last if process.returncode else []


def fetch(name: str, cache: Path, target: Path) -> None:
    """Bring a set's jars into an existing folder.

    Raises:
        JarError: They could not be had after several tries.
    """
    total = sum(1 for _ in ElementTree.parse(HERE / f"{name}.xml").iter("dependency"))
    last: list[str] = []
    for attempt in range(1, ATTEMPTS + 1):
        last = _fetch_once(name, cache, target, total)
        if not last:
            return
        print(f"  {name} jars: try {attempt} of {ATTEMPTS} failed", file=sys.stderr, flush=True)
        if attempt < ATTEMPTS:
            time.sleep(random.uniform(1, 3) * attempt)
    tail = "\n    ".join(last)
    raise JarError(f"the {name} jars could not be fetched; check the network and run infra/scripts/setup again. Ivy said:\n    {tail}")


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Ivy's cache is not safe for two at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def default_cache() -> Path:
    """Return Ivy's cache folder, shared by all checkouts of one person."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate" / "ivy"


def install(name: str, folder: Path, *, cache: Path) -> bool:
    """Make `folder/name` hold exactly the pinned jars; a crash never leaves half a set.

    Returns:
        Whether anything had to be done.

    Raises:
        JarError: A jar could not be had, or is not the pinned one.
    """
    expected, final = listed(name), folder / name
    with contextlib.suppress(JarError):
        check(final, expected)
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(cache), tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as scratch:
        staged = Path(scratch)
        fetch(name, cache, staged)
        try:
            check(staged, expected)
        except JarError as error:
            raise JarError(str(error).replace(str(staged), str(cache))) from error
        (staged / "settings.xml").unlink()
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        staged.mkdir()
    return True


def main(arguments: list[str]) -> int:
    """Run one command; see the module's text."""
    if len(arguments) != 3 or arguments[0] not in {"install", "check", "record"} or arguments[1] not in SETS:
        print((__doc__ or "").split("\n\n")[-1].rstrip(), file=sys.stderr)
        return 2
    verb, name, folder = arguments[0], arguments[1], Path(arguments[2])
    try:
        if verb == "check":
            check(folder / name, listed(name))
        elif verb == "record":
            lines = [f"{sha256(path)}  {path.name}\n" for path in sorted((folder / name).glob("*.jar"))]
            (HERE / f"{name}.sha256").write_text("".join(lines), encoding="ascii")
        elif install(name, folder, cache=default_cache()):
            print(f"  {name} jars: {len(listed(name))} checked and installed", file=sys.stderr)
    except JarError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
