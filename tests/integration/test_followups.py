"""The follow-up classifier as a command."""

import json
import subprocess
import sys
from pathlib import Path


def test_scoring_a_file_prints_one_line_for_each_follow_up_and_names_bad_lines(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": "a", "previous": "Fix the parser", "text": "still broken"}),
        "not json",
        json.dumps({"id": 7, "text": "thanks, now add a test", "interrupted": False, "reply_delay_ms": 60000}),
        json.dumps({"id": "c", "previous": None}),
        "",
    ]
    file = tmp_path / "follow-ups.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "signals", "followup", "score"]
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [item["id"] for item in found] == ["a", 7]
    assert found[0]["p_dissatisfied"] > 0.7 > 0.3 > found[1]["p_dissatisfied"]
    assert "line 2: no JSON" in done.stderr
    assert "line 4: text is no string" in done.stderr
    assert "2 scored, 2 bad lines" in done.stderr
    piped = subprocess.run([*command, "-"], input=file.read_text(encoding="utf-8"), capture_output=True, text=True, check=True)
    assert piped.stdout == done.stdout
