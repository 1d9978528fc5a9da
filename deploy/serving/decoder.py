"""One checkpoint in memory, decoding many sequences at once on CPU or GPU (the torch half of the embedded engine).

Every sequence in flight owns a row of one preallocated key/value store and the first n rows are in use, so a sequence joins
by filling the next row, leaves by the last row moving into its place, and a step never copies the cache (transformers'
`DynamicCache` copies all of it at every token). Rows have their own lengths: a mask hides what lies behind each row's end.

With bfloat16 only the body's matrix products are rounded; the residual stream, attention, and the vocabulary projection stay
float32. Measured on SmolLM2-135M's own samples against float32: mean |difference| of log-probabilities 0.015 nat, where an
all-bfloat16 body has 0.023 and the gate allows 0.02. It costs a tenth: a step of 8 / 32 takes 60 / 137 ms instead of 54 / 124.

Takes: a checkpoint folder, token ids. Gives: tokens, and their log-probabilities as sampled. Leaves out: which sequences
run when (`scheduler.py`), text (`embedded.py`), and models with sliding windows or linear attention, which are refused.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from deploy.serving.scheduler import Sampling
from pipelines.errors import CheckpointInvalid, ConfigError

GROW_TOKENS: Final = 256
"""Row lengths grow in whole multiples of this, so that growth is rare and short sessions stay small in memory."""

DTYPES: Final = ("float32", "bfloat16")


def grouped_attention(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Attend with grouped query heads without repeating keys and values.

    Args:
        query: [B, Hq, Q, D].
        key: [B, Hkv, K, D], Hq a multiple of Hkv.
        value: [B, Hkv, K, D].
        attention_mask: [B, 1, Q, K], True where attention is allowed.
        scaling: Factor on the scores.

    Returns:
        [B, Q, Hq, D] and no weights.
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    if queries == 1:  # the heads of a group become the queries of one key head
        packed = query.reshape(batch, key.shape[1], groups, width)
        mixed = functional.scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
        return mixed.reshape(batch, 1, heads, width), None
    wide = [side.repeat_interleave(groups, dim=1) for side in (key, value)] if groups > 1 else [key, value]
    mixed = functional.scaled_dot_product_attention(query, wide[0], wide[1], attn_mask=attention_mask, scale=scaling)
    return mixed.transpose(1, 2), None


AttentionInterface.register("tidegate_grouped", grouped_attention)


class RoundedLinear(nn.Module):
    """A linear layer whose product is computed in bfloat16 between float32 neighbours."""

    def __init__(self, exact: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(exact.weight.detach().bfloat16(), requires_grad=False)
        self.bias = None if exact.bias is None else nn.Parameter(exact.bias.detach().bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b: [..., in] to [..., out], float32."""
        return functional.linear(x.bfloat16(), self.weight, self.bias).float()


def round_linears(module: nn.Module) -> None:
    """Replace every linear layer inside a module by its rounded twin."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, RoundedLinear(child))
        else:
            round_linears(child)


class SlotCache(Cache):
    """Keys and values of all rows; `aim` says which rows and positions the next forward pass writes."""

    def __init__(self, *, layers: int, rows: int, heads: int, width: int, device: torch.device) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])  # placeholders: transformers asks their kind
        self._shape = (rows, heads, 0, width)
        self._options = {"dtype": torch.float32, "device": device}
        self._keys = [torch.zeros(self._shape, **self._options) for _ in range(layers)]
        self._values = [torch.zeros(self._shape, **self._options) for _ in range(layers)]
        self._rows = slice(0, 0)
        self._starts = torch.zeros(0, dtype=torch.long)
        self._stop = 0

    def reserve(self, tokens: int) -> None:
        """Make every row at least `tokens` long."""
        rows, heads, held, width = self._shape
        if tokens <= held:
            return
        self._shape = (rows, heads, -(-tokens // GROW_TOKENS) * GROW_TOKENS, width)
        for side in (self._keys, self._values):
            for layer, old in enumerate(side):
                # zeros, not empty: a masked weight of 0 times a stray infinity would be NaN
                side[layer] = torch.zeros(self._shape, **self._options)
                side[layer][:, :, :held] = old

    def aim(self, rows: slice, starts: Tensor, *, stop: int) -> None:
        """Set where the next pass writes: `rows`, from `starts` [n] in each, and read up to `stop`."""
        self.reserve(stop)
        self._rows, self._starts, self._stop = rows, starts, stop

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [n, H, Q, D]; return those of the aimed rows [n, H, stop, D]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        count, length = key_states.shape[0], key_states.shape[2]
        if length == 1:
            index = torch.arange(count, device=keys.device)
            keys[self._rows][index, :, self._starts] = key_states[:, :, 0]
            values[self._rows][index, :, self._starts] = value_states[:, :, 0]
        else:  # a prefill fills one row
            where = slice(self._stop - length, self._stop)
            keys[self._rows, :, where] = key_states
            values[self._rows, :, where] = value_states
        return keys[self._rows, :, : self._stop], values[self._rows, :, : self._stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (transformers' signature)
        """Return 0: positions and masks are always given explicitly."""
        return 0

    def copy(self, row: int, *, length: int) -> Tensor:
        """Return a copy of a row's first `length` positions: [2, L, H, length, D]."""
        return torch.stack([torch.stack([layer[row, :, :length] for layer in side]) for side in (self._keys, self._values)])

    def paste(self, row: int, stored: Tensor, *, length: int) -> None:
        """Write the first `length` positions of a copy into a row."""
        self.reserve(length)
        for side, part in zip((self._keys, self._values), stored, strict=True):
            for layer, layer_part in zip(side, part, strict=True):
                layer[row, :, :length] = layer_part[:, :length]

    def move(self, source: int, target: int, *, length: int) -> None:
        """Copy a row's first `length` positions over another row."""
        for side in (self._keys, self._values):
            for layer in side:
                layer[target, :, :length] = layer[source, :, :length]


