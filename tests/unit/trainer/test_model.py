"""Packed rows score like padded ones, exports are what was trained, fixed numbers hold."""

import json
import shutil
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

from pipelines.errors import CheckpointInvalid
from trainer import candidates, publish
from trainer.config import UpdateConfig
from trainer.model import SEGMENTED, Policy, add_lora, load, score, tensors
from trainer.packing import pack, reply_row

pytestmark = pytest.mark.model

NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return [
        reply_row(rng.integers(3, 500, p), rng.integers(3, 500, r), temperature=t)
        for p, r, t in [(1, 1, 1.0), (7, 5, 0.7), (20, 9, 1.3), (2, 30, 1.0)]
    ]


def alone(folder, row, *, gradient_of=None):
    """Score one row by itself with transformers' own attention, padded on the right by 5 tokens, from full logits in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float64)
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids, np.full(5, 2)]))[None]
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    logits = model(input_ids=ids, attention_mask=mask).logits[0, row.trained - 1] / row.temperature
    logp = torch.log_softmax(logits, -1)
    picked = logp[torch.arange(len(row.response_ids)), torch.from_numpy(row.response_ids)]
    entropy = -(logp.exp() * logp).sum(-1)
    gradient = None
    if gradient_of is not None:
        picked.sum().backward()
        gradient = dict(model.named_parameters())[gradient_of].grad
    return picked.detach().numpy(), entropy.detach().numpy(), gradient


def test_packed_rows_score_like_each_row_alone_and_padded(tiny_folder, rows):
    found = score(Policy(load(tiny_folder)).eval(), rows, max_tokens=200)
    for row, (logprobs, entropies) in zip(rows, found, strict=True):
        expected, expected_entropy, _ = alone(tiny_folder, row)
        assert logprobs == pytest.approx(expected, abs=2e-5)
        assert entropies == pytest.approx(expected_entropy, abs=2e-5)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_packed_gradients_are_the_sum_of_padded_ones(tiny_folder, rows, name):
    policy = Policy(load(tiny_folder))
    logprobs, _ = policy(**tensors(pack(rows, range(len(rows)))))
    logprobs.sum().backward()
    found = dict(policy.language_model.named_parameters())[name].grad
    expected = sum(alone(tiny_folder, row, gradient_of=name)[2] for row in rows)
    if name.startswith("model.embed"):
        # the end token is also transformers' padding id, whose input gradient it drops; this project's policy does not
        assert torch.allclose(found[3:].double(), expected[3:], atol=1e-4)
    else:
        assert torch.allclose(found.double(), expected, atol=1e-4)


def test_a_token_of_one_segment_does_not_see_its_neighbours(tiny_folder, rows):
    policy = Policy(load(tiny_folder)).eval()
    first = score(policy, [rows[1], rows[2]], max_tokens=100)[1][0]
    other = reply_row((rows[1].prompt_ids + 11) % 500, rows[1].response_ids)
    second = score(policy, [other, rows[2]], max_tokens=100)[1][0]
    assert first.tolist() == second.tolist()


@pytest.fixture(scope="module")
def conversation():
    """Three completions of one session that continue each other, and one whose prefix breaks."""
    rng = np.random.default_rng(3)
    found, history = [], np.zeros(0, dtype=int)
    for read, sampled in [(9, 5), (4, 7), (6, 3)]:
        prompt = np.concatenate([history, rng.integers(3, 500, read)])
        found.append(reply_row(prompt, rng.integers(3, 500, sampled), temperature=0.8, group="s"))
        history = np.concatenate([prompt, found[-1].response_ids])
    broken = found[1].prompt_ids.copy()
    broken[2] += 1
    return [*found, reply_row(broken, found[1].response_ids, temperature=0.8, group="s")]


def test_merged_completions_have_the_loss_figures_and_gradients_of_separate_ones(tiny_folder, conversation):
    from trainer.losses import LOSSES, LossBatch, LossSettings

    def of_row(values, batch):
        return torch.tensor([values[batch.rows[k]] for k in batch.segment], dtype=torch.float32)

    def result(rows, name):
        policy = Policy(load(tiny_folder))
        batch = pack(rows, range(len(rows)))
        theta, _ = policy(**tensors(batch))
        shift = of_row([0.02, 0.3, -0.01, -0.2], batch)  # prox - mu: the second and last completion leave the band
        inputs = LossBatch(
            theta=theta, prox=theta.detach(), mu=theta.detach() - shift, ref=theta.detach() + 0.1, rows=len(rows),
            advantage=of_row([1.0, -0.5, 2.0, -1.0], batch), omega=of_row([1.0, 0.5, 1.0, 1.0], batch),
            segment=torch.from_numpy(batch.segment),
        )  # fmt: skip
        value = LOSSES[name](inputs, 17.0, LossSettings())
        value.loss.backward()
        gradients = {key: p.grad for key, p in policy.named_parameters() if p.grad is not None}
        return sum(batch.lengths), float(value.loss.detach()), {key: float(x) for key, x in value.sums.items()}, gradients

    separate = [reply_row(row.prompt_ids, row.response_ids, temperature=row.temperature) for row in conversation]
    for name in LOSSES:
        tokens, loss, figures, gradients = result(conversation, name)
        all_tokens, all_loss, all_figures, all_gradients = result(separate, name)
        assert (tokens, all_tokens) == (34 + 25, 14 + 25 + 34 + 25)
        assert loss == pytest.approx(all_loss, rel=1e-5)
        assert figures == pytest.approx(all_figures, rel=1e-5, abs=1e-6)
        assert gradients.keys() == all_gradients.keys()
        for key, gradient in gradients.items():
            assert torch.allclose(gradient, all_gradients[key], atol=1e-6 + 1e-5 * float(all_gradients[key].abs().max())), key
        if name == "decoupled_ppo":
            assert figures["masked_sequence_rows"] == 2


def test_merged_completions_score_like_separate_ones_in_the_callers_order(tiny_folder, conversation):
    policy = Policy(load(tiny_folder)).eval()
    rows = [conversation[k] for k in (2, 3, 0, 1)]
    found = score(policy, rows, max_tokens=40)
    for row, (logprobs, entropies) in zip(rows, found, strict=True):
        expected, expected_entropy, _ = alone(tiny_folder, row)
        assert logprobs == pytest.approx(expected, abs=2e-5)
        assert entropies == pytest.approx(expected_entropy, abs=2e-5)


def test_the_gradient_of_the_end_tokens_embedding_is_kept(tiny_folder):
    policy = Policy(load(tiny_folder))
    assert policy.language_model.get_input_embeddings().padding_idx is None
    assert policy.language_model.config._attn_implementation == SEGMENTED


def test_fresh_lora_adapters_change_nothing_and_merge_exactly(tiny_folder, rows):
    before = score(Policy(load(tiny_folder)).eval(), rows)
    wrapped = add_lora(load(tiny_folder), UpdateConfig(lora_rank=4))
    assert [x.tolist() for x, _ in score(Policy(wrapped).eval(), rows)] == [x.tolist() for x, _ in before]
    adapters = {name: p.detach() for name, p in wrapped.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(1)
    for p in adapters.values():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    with_adapter = score(Policy(wrapped).eval(), rows)
    merged = load(tiny_folder)
    change = publish.merged_lora(merged, adapters, scaling=32.0 / 4)
    for (ours, _), (theirs, _) in zip(score(Policy(merged).eval(), rows), with_adapter, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert 0 < change < 1


def test_an_adapter_for_a_missing_weight_or_a_nan_is_not_merged(tiny_folder):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    good = {name: torch.zeros(2, 64), name.replace("lora_A", "lora_B"): torch.zeros(64, 2)}
    with pytest.raises(CheckpointInvalid, match="does not have"):
        publish.merged_lora(load(tiny_folder), {key.replace("layers.0", "layers.9"): value for key, value in good.items()}, scaling=1.0)
    good[name][0, 0] = float("nan")
    with pytest.raises(CheckpointInvalid, match="non-finite"):
        publish.merged_lora(load(tiny_folder), good, scaling=1.0)


def gguf_file(path, model, *, architecture="llama", skip=()):
    """Write a tiny Llama as llama.cpp's converter does: its tensor names, rotary dimensions of each head interleaved."""
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(12_345.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    layer = (
        ("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj"),
        ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"),
    )  # fmt: skip
    named = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"} | {
        f"blk.{k}.{ours}.weight": f"model.layers.{k}.{theirs}.weight" for k in range(config.num_hidden_layers) for ours, theirs in layer
    }
    for name, theirs in named.items():
        array = model.get_parameter(theirs).detach().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:
            array = np.stack([half.reshape(2, -1, array.shape[1]).swapaxes(0, 1).reshape(half.shape) for half in np.split(array, heads)])
            array = array.reshape(-1, array.shape[-1])
        if name not in skip:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_the_model_it_was_made_from(tiny_folder, tmp_path):
    original = load(tiny_folder)
    found = publish.base_model(gguf_file(tmp_path / "tiny.gguf", original))
    expected, ours = dict(original.named_parameters()), dict(found.named_parameters())
    assert expected.keys() == ours.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert found.config.rope_parameters["rope_theta"] == pytest.approx(12_345.0)
    assert (found.config.vocab_size, found.config.max_position_embeddings, found.config.tie_word_embeddings) == (512, 8192, True)


