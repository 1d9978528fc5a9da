"""The embedded engine against plain transformers: what it reports is what it sampled, batched or not, remembered or not."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.serving.batching import BatchEngine, Generation
from deploy.serving.scheduler import PrefixMemory, Sampling
from pipelines.errors import CheckpointInvalid, ConfigError
from tests.support.serving import plain_logprobs

pytestmark = pytest.mark.model

SYSTEM = [1, *range(20, 80)]


def prompts(number: int, *, seed: int = 0) -> list[list[int]]:
    """Prompts of unequal lengths (61 to 161 tokens) that share their beginning."""
    rng = random.Random(seed)
    return [SYSTEM + [rng.randrange(3, 512) for _ in range(rng.randrange(1, 100))] for _ in range(number)]


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[BatchEngine]:
    from deploy.serving.decoder import load, sample

    decoder = load(tiny_folder, dtype="float32", rows=6)
    memory = PrefixMemory(max_bytes=50_000_000, token_bytes=decoder.token_bytes)
    with BatchEngine(decoder, sample, rows=6, context=512, prefill_tokens=64, memory=memory) as started:
        yield started


def wait(engine: BatchEngine, asked: list[tuple[list[int], Sampling]]) -> list[Generation]:
    return [future.result(60) for future in [engine.submit(prompt, sampling) for prompt, sampling in asked]]


def assert_as_sampled(folder: Path, prompt: list[int], done: Generation, *, temperature: float) -> None:
    wanted = plain_logprobs(folder, prompt, done.response_ids, temperature=temperature)
    assert done.logprobs == pytest.approx(wanted, abs=1e-4)


def test_logprobs_of_a_crowded_batch_are_those_of_a_plain_forward_pass(engine: BatchEngine, tiny_folder: Path) -> None:
    temperatures = [0.7, 1.0, 1.3]
    asked = [(p, Sampling(seed=i, max_tokens=5 + 7 * (i % 5), temperature=temperatures[i % 3])) for i, p in enumerate(prompts(20))]
    answers = wait(engine, asked)
    for done, (prompt, sampling) in zip(answers, asked, strict=True):
        assert done.finish_reason == "stop" or len(done.response_ids) == sampling.max_tokens
        assert_as_sampled(tiny_folder, prompt, done, temperature=sampling.temperature)


def test_a_remembered_prefix_changes_no_logprob(engine: BatchEngine, tiny_folder: Path) -> None:
    prompt = prompts(1)[0]
    (first,) = wait(engine, [(prompt, Sampling(seed=1, max_tokens=12))])
    longer = prompt + first.response_ids + [5, 6, 7]
    (second,) = wait(engine, [(longer, Sampling(seed=2, max_tokens=12))])
    assert first.cached_tokens == 0
    assert second.cached_tokens == len(prompt) + len(first.response_ids) - 1
    assert_as_sampled(tiny_folder, longer, second, temperature=1.0)


def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine: BatchEngine) -> None:
    chosen = prompts(1, seed=9)[0]
    wish = Sampling(seed=42, max_tokens=20)
    (alone,) = wait(engine, [(chosen, wish)])
    crowd = [(p, Sampling(seed=100 + i, max_tokens=10)) for i, p in enumerate(prompts(9, seed=3))]
    among = wait(engine, [*crowd[:4], (chosen, wish), *crowd[4:]])[4]
    assert among.response_ids == alone.response_ids


def test_the_sampled_end_token_is_the_last_response_id(engine: BatchEngine, tiny_folder: Path) -> None:
    engine._decoder.end_ids = frozenset(range(256))
    answers = wait(engine, [(p, Sampling(seed=i, max_tokens=200)) for i, p in enumerate(prompts(6))])
    for done, prompt in zip(answers, prompts(6), strict=True):
        assert done.finish_reason == "stop"
        assert done.response_ids[-1] < 256
        assert all(token >= 256 for token in done.response_ids[:-1])
        assert_as_sampled(tiny_folder, prompt, done, temperature=1.0)


def test_sampled_frequencies_follow_the_model(tiny_folder: Path) -> None:
    import torch

    from deploy.serving.decoder import sample

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(10_000, 1)
    rng = random.Random(0)
    tokens, logprobs = sample(logits, [Sampling()] * 10_000, [rng.random() for _ in range(10_000)])
    shares = [tokens.count(token) / 10_000 for token in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.015)  # three standard errors
    assert logprobs[0] == pytest.approx([-0.6931472, -1.2039728, -1.6094379][tokens[0]], abs=1e-6)


@pytest.mark.parametrize(
    ("wish", "allowed"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.7), {0, 1}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(temperature=0), {0}),
        (Sampling(), {0, 1, 2}),
    ],
)
def test_narrowed_sampling_draws_only_what_is_allowed_and_reports_the_whole_vocabulary(wish: Sampling, allowed: set[int]) -> None:
    import torch

    from deploy.serving.decoder import sample

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(101, 1)
    tokens, logprobs = sample(logits, [wish] * 101, [i / 101 for i in range(101)])
    assert set(tokens) == allowed
    assert logprobs[0] == pytest.approx(-0.6931472, abs=1e-6)


def test_a_given_response_scores_as_in_a_plain_forward_pass(engine: BatchEngine, tiny_folder: Path) -> None:
    rows = [(prompt, [7, 8, 9, 2], 1.0 + index / 4) for index, prompt in enumerate(prompts(3))]
    scored = engine.score(rows).result(60)
    for (prompt, response, temperature), found in zip(rows, scored, strict=True):
        assert found == pytest.approx(plain_logprobs(tiny_folder, prompt, response, temperature=temperature), abs=1e-4)


def test_a_cancelled_request_leaves_the_batch_and_others_go_on(engine: BatchEngine, tiny_folder: Path) -> None:
    others = prompts(4, seed=5)
    endless = [engine.submit(p, Sampling(seed=i, max_tokens=400)) for i, p in enumerate(others[:2])]
    answered = [engine.submit(p, Sampling(seed=i, max_tokens=40)) for i, p in enumerate(others[2:])]
    for future in endless:
        future.cancel()
    for prompt, future in zip(others[2:], answered, strict=True):
        assert_as_sampled(tiny_folder, prompt, future.result(60), temperature=1.0)
    deadline = time.monotonic() + 10
    while engine.load and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.load == 0


def test_a_prompt_without_room_is_refused_and_a_long_answer_ends_with_the_context(engine: BatchEngine) -> None:
    with pytest.raises(ValueError, match="takes 1 to 511"):
        engine.submit([5] * 512, Sampling())
    engine._decoder.end_ids = frozenset()
    (done,) = wait(engine, [([5] * 500, Sampling(max_tokens=400))])
    assert (len(done.response_ids), done.finish_reason) == (12, "length")


def test_rounded_arithmetic_stays_near_the_exact_one(tiny_folder: Path) -> None:
    from deploy.serving.decoder import load

    rounded = load(tiny_folder, dtype="bfloat16", rows=1)
    prompt, response = prompts(1)[0], list(range(100, 140))
    found = rounded.score(prompt, response, temperature=1.0)
    wanted = plain_logprobs(tiny_folder, prompt, response)
    assert 0 < sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / 40 < 0.05


def test_an_unknown_dtype_and_a_folder_without_weights_are_refused(tmp_path: Path) -> None:
    from deploy.serving.decoder import choose_dtype, load

    with pytest.raises(ConfigError, match="take one of auto, float32, bfloat16"):
        choose_dtype("float8")
    with pytest.raises(CheckpointInvalid, match="does not load"):
        load(tmp_path, dtype="float32", rows=1)


@pytest.fixture(scope="module")
def engine_url(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("engine") / "engine.json"
    command = [
        sys.executable, "-m", "deploy.serving.embedded", "--checkpoint", str(tiny_folder), "--dtype", "float32", "--context", "256",
        "--state", str(state), "--parent", str(os.getpid()),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not state.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield json.loads(state.read_text())["url"]
    process.kill()
    process.wait()


def test_the_engine_renders_the_checkpoints_template_and_answers_with_its_tokens(engine_url: str, tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder, local_files_only=True)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Rename x"}]
    tools = [{"type": "function", "function": {"name": "grep", "description": "find", "parameters": {"pattern": "string"}}}]
    body = {"messages": messages, "tools": tools, "max_tokens": 10, "seed": 4, "temperature": 0.9}
    reply = httpx.post(f"{engine_url}/v1/chat/completions", json=body, timeout=60, trust_env=False).json()
    choice = reply["choices"][0]
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert reply["prompt_token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = choice["token_ids"][:-1] if choice["finish_reason"] == "stop" else choice["token_ids"]
    assert choice["message"]["content"] == tokenizer.decode(shown, skip_special_tokens=False)
    found = [item["logprob"] for item in choice["logprobs"]["content"]]
    assert found == pytest.approx(plain_logprobs(tiny_folder, reply["prompt_token_ids"], choice["token_ids"], temperature=0.9), abs=1e-4)
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert reply["timings"]["duration_ms"] >= reply["timings"]["ttft_ms"] > 0


def test_the_engine_says_which_context_a_prompt_exceeds(engine_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 400}]}
    reply = httpx.post(f"{engine_url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 400
    assert "takes 1 to 255" in reply.json()["error"]["message"]


def test_a_client_that_hangs_up_frees_its_place(engine_url: str) -> None:
    body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 240}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{engine_url}/v1/chat/completions", json=body, timeout=0.05, trust_env=False)
    deadline = time.monotonic() + 5
    while (load := httpx.get(f"{engine_url}/health", trust_env=False).json()["load"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert load == 0
