"""MAX_UPLOAD is 40, the other files are as they were."""

import subprocess
import sys


def value(module: str, expression: str) -> str:
    """Evaluate an expression on a workspace module in a process of its own, so that the module cannot end this check."""
    program = f"import sys; sys.path.insert(0, '/workspace'); import {module}; print(repr({expression}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


assert value("files", "(files.MAX_UPLOAD, files.fits(30), files.fits(41))") == "(40, True, False)"
assert value("web", "(web.PORT, web.load(1))") == "(80, 81)"
assert value("mail", "(mail.BATCH, mail.send(24))") == "(12, 2)"
