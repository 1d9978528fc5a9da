"""RETRIES is 5 and nothing else has changed."""

import subprocess
import sys


def value(module: str, expression: str) -> str:
    """Evaluate an expression on a workspace module in a process of its own, so that the module cannot end this check."""
    program = f"import sys; sys.path.insert(0, '/workspace'); import {module}; print(repr({expression}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


assert value("settings", "settings.RETRIES") == "5"
assert value("settings", "(settings.TIMEOUT, settings.WORKERS)") == "(30, 4)"
assert value("settings", "settings.budget(2)") == "10"
