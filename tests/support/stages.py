"""Small real stage commands for tests of the cycle: each writes what the real stage writes, in milliseconds.

    python tests/support/stages.py signals|train|score|gateway|benchmark|mirror ... --home H [--result F]

What they do is set by `H/scenario.json`: `candidate` (good, invalid, nan, none), `fail` {stage: exit code}, `fail_times` (how often,
default for ever), `hold` (a stage that waits until it is killed).
"""

import http.server
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.storage import Home, write_atomic


def option(words: list[str], name: str, default: str = "") -> str:
    """Return the word after `name`."""
    return words[words.index(name) + 1] if name in words else default


def train(home: Home, parent: str, kind: str) -> dict[str, object]:
    """Make a child of `parent`."""
    if kind == "none":
        return {"checkpoint": None, "reason": "too few rows"}
    import numpy as np  # here: the other stages start in a tenth of the time without

    from tests.support.release import base_weights, make_checkpoint

    weights = base_weights()
    weights["a.weight"] = weights["a.weight"] + np.array([0.01, 0.0], dtype=np.float32)
    if kind == "nan":
        weights["b.weight"][0, 0] = np.nan
    return {"checkpoint": make_checkpoint(home, weights, parent=parent, template="{{ messages }}", sign="no"), "rows": 48}


def benchmark(out: Path, kind: str, arm: str) -> dict[str, object]:
    """Write results; a candidate of the kind `invalid` emits invalid calls only."""
    broken = kind == "invalid" and arm == "candidate"
    rows = [
        {
            "suite": "solve", "task": f"t{i}", "attempt": n, "user_key": f"user-{i}-{n}", "solved": not broken and (i + n) % 2 == 0,
            "outcome": "pass" if not broken and (i + n) % 2 == 0 else "fail", "turns": 2, "unscored_turns": 0, "calls": 4,
            "invalid_calls": 4 if broken else 0, "asks": 0, "edits_proposed": 0 if broken else 1,
        }
        for i in range(12)
        for n in range(2)
    ]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    return {"results": str(out / "results.jsonl")}


def score() -> dict[str, object]:
    """Return score rows of a near candidate."""
    rows = [{"user_key": f"u{i}", "session_id": f"s{i}", "n_tokens": 50, "self_gap": 0.001, "kl": 0.001} for i in range(12)]
    return {"rows": rows, "p99_abs_log_ratio": 0.4, "ess_share": 0.9, "entropy_ratio": 1.0}


class Gateway(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Stay silent."""


def trouble(home: Home, scenario: dict[str, object], stage: str) -> None:
    """Fail or wait as the scenario says."""
    marks = home.root / "marks"
    marks.mkdir(exist_ok=True)
    with (marks / stage).open("a") as file:
        file.write("x")
    if scenario.get("hold") == stage:
        while True:
            time.sleep(0.1)
    code = dict(scenario.get("fail") or {}).get(stage)  # type: ignore[call-overload]
    if code and (marks / stage).stat().st_size <= int(str(scenario.get("fail_times", 1_000_000))):
        print(f"{stage} was told to fail", file=sys.stderr)
        sys.exit(code)


def main(words: list[str]) -> None:
    """Run one stage."""
    stage, home = words[0], Home(Path(option(words, "--home")))
    path = home.root / "scenario.json"
    scenario = json.loads(path.read_text()) if path.exists() else {}
    kind = str(scenario.get("candidate", "good"))
    trouble(home, scenario, stage)
    if stage == "gateway":
        (home.root / "arm").write_text(option(words, "--arm"))
        http.server.HTTPServer(("127.0.0.1", int(option(words, "--port"))), Gateway).serve_forever()
    results = {
        "signals": lambda: {"lake_versions": {"samples": 1}, "frontier": {"session-events-0": 10}},
        "train": lambda: train(home, option(words, "--parent"), kind),
        "score": score,
        "mirror": lambda: {"created": 0, "aliases": 0},
        "benchmark": lambda: benchmark(Path(option(words, "--out")), kind, (home.root / "arm").read_text()),
    }
    write_atomic(Path(option(words, "--result")), json.dumps(results[stage]()).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
