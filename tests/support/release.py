"""Fixtures and builders for releases: checkpoint folders of a few numbers, attempts and scores made by hand.

Deploy never imports torch, and neither do these: a checkpoint here is two small tensors written in the safetensors format.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from deploy.release import signing
from deploy.release.evidence import Attempt, Pooled, ScoreRow
from deploy.release.ledger import Ledger
from pipelines.storage import Home
from trainer import candidates

Weights = dict[str, np.ndarray]


def write_safetensors(path: Path, weights: Weights, *, bf16: tuple[str, ...] = ()) -> None:
    """Write tensors by hand, so that the reader under test meets bytes it did not make."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, values in weights.items():
        f32 = values.astype("<f4")
        raw = (f32.view("<u4") >> 16).astype("<u2").tobytes() if name in bf16 else f32.tobytes()
        header[name] = {
            "dtype": "BF16" if name in bf16 else "F32",
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def base_weights() -> Weights:
    """Return weights of norm 10: one tensor of 3 and 4, one of sqrt(75) in all."""
    return {"a.weight": np.array([3.0, 4.0], dtype=np.float32), "b.weight": np.full((3, 1), 5.0, dtype=np.float32)}


def make_checkpoint(
    home: Home,
    weights: Weights,
    *,
    parent: str | None = None,
    kind: str = "update",
    template: str = "{{ messages }}",
    tokenizer: str = "{}",
    sign: str = "yes",
) -> str:
    """Seal a checkpoint folder into the store and sign it; returns its id."""
    home.store.mkdir(parents=True, exist_ok=True)
    text = json.dumps([sorted((n, w.tolist()) for n, w in weights.items()), parent, kind, template, tokenizer])
    staged = home.store / f".staged-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    staged.mkdir()
    write_safetensors(staged / "model.safetensors", weights)
    (staged / "config.json").write_text('{"model_type": "llama"}')
    (staged / "tokenizer.json").write_text(tokenizer)
    (staged / "chat_template.jinja").write_text(template)
    manifest = candidates.Manifest(
        kind=kind,  # type: ignore[arg-type]
        base_model="tiny",
        files=candidates.file_entries(staged),
        tensors_digest="0" * 64,
        tokenizer_sha=candidates.tokenizer_sha(staged),
        template_sha=candidates.template_sha(staged),
        parent=parent,
        created_at="2026-01-01T00:00:00+00:00",
    )
    identity, _ = candidates.seal(staged, home.store, manifest)
    if sign == "yes":
        signing.sign(home, identity)
    return identity


def attempt(task: str, *, solved: bool = True, user: str | None = None, number: int = 0, **changes: object) -> Attempt:
    """Return an attempt of two turns and four valid calls, one edit."""
    row = {
        "suite": "solve", "task": task, "attempt": number, "user_key": user or f"user-{task}-{number}",
        "outcome": "pass" if solved else "fail",
        "solved": solved, "turns": 2, "unscored_turns": 0, "calls": 4, "invalid_calls": 0, "asks": 0, "edits_proposed": 1,
    }  # fmt: skip
    return Attempt.model_validate(row | changes)


def score_row(user: str, *, kl: float | None = 0.001, self_gap: float = 0.001, n_tokens: int = 50) -> ScoreRow:
    """Return a score row."""
    return ScoreRow.model_validate({"user_key": user, "session_id": f"s-{user}", "n_tokens": n_tokens, "self_gap": self_gap, "kl": kl})


GOOD_POOLED = Pooled(p99_abs_log_ratio=0.5, ess_share=0.9, entropy_ratio=1.0)


@dataclass
class Clock:
    """A clock that a test moves."""

    seconds: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """A clock at a fixed instant."""
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Ledger:
    """A fresh ledger on the fixed clock."""
    return Ledger(tmp_path / "ledger.sqlite", clock=clock)


@pytest.fixture
def release_home(tmp_path: Path) -> Home:
    """A deployment whose first checkpoint serves, and a child of it lies signed in the store (see `pair`)."""
    return Home(tmp_path / "home")


@pytest.fixture
def pair(release_home: Home) -> tuple[str, str]:
    """Ids of a serving checkpoint and of a good candidate trained from it."""
    serving = make_checkpoint(release_home, base_weights(), kind="warmstart")
    moved = base_weights()
    moved["a.weight"] = moved["a.weight"] + np.array([0.01, 0.0], dtype=np.float32)
    candidate = make_checkpoint(release_home, moved, parent=serving)
    Ledger(release_home.ledger).install(serving)
    return serving, candidate