def test_a_gguf_file_of_another_architecture_or_with_a_tensor_missing_is_refused(tiny_folder, tmp_path):
    original = load(tiny_folder)
    with pytest.raises(CheckpointInvalid, match="architecture"):
        publish.base_model(gguf_file(tmp_path / "other.gguf", original, architecture="mamba"))
    with pytest.raises(CheckpointInvalid, match=r"q_proj"):
        publish.base_model(gguf_file(tmp_path / "less.gguf", original, skip=("blk.1.attn_q.weight",)))


def test_the_probe_of_a_checkpoint_is_what_its_weights_give(tiny_folder):
    rows, expected = publish.read_probe(tiny_folder)
    found = [logprobs for logprobs, _ in score(Policy(load(tiny_folder)).eval(), rows)]
    assert publish.mean_gap(found, expected) < 1e-6
    assert all(alone(tiny_folder, row)[0] == pytest.approx(logprobs, abs=2e-5) for row, logprobs in zip(rows, expected, strict=True))


def test_a_sealed_checkpoint_verifies_and_the_same_content_has_the_same_id(tiny_store, tmp_path):
    from tests.support.model import tiny_checkpoint

    store, identity = tiny_store
    manifest = candidates.verify(store / identity)
    assert manifest.tokenizer_sha == candidates.tokenizer_sha(store / identity)
    again = candidates.read_manifest(tiny_checkpoint(tmp_path, seed=0)[1])
    assert again.model_copy(update={"git_revision": manifest.git_revision}) == manifest  # the source may be committed in between
    assert tiny_checkpoint(tmp_path, seed=1)[0] != identity


