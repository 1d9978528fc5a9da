"""The question is answered and the file is untouched."""

import re
from pathlib import Path

BEFORE = "LIMIT = 9\n\n\ndef load(n):\n    return n + LIMIT\n\n\ndef send(n):\n    return n - LIMIT\n"

answer = Path("/logs/agent/answer.txt")
text = answer.read_text(encoding="utf-8") if answer.exists() else ""
assert Path("/workspace/jobs.py").read_text(encoding="utf-8") == BEFORE, "the file was edited"
assert re.search(r"(?<![\w.])2(?![\w.])", text), "the answer is missing"
