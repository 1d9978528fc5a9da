"""`tidegate demo`: its options, and the question before anything of yours is imported."""

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from deploy.config import Config
from pipelines.errors import ConfigError
from pipelines.storage import Home
from pipelines.terminal import Common

app = App(name="demo", help="Run the whole loop once on this machine and write a report.")

SETTINGS: Final = Path(__file__).parents[1] / "infra" / "config" / "demo.toml"


def _imports(answer: bool | None) -> tuple[str, ...]:
    """Return what to import of this person's own transcripts: nothing without a yes."""
    from deploy.demo import TRANSCRIPTS, found_transcripts

    number = found_transcripts() if answer is not False else 0
    if number == 0:
        return ()
    if answer is None:
        if not sys.stdin.isatty():
            return ()
        print(
            f"{number} Claude Code transcripts lie under {TRANSCRIPTS}. They stay on this machine. Import them too? [y/N] ",
            file=sys.stderr,
            end="",
        )
        answer = input().strip().lower() in ("y", "yes")
    return (str(TRANSCRIPTS.expanduser()),) if answer else ()


@app.default
def demo(
    *,
    sessions: int = 48,
    cycles: int = 1,
    seed: int = 0,
    import_: Annotated[bool | None, Parameter(name="--import", negative="--no-import")] = None,
    hack: Literal["invalid-tools", "none"] = "invalid-tools",
    common: Common = Common(),
) -> int:
    """Run the whole loop on this machine and write a report; the same command goes on where a killed one stopped.

    Args:
        sessions: Simulated sessions before the first cycle and after each.
        cycles: How often to train, gate, and ship or keep.
        seed: Of users, tasks and sampling.
        import_: Whether to import the transcripts under ~/.claude/projects; asked when not given, no where nobody can answer.
        hack: Which reward hack is planted at the end for the gate to refuse.
        common: Options of every command.
    """
    from deploy.demo import Plan, run_demo, to_text

    if sessions < 1 or cycles < 1:
        raise ConfigError(f"--sessions {sessions} --cycles {cycles}: both must be at least 1")
    settings = common.config or SETTINGS
    chosen = Common(config=settings, set=common.set, home=common.home, json=common.json, result=common.result)
    config = chosen.tree(Config)
    home = Home(chosen.place().root / "demo")
    plan = Plan(sessions=sessions, cycles=cycles, seed=seed, imports=_imports(import_), hack=hack)
    data = run_demo(plan, config, home, settings=settings, overrides=list(common.set))
    chosen.show(data, lambda: to_text(data, home))
    return 0
