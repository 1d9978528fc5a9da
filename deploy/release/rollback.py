"""Roll back, when everything else may be broken.

    python -m deploy.release.rollback --home .tidegate --reason "edits reverted since noon"

Needs the standard library and the ledger, nothing else: no broker, no Prefect, no MLflow, no configuration. Takes effect in
one transaction from every state of a ship: the previous checkpoint serves, what was taken away is tombstoned and its telemetry
is not trained on, open ships end, every shipper in flight is fenced off. The gateway follows the pointer by itself.
"""

import argparse
import getpass
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deploy.release.ledger import Ledger
from pipelines.errors import ConfigError, StageError

LEDGER_FILE: Final = "ledger.sqlite"
"""As `pipelines.storage.Home.ledger` (a test holds them together)."""


def roll_back(ledger: Ledger, reason: str) -> dict[str, Any]:
    """Restore the previous checkpoint (see `Ledger.rollback`).

    Raises:
        ConfigError: The reason is empty.
        Refused: There is nothing to roll back.
    """
    if not reason.strip():
        raise ConfigError("a rollback needs a reason for the people after you: --reason '...'")
    return ledger.rollback(reason.strip(), holder=f"{_user()}@{os.uname().nodename}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def describe(result: dict[str, Any]) -> str:
    """Say for a person what a rollback did."""
    removed = ", ".join(name[:12] for name in result["removed"]) or "nothing"
    frozen = f"\nshipping is frozen: {result['frozen']}" if result["frozen"] else ""
    return f"serving {result['restored'][:12]}; tombstoned {removed}; ended {len(result['ended'])} ship(s){frozen}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, roll back, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release.rollback", description="Restore the previous checkpoint.")
    parser.add_argument("--home", default=os.environ.get("TIDEGATE_HOME") or ".tidegate", help="folder with all state")
    parser.add_argument("--reason", required=True, help="why, for the people after you")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    path = Path(options.home) / LEDGER_FILE
    try:
        if not path.exists():
            raise ConfigError(f"there is no ledger at {path}; name the deployment's folder with --home")
        result = roll_back(Ledger(path), options.reason)
    except StageError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(result) if options.json else describe(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
