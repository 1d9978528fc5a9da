"""The console script `tidegate`: every verb of every stage, each loaded only when it is called."""

import sys

from cyclopts import App

from pipelines.terminal import run

app = App(name="tidegate", help="Turn an agent's live sessions into a better checkpoint of that agent.", version_flags=["--version"])
app.command("pipelines.__main__:app", name="import", help="Turn transcripts you already have into session events.")


def main() -> None:
    """Run `tidegate` and exit with the command's code."""
    sys.exit(run(app))


if __name__ == "__main__":
    main()
