"""The chat template: exact prefixes for any content, and the same text as transformers renders."""

import re
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.errors import CheckpointInvalid, ContractViolation
from trainer import chat as chats

TOOLS = [{"name": "grep", "description": "Search files.", "parameters": {"pattern": "string"}}]
content = st.text(alphabet=st.sampled_from(list(" \n\t0123abcx{}\"'<>_é漢")), max_size=24)
dialogues = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), content), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def chat(tiny_folder):
    return chats.load(tiny_folder)


@given(dialogues, st.sampled_from([None, TOOLS]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_is_an_exact_prefix_of_the_prompt_with_any_reply(chat, dialogue, tools):
    messages = [{"role": role, "content": text} for role, text in dialogue] + [{"role": "assistant", "content": dialogue[0][1]}]
    for k in range(1, len(messages)):
        if messages[k]["role"] == "assistant":
            prompt = chat.ids(messages[:k], tools=tools, prompt=True)
            assert chat.ids(messages[: k + 1], tools=tools)[: len(prompt)] == prompt


def test_replies_that_begin_with_white_space_keep_the_prefix(chat):
    for reply in ("   indented", "\n\n\nblank lines", " ", "\n", ""):
        prompt = chat.ids([{"role": "user", "content": "x"}], prompt=True)
        whole = chat.ids([{"role": "user", "content": "x"}, {"role": "assistant", "content": reply}])
        assert whole[: len(prompt)] == prompt


@pytest.mark.model
def test_transformers_renders_the_same_text_and_ids(chat, tiny_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for tools in (None, TOOLS):
        for messages in (
            [{"role": "user", "content": "Hello é"}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a < b"}, {"role": "assistant", "content": "  ok"}],
        ):
            for prompt in (True, False):
                text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
                assert chat.text(messages, tools=tools, prompt=prompt) == text
                assert tokenizer(text, add_special_tokens=False)["input_ids"] == chat.ids(messages, tools=tools, prompt=prompt)


def test_the_rendered_text_is_what_the_page_says(chat):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "tool", "content": "ok"}]
    assert chat.text(messages, tools=TOOLS, prompt=True) == (
        "<|im_start|>system\nBe brief.\n"
        'Tools, one JSON object a line. To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.\n'
        '{"name": "grep", "description": "Search files.", "parameters": {"pattern": "string"}}<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    )


def test_supervised_tokens_are_the_assistants_with_their_end_tokens(chat):
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": " one"}, {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    ids, trained = chats.supervised(chat, messages, tools=TOOLS)
    text = chat.tokenizer.decode(np.asarray(ids)[trained].tolist(), skip_special_tokens=False)
    assert text == " one<|im_end|>two<|im_end|>"
    assert ids[-1] == chat.end_id
    assert trained[-1] == len(ids) - 1


def test_a_demonstration_without_an_answer_is_refused(chat):
    with pytest.raises(ContractViolation, match="no assistant message"):
        chats.supervised(chat, [{"role": "user", "content": "a"}], tools=None)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("tokenizer.json", None, "tokenizer.json is no usable tokenizer"),
        ("tokenizer.json", "{", "tokenizer.json is no usable tokenizer"),
        (chats.TEMPLATE_FILE, None, f"no usable {chats.TEMPLATE_FILE}"),
        (chats.TEMPLATE_FILE, "{% if %}", f"no usable {chats.TEMPLATE_FILE}"),
    ],
)
def test_a_missing_or_broken_file_is_an_invalid_checkpoint_that_names_it(tiny_folder, tmp_path, name, text, what):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder, folder)
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(CheckpointInvalid, match=re.escape(what)):
        chats.load(folder)


CALL = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "über.py"}'}}
WRITTEN = '<tool_call>{"name": "read_file", "arguments": {"path": "über.py"}}</tool_call>'


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": "Hi."}, "Hi."),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, WRITTEN),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, WRITTEN),
        ({"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}, f"I look.\n{WRITTEN}{WRITTEN}"),
        ({"role": "assistant", "content": None, "tool_calls": [{"name": "read_file", "arguments": {"path": "über.py"}}]}, WRITTEN),
        ({"role": "tool", "content": "", "tool_call_id": "c1"}, ""),
    ],
    ids=["text", "parts", "call", "call beside an empty text", "calls behind what was said", "bare call", "empty answer"],
)
def test_a_message_of_a_foreign_log_becomes_what_the_model_would_have_written(message, content):
    assert chats.normalised(message) == {"role": message["role"], "content": content}


def test_a_developers_message_is_the_systems():
    assert chats.normalised({"role": "developer", "content": "Be brief."}) == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("hello", "role is one of"),
        ({"role": "robot", "content": "x"}, "not 'robot'"),
        ({"role": "assistant", "content": None}, "this one has neither"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "only text parts"),
        ({"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}, "no function name"),
        ({"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{"}]}, "arguments of a call of f are not JSON"),
    ],
    ids=["no object", "unknown role", "nothing said", "picture", "nameless call", "broken arguments"],
)
def test_what_cannot_be_learned_from_says_why(message, words):
    with pytest.raises(ContractViolation, match=words):
        chats.normalised(message)
