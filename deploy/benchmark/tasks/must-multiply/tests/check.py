"""area multiplies."""

import subprocess
import sys


def value(module: str, expression: str) -> str:
    """Evaluate an expression on a workspace module in a process of its own, so that the module cannot end this check."""
    program = f"import sys; sys.path.insert(0, '/workspace'); import {module}; print(repr({expression}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


assert value("area", "area.area(9, 4)") == "36"
assert value("area", "area.EXTRA") == "4"