class Decoder:
    """A loaded model and its rows. Not thread-safe: one thread drives it."""

    def __init__(self, model: PreTrainedModel, *, rows: int, dtype: str) -> None:
        config: Any = model.config
        self.dtype = dtype
        self.device = model.device
        self.end_ids = _end_ids(model)
        self._body = model.base_model
        head: Any = model.get_output_embeddings()
        self._head: Tensor = head.weight.detach().float()
        bias: Tensor | None = getattr(head, "bias", None)
        self._head_bias = None if bias is None else bias.detach().float()
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._cache = SlotCache(
            layers=config.num_hidden_layers, rows=rows, heads=heads, width=width, device=self.device
        )  # fmt: skip
        self.token_bytes = 2 * config.num_hidden_layers * heads * width * torch.float32.itemsize
        self.positions = int(config.max_position_embeddings)

    @torch.inference_mode()
    def prefill(self, row: int, ids: Sequence[int], *, start: int) -> Tensor:
        """Run the prompt tokens `ids` at positions `start`... of a row whose earlier positions are filled.

        Returns:
            Logits [1, V] after the last of them, float32.
        """
        stop = start + len(ids)
        positions = torch.arange(start, stop, device=self.device)
        self._cache.aim(slice(row, row + 1), positions[:1], stop=stop)
        mask = torch.arange(stop, device=self.device)[None, :] <= positions[:, None]
        hidden = self._forward(torch.tensor([list(ids)], device=self.device), positions[None], mask[None, None], self._cache)
        return self._logits(hidden[:, -1])

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Run one token of each of the first n rows.

        Args:
            tokens: [n] the newest token of each row.
            lengths: [n] positions filled before it.

        Returns:
            Logits [n, V], float32.
        """
        starts = torch.tensor(lengths, device=self.device)
        stop = max(lengths) + 1
        self._cache.aim(slice(0, len(tokens)), starts, stop=stop)
        mask = torch.arange(stop, device=self.device)[None, :] <= starts[:, None]
        hidden = self._forward(torch.tensor(tokens, device=self.device)[:, None], starts[:, None], mask[:, None, None], self._cache)
        return self._logits(hidden[:, 0])

    @torch.inference_mode()
    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the log-probability of each response token at logits / temperature, in nats, by one pass without cache."""
        ids = [*prompt_ids, *response_ids]
        positions = torch.arange(len(ids) - 1, device=self.device)
        mask = positions[None, :] <= positions[:, None]
        hidden = self._forward(torch.tensor([ids[:-1]], device=self.device), positions[None], mask[None, None], None)
        logits = self._logits(hidden[0, len(prompt_ids) - 1 :]) / temperature
        taken = logits.gather(1, torch.tensor(response_ids, device=self.device)[:, None])[:, 0]
        return (taken - logits.logsumexp(dim=1)).tolist()

    @torch.inference_mode()
    def copy(self, row: int, *, length: int) -> Tensor:
        """Return a copy of a row's first `length` positions, for a later `paste`."""
        return self._cache.copy(row, length=length)

    @torch.inference_mode()
    def paste(self, row: int, stored: Tensor, *, length: int) -> None:
        """Fill a row's first `length` positions from a copy."""
        self._cache.paste(row, stored, length=length)

    @torch.inference_mode()
    def move(self, source: int, target: int, *, length: int) -> None:
        """Copy a row over another one."""
        self._cache.move(source, target, length=length)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache | None) -> Tensor:
        output = self._body(input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=cache is not None)
        return output.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden.float(), self._head, self._head_bias)