@pytest.mark.parametrize("damage", ["flip", "missing", "extra", "pickle", "auto_map", "no_manifest", "broken_manifest"])
def test_a_damaged_or_unsafe_checkpoint_is_refused(tiny_folder, tmp_path, damage):
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "missing":
        weights.unlink()
    elif damage in ("extra", "pickle"):
        (folder / ("notes.txt" if damage == "extra" else "pytorch_model.bin")).write_text("x")
    elif damage == "auto_map":
        config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "code.Model"}}
        (folder / "config.json").write_text(json.dumps(config))
        manifest = candidates.read_manifest(folder)
        entry = candidates.FileEntry(
            sha256=candidates.sha256_file(folder / "config.json"), size_bytes=(folder / "config.json").stat().st_size
        )
        changed = manifest.model_copy(update={"files": manifest.files | {"config.json": entry}})
        (folder / candidates.MANIFEST).write_text(changed.model_dump_json())
    else:
        (folder / candidates.MANIFEST).write_text("{}") if damage == "broken_manifest" else (folder / candidates.MANIFEST).unlink()
    with pytest.raises(CheckpointInvalid):
        candidates.verify(folder)


def test_an_export_that_is_not_what_was_trained_is_removed(tmp_path):
    for gap, change, words in [(0.5, 0.1, "differ"), (float("nan"), 0.1, "differ"), (0.0, 0.0, "no weight")]:
        staged = tmp_path / "staged"
        staged.mkdir()
        with pytest.raises(CheckpointInvalid, match=words):
            publish.check_export(staged, gap=gap, change=change, tolerance=0.02)
        assert not staged.exists()
