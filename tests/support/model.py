"""Fixtures: a tiny random Llama as a complete checkpoint, made in about a second.

Its tokenizer has the special tokens, chat template and role rule of the real one and a small byte-level BPE vocabulary.
"""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

TINY_VOCABULARY = 512
CORPUS = (
    '<tool_call>{"name": "edit_file", "arguments": {"path": "app.py", "old": "x = 1", "new": "total = 1"}}</tool_call>',
    '<tool_call>{"name": "read_file", "arguments": {"path": "notes.txt"}}</tool_call> <tool_call>{"name": "grep"}</tool_call>',
    '<tool_call>{"name": "run_terminal", "arguments": {"command": "python check.py"}}</tool_call>',
    "system user assistant tool\nRename the function please, then run the tests. The file is not found. Done, thank you.",
    "def add(a, b):\n    return a + b\n\nclass Stack:\n    def push(self, item):\n        self.items.append(item)\n",
)


def tiny_tokenizer_json() -> dict[str, object]:
    """Train a byte-level BPE with the real special tokens at the real ids (0 endoftext, 1 im_start, 2 im_end)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())


def tiny_checkpoint(store: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2) -> tuple[str, Path]:
    """Make a tiny random Llama checkpoint in `store`: weights, tokenizer, template, probe and manifest.

    Returns:
        Checkpoint id and folder.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer import publish

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        initializer_range=0.1,
    )  # fmt: skip
    staged = publish.stage_weights(LlamaForCausalLM(config), store)
    publish.write_tokenizer(staged, tiny_tokenizer_json())
    publish.write_probe(staged)
    return publish.seal(staged, store, kind="base", base_model="tiny-llama", created_at=datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store holding one tiny base checkpoint (copy before you change it): the store's root and the checkpoint's id."""
    store = tmp_path_factory.mktemp("store")
    identity, _ = tiny_checkpoint(store)
    return store, identity


@pytest.fixture(scope="session")
def tiny_folder(tiny_store: tuple[Path, str]) -> Path:
    """The folder of the tiny base checkpoint."""
    store, identity = tiny_store
    return store / identity


def on_policy_records(
    folder: Path, number: int, *, seed: int = 0, users: int = 6, policy_version: int = 1, continued: bool = False
) -> list[dict[str, object]]:
    """Make `number` sample records whose log-probabilities are those of a checkpoint; a reply earns 1 when its first id is even, else -1.

    One turn a record, two records a session, `users` users; all of it served at 2026-11-30 12:00 UTC. With `continued` the second
    prompt of a session goes on where its first reply ended.
    """
    import numpy as np

    from trainer import candidates
    from trainer.model import Policy, load, score
    from trainer.packing import reply_row

    rng = np.random.default_rng(seed)
    rows = [reply_row(rng.integers(3, 500, rng.integers(4, 24)), rng.integers(3, 500, rng.integers(3, 12))) for _ in range(number)]
    if continued:
        for k in range(1, number, 2):
            before = [rows[k - 1].prompt_ids, rows[k - 1].response_ids]
            rows[k] = reply_row(np.concatenate([*before, rows[k].prompt_ids]), rows[k].response_ids)
    scored = score(Policy(load(folder)).eval(), rows)
    at = datetime(2026, 11, 30, 12, tzinfo=UTC)
    return [
        {
            "session_id": f"s{k // 2}", "turn_id": f"t{k}", "completion_id": f"c{k:03d}", "turn_index": k % 2, "attempt": 0,
            "user_key": f"u{k // 2 % users}", "origin": "simulated", "arm": "serving", "consent": "train", "task_bucket": "rename",
            "language": "en", "policy_version": policy_version, "served_at": at, "tokenizer_sha": candidates.tokenizer_sha(folder),
            "template_sha": candidates.template_sha(folder), "prompt_ids": row.prompt_ids.astype("<i4").tobytes(),
            "response_ids": row.response_ids.astype("<i4").tobytes(), "behaviour_logprobs": logprobs.astype("<f4").tobytes(),
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "finish_reason": "stop", "tool_calls_valid": True, "outcome": "scored",
            "outcome_reason": None, "reward": 1.0 if row.response_ids[0] % 2 == 0 else -1.0, "components": {"edits_kept": 1.0},
            "reward_version": "r1", "matured_at": at,
        }
        for k, (row, (logprobs, _)) in enumerate(zip(rows, scored, strict=True))
    ]  # fmt: skip


def write_samples(lake: Path, records: list[dict[str, object]]) -> None:
    """Append records to the Delta table `samples` of a lake, without Spark."""
    import pyarrow as pa
    from deltalake import write_deltalake

    from signals.samples import SAMPLES

    lake.mkdir(parents=True, exist_ok=True)
    write_deltalake(lake / "samples", pa.Table.from_pylist(records, schema=SAMPLES), mode="append")
