"""Losses over logged tokens. Pure: tensors in, one scalar and counted sums out.

Four policies meet here, all as log-probabilities of the sampled tokens in nats at logits / temperature:

    mu     sampled the tokens (logged)            ref    is the approved checkpoint
    prox   is the policy at the start of a step   theta  is the policy now, the only one with a gradient

and every loss is of one form, with a term P for the reward and, but for the last two, a penalty that holds theta near ref:

    L = (1/Z) sum_i omega_i sum_t (P_it + beta q_it k3_it)        Z = sum_i omega_i N_i

    name            P of a token                                          what carries a row from mu to theta
    decoupled_ppo   -m wt s, s = min(r A, clip(r) A), >= 3 A if A < 0     wt = min(prox / mu, 2) and r = theta / prox; m masks rows
    cispo           -sg(w) A theta                                        w = min(theta / mu, 2)
    gspo            -W min(s A, clip(s) A)                                the row's mean ratios: W = prox / mu, s = theta / prox
    dppo            -M min(r, 2) A                                        r = theta / mu, until the probability moved by .15
    rloo            -sg(W) A theta                                        W = the product of the row's ratios theta / mu, at most 2
    reinforce       -A theta                                              nothing: for rows of the policy itself
    sft             -theta                                                nothing: for examples

(A is the advantage, sg stops the gradient; a ratio of two policies is exp of the difference of their log-probabilities.)

Z is taken over the whole optimizer batch (all ranks and micro-batches) before the first forward and counts masked tokens too. So a loss
does not depend on how a batch is cut, and masking a token never makes its neighbours count more. Masked tokens are taken out with
`where` on the *inputs* of exp: a multiplication by a zero mask would turn an infinity into a NaN, in the value or in the gradient.

Leaves out: how advantages come about (`advantages.py`), forward passes (`model.py`), ranks (`engine.py`).
"""

# ruff: noqa: F722  (shapes of jaxtyping are no Python expressions)

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipelines.errors import ConfigError

LOG_RATIO_LIMIT: Final = 20.0
"""exp(20) = 4.9e8: beyond this a ratio says only "very different", and its square still fits fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """The trained tokens of one micro-batch."""

    theta: Float[Tensor, " N"]
    """Log-probability under the policy now; carries the gradient."""
    prox: Float[Tensor, " N"]
    mu: Float[Tensor, " N"]
    ref: Float[Tensor, " N"]
    advantage: Float[Tensor, " N"]
    """The turn's advantage at each of its tokens."""
    omega: Float[Tensor, " N"]
    """Weight of the row's user at each token, in (0, 1]."""
    segment: Int[Tensor, " N"]
    """Row that each token belongs to, 0 .. rows - 1."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Constants of the losses; see `UpdateConfig` for what they mean."""

    beta: float = 0.02
    weight_cap: float = 2.0
    sequence_ratio_low: float = 0.9
    sequence_ratio_high: float = 1.1
    veto_low: float = 1e-4
    veto_high: float = 100.0
    negative_kl_cap: float = 0.1
    clip_low: float = 0.8
    clip_high: float = 1.28
    dual_clip: float = 3.0
    sequence_clip_low: float = 3e-4
    sequence_clip_high: float = 4e-4
    divergence_limit: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class LossValue:
    """A micro-batch's share of the loss, and sums that add up over micro-batches and ranks."""

    loss: Float[Tensor, ""]
    """Already divided by Z: micro-batches and ranks are summed, never averaged."""
    sums: dict[str, Float[Tensor, ""]]
    """Detached sums over tokens (or rows, where the name says so)."""


Loss = Callable[[LossBatch, float, LossSettings], LossValue]


def segment_mean(values: Float[Tensor, " N"], segment: Int[Tensor, " N"], rows: int) -> Float[Tensor, " R"]:
    """Return the mean over each row's tokens; 0 for a row without tokens."""
    totals = torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, segment, values)
    counts = torch.zeros_like(totals).index_add(0, segment, torch.ones_like(values))
    return totals / counts.clamp(min=1)


