"""Plain text and code as training rows, for continued pretraining before the tool-call syntax is taught.

Takes files and folders, and a tokenizer. Gives rows of at most so many tokens, a document's rows in its order, and a count of every
file that was left out and why. What is no UTF-8 text or not ours to read, is empty, is larger than a megabyte (generated, most often)
or lies in a hidden folder is left out; nothing is repaired. Leaves out: how the rows are trained on (`warmstart.py`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pipelines.errors import ContractViolation
from trainer.chat import Chat
from trainer.packing import PackedRow

MAX_FILE_BYTES: Final = 1_000_000
MIN_TOKENS: Final = 16
"""A shorter rest of a document teaches nothing that the document's own rows do not."""
END_OF_TEXT: Final = "<|endoftext|>"
"""What ends a document, where the tokenizer has it."""


def files(places: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of some places, folders in depth and by name, hidden ones left out.

    Raises:
        ContractViolation: A place does not exist.
    """
    for place in places:
        if not place.exists():
            raise ContractViolation(f"{place} does not exist; give files or folders of text or code")
        found = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        yield from (path for path in found if not any(part.startswith(".") for part in path.relative_to(place).parts))


def read(path: Path) -> str | None:
    """Return a file's text, None for what is no text to train on."""
    if not 0 < path.stat().st_size <= MAX_FILE_BYTES:
        return None
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, PermissionError):
        return None
    return None if "\0" in text else text


def rows(chat: Chat, places: Sequence[Path], *, row_tokens: int, max_tokens: int) -> tuple[list[PackedRow], dict[str, int]]:
    """Cut documents into rows whose every token but the first is trained.

    Args:
        chat: The checkpoint's tokenizer.
        places: Files and folders.
        row_tokens: Tokens of one row.
        max_tokens: Stop after this many.

    Returns:
        Rows, and counts: `files`, `left_out_files` (no text, empty or too large), `cut_files` (not read any more, as there was enough).

    Raises:
        ContractViolation: A place does not exist, or holds no text at all.
    """
    made: list[PackedRow] = []
    counts: Counter[str] = Counter(files=0, left_out_files=0, cut_files=0)
    end = chat.tokenizer.token_to_id(END_OF_TEXT)
    tokens = 0
    for path in files(places):
        if tokens >= max_tokens:
            counts["cut_files"] += 1
            continue
        text = read(path)
        if text is None:
            counts["left_out_files"] += 1
            continue
        counts["files"] += 1
        ids = chat.encode(text) + ([] if end is None else [end])
        for start in range(0, len(ids), row_tokens):
            part = np.asarray(ids[start : start + row_tokens])
            if len(part) >= MIN_TOKENS and tokens < max_tokens:
                made.append(PackedRow(prompt_ids=part[:1], response_ids=part[1:], trained=np.arange(1, len(part)), temperature=1.0))
                tokens += len(part)
    if not made:
        raise ContractViolation(
            f"there is no text to train on in {', '.join(map(str, places))} ({counts['left_out_files']} files left out)"
        )
    return made, dict(counts)
