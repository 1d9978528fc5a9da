"""Text and code as training rows: what is read, what is left out and counted, and that no token is lost between rows."""

import re
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import ContractViolation
from trainer import texts
from trainer.chat import Chat, load
from trainer.packing import tokens_of

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def chat(tiny_folder: Path) -> Chat:
    return load(tiny_folder)


def write(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


CODE = "def add(a, b):\n    return a + b\n" * 20


def test_a_document_is_cut_into_rows_that_hold_all_its_tokens_and_its_end(chat: Chat, tmp_path: Path) -> None:
    write(tmp_path, "a.py", CODE.encode())
    found, counts = texts.rows(chat, [tmp_path], row_tokens=32, max_tokens=10_000)
    joined = np.concatenate([np.concatenate([row.prompt_ids, row.response_ids]) for row in found]).tolist()
    whole = [*chat.encode(CODE), chat.tokenizer.token_to_id("<|endoftext|>")]
    kept = len(whole) if len(whole) % 32 >= texts.MIN_TOKENS else len(whole) // 32 * 32
    assert joined == whole[:kept]
    assert {tokens_of(row) for row in found[:-1]} == {32}
    assert all(row.trained.tolist() == list(range(1, tokens_of(row))) for row in found)
    assert counts == {"files": 1, "left_out_files": 0, "cut_files": 0}


def test_what_is_no_text_is_left_out_and_counted(chat: Chat, tmp_path: Path) -> None:
    write(tmp_path, "b/readme.md", CODE.encode())
    for name, data in {
        "photo.png": b"\x89PNG\r\n\x1a\n\xff",
        "zeros.bin": b"a\0b",
        "empty.txt": b"",
        "huge.csv": b"1,2\n" * 300_000,
    }.items():
        write(tmp_path, name, data)
    write(tmp_path, ".git/config", b"[core]\n" * 50)
    _, counts = texts.rows(chat, [tmp_path], row_tokens=64, max_tokens=10_000)
    assert counts == {"files": 1, "left_out_files": 4, "cut_files": 0}


def test_reading_stops_when_there_is_enough(chat: Chat, tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        write(tmp_path, name, CODE.encode())
    found, counts = texts.rows(chat, [tmp_path], row_tokens=32, max_tokens=64)
    assert sum(map(tokens_of, found)) == 64
    assert counts == {"files": 1, "left_out_files": 0, "cut_files": 2}


def test_places_come_in_the_order_given_and_a_folder_by_name(chat: Chat, tmp_path: Path) -> None:
    one, two = write(tmp_path, "z/one.txt", b"x"), write(tmp_path, "a/two.txt", b"y")
    three = write(tmp_path, "a/b/three.txt", b"z")
    assert list(texts.files([one, tmp_path / "a"])) == [one, three, two]


@pytest.mark.parametrize(
    ("name", "data", "words"), [("absent", None, "does not exist"), ("pictures/x.png", b"\xff\xfe", "no text to train on")]
)
def test_a_place_without_text_is_one_sentence_that_names_it(chat: Chat, tmp_path: Path, name: str, data: bytes | None, words: str) -> None:
    place = tmp_path / name.split("/")[0]
    if data is not None:
        write(tmp_path, name, data)
    with pytest.raises(ContractViolation, match=re.escape(str(place)) + f"|{words}") as raised:
        texts.rows(chat, [place], row_tokens=64, max_tokens=100)
    assert words in str(raised.value)