def segment_all(flags: Bool[Tensor, " N"], segment: Int[Tensor, " N"], rows: int) -> Bool[Tensor, " R"]:
    """Return whether a flag holds at every token of a row; True for a row without tokens."""
    broken = torch.zeros(rows, device=flags.device).index_add(0, segment, (~flags).float())
    return broken == 0


def clamped(log_ratio: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Limit a log ratio to what can be exponentiated and squared."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def anchor(batch: LossBatch, weight: Float[Tensor, " N"], keep: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the penalty q k3 of each kept token: in expectation over mu, its gradient is that of KL(theta || ref).

    Formula: k3 = exp(ref - theta) - (ref - theta) - 1,  q = weight exp(theta - prox), attached. With q detached the term is not
    the gradient of that divergence: 18 % off on policy, 27 % off it.

    Args:
        batch: Tokens.
        weight: prox / mu, truncated, detached.
        keep: Tokens that count; the others are 0.

    Source: Schulman, "Approximating KL divergence" (k3), 2020.
    """
    zero = torch.zeros_like(batch.theta)
    ratio = clamped(torch.where(keep, batch.theta - batch.prox.detach(), zero)).exp()
    ref_to_theta = clamped(torch.where(keep, batch.ref - batch.theta, zero))
    k3 = ref_to_theta.exp() - ref_to_theta - 1
    return torch.where(keep, weight * ratio * k3, zero)


def truncated_to(value: Float[Tensor, " N"], cap: float) -> Float[Tensor, " N"]:
    """Return min(value, cap) with the gradient of min(value, cap) / value * value: bounded, and never cut to 0 where the cap holds."""
    return value * (value.detach().clamp(max=cap) / value.detach())


def _anchored(
    batch: LossBatch, policy: Float[Tensor, " N"], normaliser: float, settings: LossSettings, *, clipped: Bool[Tensor, " N"]
) -> LossValue:
    """Add the anchor to the term of each token and sum up: the form above, with no row masked."""
    keep = torch.ones_like(clipped)
    weight = clamped(batch.prox.detach() - batch.mu).exp().clamp(max=settings.weight_cap)
    divergence = anchor(batch, weight, keep)
    return LossValue(
        loss=(batch.omega * (policy + settings.beta * divergence)).sum() / normaliser,
        sums={
            "policy": (batch.omega * policy).sum().detach(),
            "kl": divergence.sum().detach(),
            "kept_tokens": keep.sum().float(),
            "clipped_tokens": clipped.sum().float(),
        },
    )


def _plain_sums(batch: LossBatch, per_token: Float[Tensor, " N"]) -> dict[str, Float[Tensor, ""]]:
    """Return the figures of a loss without anchor: the divergence is told, not pulled at."""
    ref_to_theta = clamped(batch.ref - batch.theta.detach())
    k3 = ref_to_theta.exp() - ref_to_theta - 1
    theta_to_mu = clamped(batch.theta.detach() - batch.mu)
    return {
        "policy": per_token.sum().detach(),
        "kl": (theta_to_mu.exp() * k3).sum(),
        "kept_tokens": torch.tensor(float(batch.theta.numel())),
    }


def decoupled_ppo(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """Clip against prox, weigh by prox / mu, stay near ref.

    Formula, per token t of row i:
        w = sg exp(prox - mu),  wt = min(w, 2)
        m_seq = 1[exp(mean_t(prox - mu)) in [.9, 1.1]],  m_veto = 1[all t: 1e-4 <= w <= 100]
        m_neg = 0 if A < 0 and mean_t(mu - theta) > .1 else 1
        r = exp(theta - prox),  s = min(r A, clip(r, .8, 1.28) A),  if A < 0: s = max(s, 3 A)
        k3 = exp(ref - theta) - (ref - theta) - 1,  q = sg(wt) r
        L = (1/Z) sum omega m_seq m_veto (m_neg (-wt s) + beta q k3)
    The ratio r in q stays attached: without it the second term is not the gradient of KL(theta || ref).

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch; > 0.
        settings: Constants.

    Source: Hilton et al., "Batch size-invariance for policy optimization" (decoupled objective), arXiv 2110.00641; Ye et al.
        (dual clip), arXiv 1912.09729; Schulman, "Approximating KL divergence" (k3), 2020.
    """
    prox_to_mu = clamped(batch.prox.detach() - batch.mu)
    weight = prox_to_mu.exp()
    sequence_ratio = segment_mean(prox_to_mu, batch.segment, batch.rows).exp()
    in_band = (sequence_ratio >= settings.sequence_ratio_low) & (sequence_ratio <= settings.sequence_ratio_high)
    no_veto = segment_all((weight >= settings.veto_low) & (weight <= settings.veto_high), batch.segment, batch.rows)
    drop = segment_mean(batch.mu - batch.theta.detach(), batch.segment, batch.rows)
    keep = (in_band & no_veto)[batch.segment]
    far_enough = (batch.advantage < 0) & (drop > settings.negative_kl_cap)[batch.segment]
    push = keep & ~far_enough

    zero = torch.zeros_like(batch.theta)
    truncated = torch.where(keep, weight, zero).clamp(max=settings.weight_cap)
    ratio = clamped(torch.where(keep, batch.theta - batch.prox.detach(), zero)).exp()
    advantage = torch.where(keep, batch.advantage, zero)
    clipped = ratio.clamp(settings.clip_low, settings.clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    surrogate = torch.where(advantage < 0, torch.maximum(surrogate, settings.dual_clip * advantage), surrogate)
    policy = torch.where(push, -truncated * surrogate, zero)

    divergence = anchor(batch, truncated, keep)

    loss = (batch.omega * (policy + settings.beta * divergence)).sum() / normaliser
    return LossValue(
        loss=loss,
        sums={
            "policy": (batch.omega * policy).sum().detach(),
            "kl": divergence.sum().detach(),
            "kept_tokens": keep.sum().float(),
            "clipped_tokens": (keep & (ratio != clipped)).sum().float(),
            "masked_sequence_rows": (~in_band).sum().float(),
            "masked_veto_rows": (~no_veto).sum().float(),
            "masked_negative_tokens": (keep & far_enough).sum().float(),
        },
    )


def cispo(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """Clip the importance weight, never the gradient: every token goes on teaching, with a bounded weight.

    Formula: w = sg min(exp(theta - mu), cap);  L = (1/Z) sum omega (-w A theta + beta q k3)

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch.
        settings: `weight_cap` and `beta`.

    Source: MiniMax, "MiniMax-M1", section 3.1 (CISPO), arXiv 2506.13585.
    """
    weight = clamped(batch.theta.detach() - batch.mu).exp()
    policy = -weight.clamp(max=settings.weight_cap) * batch.advantage * batch.theta
    clipped = weight > settings.weight_cap
    return _anchored(batch, policy, normaliser, settings, clipped=clipped)


def gspo(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """One ratio a row: the geometric mean of its tokens' ratios, clipped as a whole.

    Formula: s_i = exp(mean_t(theta - prox)), W_i = sg min(exp(mean_t(prox - mu)), cap);
        L = (1/Z) sum_i omega_i sum_t (-W_i min(s_i A, clip(s_i, 1 - 3e-4, 1 + 4e-4) A) + beta q k3)

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch.
        settings: `sequence_clip_low`, `sequence_clip_high`, `weight_cap` and `beta`.

    Source: Zheng et al., "Group sequence policy optimization", equation 5, arXiv 2507.18071; the weight W_i carries rows of an older
        policy to prox, as in `decoupled_ppo`.
    """
    ratio = clamped(segment_mean(batch.theta - batch.prox.detach(), batch.segment, batch.rows)).exp()[batch.segment]
    weight = clamped(segment_mean(batch.prox.detach() - batch.mu, batch.segment, batch.rows)).exp().clamp(max=settings.weight_cap)
    inside = ratio.clamp(1 - settings.sequence_clip_low, 1 + settings.sequence_clip_high)
    policy = -weight[batch.segment] * torch.minimum(ratio * batch.advantage, inside * batch.advantage)
    return _anchored(batch, policy, normaliser, settings, clipped=ratio != inside)


def dppo(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """Bound how far a token's probability moved, not its ratio: rare tokens may double, common ones may not drift.

    Formula: D = |exp(theta) - exp(mu)|, r = exp(theta - mu); M = 0 if D > limit and the step would move further
        (A > 0 and r > 1, or A < 0 and r < 1), else 1;  L = (1/Z) sum omega (-M min(r, cap) A + beta q k3)

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch.
        settings: `divergence_limit` (total variation of the two-outcome distribution), `weight_cap` and `beta`.

    Source: Qi et al., "Rethinking the trust region in LLM reinforcement learning" (binary total variation), arXiv 2602.04879.
    """
    ratio = clamped(batch.theta - batch.mu).exp()
    moved = (batch.theta.detach().exp() - batch.mu.exp()).abs() > settings.divergence_limit
    further = torch.where(batch.advantage > 0, ratio.detach() > 1, ratio.detach() < 1)
    masked = moved & further
    surrogate = truncated_to(ratio, settings.weight_cap) * batch.advantage
    policy = torch.where(masked, torch.zeros_like(surrogate), -surrogate)
    return _anchored(batch, policy, normaliser, settings, clipped=masked)


def rloo(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """Take the whole response as one action: one weight for all its tokens, the product of their ratios.

    Formula: W_i = sg min(exp(sum_t(theta - mu)), cap);  L = (1/Z) sum_i omega_i sum_t (-W_i A theta + beta q k3)

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch.
        settings: `weight_cap` and `beta`. The leave-one-out baseline is in the advantages (`advantages.py`).

    Source: Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization", arXiv 2402.14740.
    """
    summed = torch.zeros(batch.rows, dtype=batch.theta.dtype, device=batch.theta.device)
    summed = clamped(summed.index_add(0, batch.segment, batch.theta.detach() - batch.mu)).exp()
    weight = summed.clamp(max=settings.weight_cap)[batch.segment]
    policy = -weight * batch.advantage * batch.theta
    return _anchored(batch, policy, normaliser, settings, clipped=(summed > settings.weight_cap)[batch.segment])


def reinforce(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """Raise the log-probability of what did better than its baseline; no correction for who sampled it.

    Formula: L = -(1/Z) sum omega A theta

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch.
        settings: Unused; every loss has the same shape.

    Source: Williams, "Simple statistical gradient-following algorithms", Machine Learning 8, 1992.
    """
    del settings
    per_token = -batch.omega * batch.advantage * batch.theta
    return LossValue(loss=per_token.sum() / normaliser, sums=_plain_sums(batch, per_token))


def sft(batch: LossBatch, normaliser: float, settings: LossSettings) -> LossValue:
    """Mean negative log-likelihood of the trained tokens.

    Formula: L = -(1/Z) sum omega theta

    Args:
        batch: Tokens of one micro-batch.
        normaliser: Z, over the whole optimizer batch.
        settings: Unused; every loss has the same shape.
    """
    del settings
    per_token = -batch.omega * batch.theta
    return LossValue(loss=per_token.sum() / normaliser, sums=_plain_sums(batch, per_token))


LOSSES: Final[dict[str, Loss]] = {
    "decoupled_ppo": decoupled_ppo, "cispo": cispo, "gspo": gspo, "dppo": dppo, "reinforce": reinforce, "rloo": rloo, "sft": sft,
}  # fmt: skip


def adapted_beta(beta: float, kl: float, *, base: float, target: float) -> float:
    """Return the next step's weight of the KL term: twice it when the KL is half again over its target, half when well under.

    Args:
        beta: This step's weight.
        kl: This step's mean k3, nats a token.
        base: The configured weight: it is never less, nor more than 64 times this.
        target: The KL aimed at, nats a token.

    Source: Schulman et al., "Proximal policy optimization algorithms", section 4, arXiv 1707.06347.
    """
    if kl > 1.5 * target:
        beta *= 2
    elif kl < target / 1.5:
        beta /= 2
    return min(max(beta, base), 64 * base)


def named(name: str) -> Loss:
    """Return a loss by name.

    Raises:
        ConfigError: There is no such loss; nothing is ever used in its place.
    """
    if name not in LOSSES:
        raise ConfigError(f"trainer.loss={name!r} does not exist; choose one of {', '.join(sorted(LOSSES))}")
    return LOSSES[name]
