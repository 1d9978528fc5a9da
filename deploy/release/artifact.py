"""What a candidate's files say, read without torch: bytes, signature, tensors, and how far the weights moved.

Takes two checkpoint folders, gives facts for gate group A. Tensors are read through a memory map a few million numbers at a
time, so memory stays small whatever the model's size. Leaves out: verdicts (`gates.py`).
"""

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.release.signing import check_signature
from pipelines.errors import CheckpointInvalid
from pipelines.storage import Home
from pipelines.terminal import progress
from trainer import candidates

CHUNK_NUMBERS: Final = 4_000_000
"""Numbers converted at once: 32 MB as float64."""

NUMPY_DTYPES: Final = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
}
"""safetensors names and how their bytes are read; BF16 is the upper half of an F32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where one tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file, bytes."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFacts:
    """What was found in a candidate's folder."""

    bytes_error: str | None
    """Why the folder does not agree with its manifest; None when it does."""
    signature_error: str | None
    parent: str | None
    """The checkpoint its manifest says it was trained from."""
    tokenizer_equal: bool
    template_equal: bool
    tensor_differences: tuple[str, ...]
    """Tensors that are missing, new, or of another shape or dtype than the serving checkpoint's."""
    non_finite: tuple[str, ...]
    """Tensors holding NaN or infinity."""
    relative_norm: float | None
    """norm(candidate - serving) / norm(serving) over all tensors; None when they cannot be compared."""


def tensors(folder: Path) -> dict[str, Tensor]:
    """Index a folder's safetensors files.

    Raises:
        CheckpointInvalid: There are none, or a header does not fit its file.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise CheckpointInvalid(f"{path} is not a safetensors file: its header is longer than the file")
            try:
                header = json.loads(file.read(length))
                for name, entry in header.items():
                    if name == "__metadata__":
                        continue
                    start, end = entry["data_offsets"]
                    item = Tensor(
                        path=path, dtype=entry["dtype"], shape=tuple(entry["shape"]), start=8 + length + start, size_bytes=end - start
                    )
                    if item.start + item.size_bytes > size:
                        raise CheckpointInvalid(f"{path}: tensor {name} reaches past the end of the file")
                    found[name] = item
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointInvalid(f"{path} is not a safetensors file: its header cannot be read") from error
    if not found:
        raise CheckpointInvalid(f"{folder} holds no safetensors weights")
    return found


def numbers(tensor: Tensor, *, chunk: int = CHUNK_NUMBERS) -> Iterator[NDArray[np.float64]]:
    """Yield a tensor's numbers in chunks, as float64.

    Raises:
        CheckpointInvalid: Its dtype is not a known one.
    """
    kind = NUMPY_DTYPES.get(tensor.dtype)
    if kind is None:
        raise CheckpointInvalid(f"{tensor.path}: dtype {tensor.dtype} is not one that is served ({', '.join(NUMPY_DTYPES)})")
    dtype = np.dtype(kind)
    count = tensor.size_bytes // dtype.itemsize
    with tensor.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for first in range(0, count, chunk):
            part = np.frombuffer(
                mapped[tensor.start + first * dtype.itemsize : tensor.start + min(count, first + chunk) * dtype.itemsize], dtype
            )
            if tensor.dtype == "BF16":
                part = (part.astype(np.uint32) << 16).view(np.float32)
            yield part.astype(np.float64)


def compare_tensors(serving: dict[str, Tensor], candidate: dict[str, Tensor]) -> tuple[str, ...]:
    """Name every tensor that is not in both with one shape and dtype."""
    differences: list[str] = []
    for name in sorted(serving.keys() | candidate.keys()):
        a, b = serving.get(name), candidate.get(name)
        if a is None or b is None:
            differences.append(f"{name} {'is new' if a is None else 'is missing'}")
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            differences.append(f"{name} {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}")
    return tuple(differences)


def compare_weights(serving: dict[str, Tensor], candidate: dict[str, Tensor]) -> tuple[tuple[str, ...], float]:
    """Return the candidate's non-finite tensors and norm(difference) / norm(serving), for tensors of equal shape."""
    bad: list[str] = []
    moved = whole = 0.0
    with progress("comparing tensors", total=len(serving)) as advance:
        for name, base in serving.items():
            finite = True
            for a, b in zip(numbers(base), numbers(candidate[name]), strict=True):
                finite = finite and bool(np.isfinite(b).all())
                moved += float(np.square(b - a).sum()) if finite else math.nan
                whole += float(np.square(a).sum())
            if not finite:
                bad.append(name)
            advance(1)
    return tuple(bad), math.sqrt(moved / whole) if whole > 0 and not math.isnan(moved) else math.inf


def inspect(home: Home, *, serving: str, candidate: str) -> ArtifactFacts:
    """Look at a candidate beside the checkpoint that serves.

    Args:
        home: The deployment.
        serving: Id of the serving checkpoint, in the store.
        candidate: Id of the candidate, in the store.

    Raises:
        CheckpointInvalid: The serving checkpoint itself cannot be read.
    """
    old, new = home.store / serving, home.store / candidate
    reference = candidates.read_manifest(old)
    bytes_error = signature_error = None
    parent, tokenizer, template = None, "", ""
    try:
        manifest = candidates.verify(new)
        parent, tokenizer, template = manifest.parent, manifest.tokenizer_sha, manifest.template_sha
        if candidates.checkpoint_id(new) != candidate:
            bytes_error = f"the folder {candidate[:12]} holds checkpoint {candidates.checkpoint_id(new)[:12]}"
    except CheckpointInvalid as error:
        bytes_error = str(error)
    try:
        check_signature(home, candidate)
    except CheckpointInvalid as error:
        signature_error = str(error)
    differences: tuple[str, ...] = ("not read: the bytes are not the manifest's",)
    bad: tuple[str, ...] = ()
    norm = None
    if bytes_error is None:
        try:
            base, tuned = tensors(old), tensors(new)
            differences = compare_tensors(base, tuned)
            if not differences:
                bad, norm = compare_weights(base, tuned)
        except CheckpointInvalid as error:
            bytes_error = str(error)
    return ArtifactFacts(
        bytes_error=bytes_error,
        signature_error=signature_error,
        parent=parent,
        tokenizer_equal=tokenizer == reference.tokenizer_sha,
        template_equal=template == reference.template_sha,
        tensor_differences=differences,
        non_finite=bad,
        relative_norm=norm,
    )