@torch.inference_mode()
def sample(logits: Tensor, wishes: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Draw one token a row by inverting the cumulative distribution at the row's own uniform number.

    A row's draw depends on its logits and its number only, never on its batch mates. Temperature 0 takes the most likely
    token. `top_k` and `top_p` narrow the draw; the log-probability reported is always that of the whole vocabulary at
    logits / temperature (at temperature 0: of the logits as they are).

    Args:
        logits: [n, V] float32.
        wishes: [n] how each row samples.
        uniforms: [n] in [0, 1).

    Returns:
        Tokens [n] and log-probabilities [n] in nats.
    """
    temperatures = torch.tensor([wish.temperature or 1.0 for wish in wishes], device=logits.device)
    scaled = logits / temperatures[:, None]
    top = scaled.amax(dim=1, keepdim=True)
    weights = (scaled - top).exp_()
    borders = weights.cumsum(dim=1, dtype=torch.float64)  # 49,152 float32 additions would move the borders by about 1e-5
    normalisers = top[:, 0].double() + borders[:, -1].log()
    for row, wish in enumerate(wishes):
        if wish.top_k or wish.top_p < 1.0:
            borders[row] = _narrow(weights[row].double(), wish).cumsum(0)
    drawn = torch.tensor(uniforms, device=logits.device, dtype=torch.float64) * borders[:, -1]
    tokens = torch.searchsorted(borders, drawn[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    greedy = torch.tensor([wish.temperature == 0 for wish in wishes], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(dim=1), tokens)
    return tokens.tolist(), (scaled.gather(1, tokens[:, None])[:, 0] - normalisers).tolist()


def _narrow(weights: Tensor, wish: Sampling) -> Tensor:
    ordered, order = weights.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if wish.top_k:
        keep[wish.top_k :] = False
    if wish.top_p < 1.0:
        keep &= ordered.cumsum(0) - ordered < wish.top_p * ordered.sum()
    return torch.zeros_like(weights).scatter(0, order, ordered * keep)


def _end_ids(model: PreTrainedModel) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    named = getattr(generation, "eos_token_id", None)
    named = model.config.eos_token_id if named is None else named
    return frozenset([named] if isinstance(named, int) else named or [])


def _cpu_has(flag: str) -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and f" {flag}" in info.read_text()


def choose_dtype(wish: str) -> str:
    """Return `wish`, or for `auto` what is fast here.

    SmolLM2-135M, one core with avx512_bf16, prompts of 300 tokens, sampling included: an all-bfloat16 body decodes 36 / 113 / 187
    tok/s at batch 1 / 8 / 32 and reads a prompt in 0.29 s (ours is a tenth slower); float32 23 / 83 / 133 tok/s and 0.82 s.
    Without such instructions bfloat16 is emulated and slower.

    Raises:
        ConfigError: Not a known format.
    """
    if wish == "auto":
        fast = torch.cuda.is_available() or _cpu_has("avx512_bf16")
        return "bfloat16" if fast else "float32"
    if wish not in DTYPES:
        raise ConfigError(f"dtype {wish!r} is not known; take one of auto, {', '.join(DTYPES)}")
    return wish


def load(folder: Path, *, dtype: str, rows: int) -> Decoder:
    """Load a checkpoint's weights.

    Args:
        folder: Holds `config.json` and safetensors.
        dtype: One of `DTYPES`.
        rows: Sequences decoded at once.

    Raises:
        CheckpointInvalid: The weights do not load, or the model's attention is not plain causal attention.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="tidegate_grouped", local_files_only=True, use_safetensors=True
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointInvalid(f"{folder} does not load as a causal language model: {error}") from error
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "use_sliding_window", False):
        raise CheckpointInvalid(f"{folder}: the embedded engine serves plain causal attention only, not {sorted(kinds)}; use vLLM")
    model = model.to(device).eval()
    if dtype == "bfloat16":
        round_linears(model.base_model)
    return Decoder(model, rows=rows, dtype=dtype)
