"""Commands of the event pipeline."""

from cyclopts import App
from pipelines.terminal import Common

app = App(name="import", help="Turn transcripts you already have into session events.")


@app.command(name="claude-code")
def claude_code(*paths: str, common: Common = Common()) -> None:
    """Import Claude Code transcripts."""
    print(paths, common)
