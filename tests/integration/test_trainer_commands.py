"""The stage's commands as a person or a flow runs them."""

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from pipelines.storage import Home
from tests.support.model import on_policy_records, write_samples
from trainer import candidates
from trainer.config import TrainerConfig
from trainer.evaluate import score_pair
from trainer.sabotage import nan_weights

pytestmark = [pytest.mark.model, pytest.mark.deepspeed]


def command(*arguments, home):
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments, "--home", str(home.root)], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}, timeout=240,
    )  # fmt: skip


@pytest.fixture
def home(tiny_store, tmp_path):
    store, identity = tiny_store
    shutil.copytree(store / identity, tmp_path / "home" / "store" / identity)
    return Home(tmp_path / "home")


def test_help_names_every_verb_without_loading_an_engine(home):
    engines = {"torch", "mlflow", "transformers", "deepspeed"}
    probe = f"import sys, trainer.__main__, trainer.update, trainer.warmstart; print(sorted({engines!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    shown = command("--help", home=home).stdout
    assert all(verb in shown for verb in ("import-base", "warmstart", "update", "score", "sabotage", "doctor"))


def test_a_warm_start_command_teaches_and_is_cached(home, tiny_store, tmp_path):
    data = tmp_path / "demonstrations.jsonl"
    message = [{"role": "user", "content": "Rename x"}, {"role": "assistant", "content": "  Done."}]
    data.write_text("\n".join(json.dumps({"messages": message}) for _ in range(12)))
    sets = [
        "warmstart.dtype=bf16",
        "warmstart.lr=0.01",
        "warmstart.examples_per_step=4",
        "trainer.world_size=1",
        "mlflow.tracking_uri=http://127.0.0.1:9",
    ]
    arguments = ["warmstart", "--parent", tiny_store[1][:12], "--data", str(data), "--json", *[part for s in sets for part in ("--set", s)]]
    first = command(*arguments, home=home)
    assert first.returncode == 0, first.stderr
    made = json.loads(first.stdout)
    assert made["loss_last"] < made["loss_first"]
    assert made["rows"] == 12
    again = json.loads(command(*arguments, home=home).stdout)
    assert (again["checkpoint"], again["cached"]) == (made["checkpoint"], True)


def test_text_is_learned_before_demonstrations_and_the_second_checkpoint_is_the_firsts_child(home, tiny_store, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "stack.py").write_text("class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 30)
    (tmp_path / "code" / "logo.png").write_bytes(b"\x89PNG\xff")
    data = tmp_path / "demonstrations.jsonl"
    turns = [{"role": "user", "content": "Rename x"}, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And y"}]
    data.write_text("\n".join(json.dumps({"messages": [*turns, {"role": "assistant", "content": "Done too."}]}) for _ in range(8)))
    sets = ["pretrain.lr=0.01", "pretrain.row_tokens=64", "pretrain.rows_per_step=4", "warmstart.lr=0.01", "trainer.world_size=1",
            "mlflow.tracking_uri=http://127.0.0.1:9"]  # fmt: skip
    settings = [part for s in sets for part in ("--set", s)]
    done = command(
        "warmstart", "--parent", tiny_store[1], "--text", str(tmp_path / "code"), "--data", str(data), "--json", *settings, home=home
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    first = candidates.read_manifest(home.store / made["pretrained"])
    assert (first.kind, first.parent, made["parent"]) == ("warmstart", tiny_store[1], made["pretrained"])
    assert (first.training["files"], first.training["left_out_files"]) == (1, 1)
    assert first.training["loss_last"] < first.training["loss_first"]
    assert made["rows"] == 8
    nothing = command("warmstart", "--parent", tiny_store[1], home=home)
    assert (nothing.returncode, "give --text FOLDER, --data FILE.jsonl, --rewarded 0.5" in nothing.stderr) == (2, True)


def test_rewarded_sessions_of_the_lake_are_learned_as_they_were_sampled(home, tiny_store, tiny_folder, tmp_path):
    records = on_policy_records(tiny_folder, 24)
    records[0] |= {"served_at": datetime(2020, 1, 1, tzinfo=UTC), "policy_version": 0, "reward": 1.0}
    write_samples(home.lake, [*records, records[1] | {"completion_id": "x", "tokenizer_sha": "other", "reward": 1.0}])
    good = sum(record["reward"] >= 0.5 for record in records)
    sets = ["warmstart.lr=0.01", "warmstart.examples_per_step=4", "warmstart.passes=6", "trainer.world_size=2", "warmstart.world_size=1",
            "mlflow.tracking_uri=http://127.0.0.1:9"]  # fmt: skip
    settings = [part for s in sets for part in ("--set", s)]
    done = command("warmstart", "--parent", tiny_store[1], "--rewarded", "0.5", "--json", *settings, home=home)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["rows"], made["rejected.below_reward"], made["rejected.tokenizer_drift"]) == (good, 24 - good, 1)
    assert made["loss_last"] < made["loss_first"]
    assert candidates.read_manifest(home.store / made["checkpoint"]).lake_version == 0
    (job,) = home.training.glob("warmstart-*/job.json")
    assert json.loads(job.read_bytes())["settings"]["world_size"] == 1
    none = command("warmstart", "--parent", tiny_store[1], "--rewarded", "1.5", home=home)
    assert (none.returncode, "no sample in" in none.stderr, "below_reward 25" in none.stderr) == (1, True, True)


BAD_DATA = {
    "empty": (b"", "holds no demonstration"),
    "no JSON": (b"{", "1 is not JSON"),
    "another object": (b'{"a": 1}', "1 is no demonstration"),
    "nobody answers": (b'{"messages": [{"role": "user", "content": "x"}]}', "1: a demonstration has no assistant message"),
    "a picture": (b'\n{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "2: only text parts can be learned from"),
    "a nameless tool": (b'{"messages": [{"role": "user", "content": "x"}], "tools": [3]}', "1 is no demonstration"),
    "no text": (b"\xff\xfe", "is no UTF-8 text"),
}


@pytest.mark.parametrize(("text", "words"), BAD_DATA.values(), ids=BAD_DATA.keys())
def test_unusable_demonstrations_end_in_one_sentence(home, tiny_store, tmp_path, text, words):
    (tmp_path / "bad.jsonl").write_bytes(text)
    done = command("warmstart", "--parent", tiny_store[1], "--data", str(tmp_path / "bad.jsonl"), home=home)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_scoring_finds_a_policy_equal_to_its_logs_and_a_broken_one_unknown(home, tiny_store, tiny_folder):
    now = datetime(2026, 11, 30, 13, tzinfo=UTC)
    write_samples(home.lake, on_policy_records(tiny_folder, 6))
    broken = nan_weights(home, parent=tiny_store[1], now=now)["checkpoint"]
    common = {"policy_version": None, "lake_version": None, "limit": 4, "dtype": "fp32", "now": now}
    same = score_pair(TrainerConfig(), home, checkpoint=tiny_store[1], reference=tiny_store[1], **common)
    assert (same["all_finite"], same["kl_mean"], same["relative_change"]) == (True, 0.0, 0.0)
    assert same["self_gap_mean"] < 1e-5
    assert len(same["rows"]) == 4
    assert same["rejected"] == {"over_limit": 2}
    bad = score_pair(TrainerConfig(), home, checkpoint=broken, reference=tiny_store[1], **common)
    assert (bad["all_finite"], bad["kl_mean"]) == (False, None)


def test_an_unknown_setting_and_an_unknown_parent_say_what_to_do(home):
    done = command("update", "--parent", "zz", "--policy-version", "1", "--set", "trainer.stepz=3", home=home)
    assert done.returncode == 2
    assert "trainer.stepz is not a setting; did you mean" in done.stderr
    done = command("update", "--parent", "zz", "--policy-version", "1", home=home)
    assert done.returncode == 1
    assert "0 checkpoints" in done.stderr
