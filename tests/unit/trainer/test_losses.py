"""Each loss against hand-worked numbers, a slow loop, and finite differences of its own value."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from pipelines.errors import ConfigError
from trainer.losses import LOSSES, LossBatch, LossSettings, adapted_beta, decoupled_ppo, named

S = LossSettings()


def batch(theta, *, prox=None, mu=None, ref=None, advantage=1.0, omega=1.0, segment=None, grad=False):
    theta = torch.tensor(theta, dtype=torch.float64, requires_grad=grad)

    def like(value):
        given_value = theta.detach() if value is None else torch.as_tensor(value, dtype=torch.float64)
        return given_value.expand(theta.shape).clone()

    ids = torch.tensor(segment if segment is not None else [0] * len(theta))
    return LossBatch(
        theta=theta, prox=like(prox), mu=like(mu), ref=like(ref), advantage=like(advantage), omega=like(omega), segment=ids,
        rows=int(ids.max()) + 1,
    )  # fmt: skip


def slow_decoupled_ppo(b: LossBatch, z: float, s: LossSettings) -> float:
    """The formula of the docstring, one token at a time, in Python floats."""
    total = 0.0
    for row in range(b.rows):
        at = [t for t in range(len(b.theta)) if int(b.segment[t]) == row]
        if not at:
            continue
        theta, prox, mu, ref = ([float(x[t].detach()) for t in at] for x in (b.theta, b.prox, b.mu, b.ref))
        n = len(at)
        in_band = s.sequence_ratio_low <= math.exp(sum(p - m for p, m in zip(prox, mu, strict=True)) / n) <= s.sequence_ratio_high
        no_veto = all(s.veto_low <= math.exp(p - m) <= s.veto_high for p, m in zip(prox, mu, strict=True))
        fell = sum(m - t for m, t in zip(mu, theta, strict=True)) / n > s.negative_kl_cap
        for k, t in enumerate(at):
            a, omega = float(b.advantage[t]), float(b.omega[t])
            if not (in_band and no_veto):
                continue
            w = min(math.exp(prox[k] - mu[k]), s.weight_cap)
            r = math.exp(theta[k] - prox[k])
            value = min(r * a, min(max(r, s.clip_low), s.clip_high) * a)
            if a < 0:
                value = max(value, s.dual_clip * a)
            policy = 0.0 if (a < 0 and fell) else -w * value
            d = ref[k] - theta[k]
            total += omega * (policy + s.beta * w * r * (math.exp(d) - d - 1))
    return total / z


def test_on_policy_the_loss_is_minus_the_mean_advantage():
    found = decoupled_ppo(batch([-1.0, -2.0], advantage=0.5), 2.0, S)
    assert float(found.loss) == pytest.approx(-0.5)


def test_a_hand_worked_off_policy_token():
    # w = e^0.05 = 1.05127, r = e^0.1 = 1.10517, A = 2: s = 2.21034; k3 of d = -0.2: e^-0.2 + 0.2 - 1 = 0.0187308
    # L = -1.05127 * 2.21034 + 0.02 * 1.05127 * 1.10517 * 0.0187308 = -2.323668 + 0.000435
    found = decoupled_ppo(batch([-0.9], prox=[-1.0], mu=[-1.05], ref=[-1.1], advantage=2.0), 1.0, S)
    assert float(found.loss) == pytest.approx(-2.3232334, abs=2e-6)


def test_a_ratio_above_the_upper_clip_earns_nothing_more_and_has_no_gradient():
    b = batch([-0.5], prox=[-1.0], ref=[-0.5], mu=[-1.0], advantage=1.0, grad=True)  # r = e^0.5 = 1.65 > 1.28
    found = decoupled_ppo(b, 1.0, S)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(-1.28)
    assert float(b.theta.grad) == pytest.approx(0.0, abs=1e-12)
    assert float(found.sums["clipped_tokens"]) == 1


def test_the_dual_clip_bounds_what_a_punished_token_can_cost():
    # A = -1, r = e^2 = 7.39: min(rA, clip A) = -7.39, bounded at 3A = -3, so L = +3 and no gradient
    b = batch([-1.0], prox=[-3.0], mu=[-3.0], ref=[-1.0], advantage=-1.0, grad=True)
    found = decoupled_ppo(b, 1.0, S)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(3.0)
    assert float(b.theta.grad) == pytest.approx(0.0, abs=1e-12)


def test_the_weight_is_truncated_at_two():
    # two tokens: prox - mu = +1 and -1, mean 0 so the row is in band; w = e = 2.718 -> 2, and 1/e = 0.3679
    found = decoupled_ppo(batch([-1.0, -2.0], prox=[-1.0, -2.0], mu=[-2.0, -1.0], ref=[-1.0, -2.0]), 2.0, S)
    assert float(found.loss) == pytest.approx(-(2 + math.exp(-1)) / 2)


def test_a_row_outside_the_sequence_band_is_masked_but_still_counts_in_the_normaliser():
    found = decoupled_ppo(batch([-1.0, -1.0], prox=[-1.0, -1.0], mu=[-1.0, -1.2], segment=[0, 1]), 2.0, S)
    assert float(found.loss) == pytest.approx(-0.5)
    assert float(found.sums["masked_sequence_rows"]) == 1
    assert float(found.sums["kept_tokens"]) == 1


def test_one_vetoed_token_takes_its_whole_row_out():
    # prox - mu = +4.7 (w = 109.9 > 100) balanced by -4.7 elsewhere: the band does not see it, the veto does
    found = decoupled_ppo(batch([-1.0, -5.7], prox=[-1.0, -5.7], mu=[-5.7, -1.0]), 2.0, S)
    assert float(found.loss) == 0.0
    assert float(found.sums["masked_veto_rows"]) == 1
    assert float(found.sums["masked_sequence_rows"]) == 0


def test_a_punished_row_that_already_fell_is_pushed_no_further_but_is_still_held_near_the_reference():
    # mu - theta = 0.2 > 0.1 with A < 0; d = ref - theta = 0.2: k3 = e^0.2 - 1.2 = 0.0214028, r = e^-0.2, w = 1
    found = decoupled_ppo(batch([-1.2], prox=[-1.0], mu=[-1.0], ref=[-1.0], advantage=-1.0), 1.0, S)
    assert float(found.loss) == pytest.approx(0.02 * math.exp(-0.2) * (math.exp(0.2) - 1.2))
    assert float(found.sums["masked_negative_tokens"]) == 1


def test_users_weigh_by_omega():
    found = decoupled_ppo(batch([-1.0, -1.0], advantage=[1.0, 3.0], omega=[1.0, 0.25], segment=[0, 1]), 1.25, S)
    assert float(found.loss) == pytest.approx(-(1 + 0.75) / 1.25)


def test_infinite_and_nan_log_probabilities_in_a_masked_row_leave_value_and_gradient_finite():
    b = batch([-1.0, float("-inf")], prox=[-1.0, -1.0], mu=[-1.0, -60.0], ref=[-1.0, float("nan")], segment=[0, 1], grad=True)
    found = decoupled_ppo(b, 2.0, S)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(-0.5)
    assert torch.isfinite(b.theta.grad).all()


def test_reinforce_and_sft_are_the_plain_sums():
    b = batch([-1.0, -3.0], advantage=[2.0, -1.0], omega=[1.0, 0.5])
    assert float(LOSSES["reinforce"](b, 2.0, S).loss) == pytest.approx(-(2 * -1 + 0.5 * -1 * -3) / 2)
    assert float(LOSSES["sft"](b, 2.0, S).loss) == pytest.approx((1 + 1.5) / 2)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_of_unequal_lengths_or_another_kind_of_number_is_refused_by_its_shapes(name):
    good = batch([-1.0, -2.0])
    for wrong in ({"mu": good.mu[:1]}, {"segment": good.segment.double()}, {"advantage": good.advantage[None]}):
        with pytest.raises(TypeCheckError):
            LOSSES[name](replace(good, **wrong), 2.0, S)


def test_an_unknown_loss_is_an_error_and_names_the_known_ones():
    with pytest.raises(ConfigError, match="decoupled_ppo"):
        named("ppo2")


logprob = st.floats(-4, -0.01)


@st.composite
def random_batches(draw):
    n = draw(st.integers(1, 8))
    theta = draw(st.lists(logprob, min_size=n, max_size=n))
    near = st.lists(st.floats(-0.3, 0.3), min_size=n, max_size=n)
    prox = [t + d for t, d in zip(theta, draw(near), strict=True)]
    mu = [p + d for p, d in zip(prox, draw(near), strict=True)]
    ref = [t + d for t, d in zip(theta, draw(near), strict=True)]
    segment = sorted(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    by_row = draw(st.lists(st.floats(-5, 5), min_size=3, max_size=3))
    return batch(theta, prox=prox, mu=mu, ref=ref, advantage=[by_row[s] for s in segment], segment=segment)


@given(random_batches(), st.floats(0.5, 50))
@settings(deadline=None)
def test_decoupled_ppo_equals_a_slow_loop(b, z):
    assert float(decoupled_ppo(b, z, S).loss) == pytest.approx(slow_decoupled_ppo(b, z, S), rel=1e-9, abs=1e-12)


FROZEN_WEIGHT = ("cispo", "rloo")
"""Losses whose weight depends on theta but carries no gradient: their value is not the integral of their gradient."""


def fixed_rows():
    rng = np.random.default_rng(3)
    theta = rng.uniform(-3, -0.1, 12)
    return theta, {
        "prox": theta + rng.normal(0, 0.05, 12), "mu": theta + rng.normal(0, 0.05, 12), "ref": theta + rng.normal(0, 0.2, 12),
        "advantage": np.repeat(rng.normal(0, 1, 4), 3), "omega": np.repeat([1, 0.5, 1, 0.25], 3),
        "segment": np.repeat([0, 1, 2, 3], 3).tolist(),
    }  # fmt: skip


def gradient(name, theta, fixed, s):
    b = batch(theta, grad=True, **fixed)
    LOSSES[name](b, 7.0, s).loss.backward()
    return b.theta.grad.numpy()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - set(FROZEN_WEIGHT)))
def test_the_gradient_equals_finite_differences(name):
    theta, fixed = fixed_rows()
    wide = replace(S, beta=0.5, sequence_clip_low=0.2, sequence_clip_high=0.2)

    def value(at, step):
        moved = theta.copy()
        moved[at] += step
        return float(LOSSES[name](batch(moved, **fixed), 7.0, wide).loss)

    slopes = [(value(t, 1e-6) - value(t, -1e-6)) / 2e-6 for t in range(12)]
    assert gradient(name, theta, fixed, wide) == pytest.approx(slopes, abs=1e-7)


@pytest.mark.parametrize("name", FROZEN_WEIGHT)
def test_a_frozen_weight_scales_the_gradient_and_the_anchor_is_everyones(name):
    theta, fixed = fixed_rows()
    gap = theta - fixed["mu"]
    weights = np.exp(gap if name == "cispo" else np.repeat(gap.reshape(4, 3).sum(1), 3))
    expected = -np.minimum(weights, 2.0) * fixed["advantage"] * fixed["omega"] / 7.0
    plain, strong = replace(S, beta=0.0), replace(S, beta=0.5)
    assert gradient(name, theta, fixed, plain) == pytest.approx(expected, abs=1e-12)
    anchored = gradient(name, theta, fixed, strong) - gradient(name, theta, fixed, plain)
    checked = gradient("dppo", theta, fixed, strong) - gradient("dppo", theta, fixed, plain)
    assert anchored == pytest.approx(checked, abs=1e-12)


def test_cispo_caps_the_weight_and_goes_on_teaching():
    # theta - mu = 1: w = e -> 2; L = -2 * 1 * -0.5 = 1, slope -2
    b = batch([-0.5], mu=[-1.5], grad=True)
    found = LOSSES["cispo"](b, 1.0, S)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(1.0)
    assert float(b.theta.grad) == pytest.approx(-2.0)
    assert float(found.sums["clipped_tokens"]) == 1


def test_gspo_moves_a_row_as_one_and_stops_at_its_band():
    # theta - prox = 4e-4 and 2e-4, mean 3e-4: inside 1 + 4e-4; prox - mu = 1: weight e -> 2
    inside = batch([-1.0, -2.0], prox=[-1.0004, -2.0002], mu=[-2.0004, -3.0002], ref=[-1.0, -2.0], advantage=2.0)
    assert float(LOSSES["gspo"](inside, 2.0, S).loss) == pytest.approx(-2 * math.exp(3e-4) * 2)
    # mean 1e-3 is outside: the value stands at 1.0004 and has no slope
    outside = batch([-1.0, -2.0], prox=[-1.001, -2.001], mu=[-1.001, -2.001], ref=[-1.0, -2.0], advantage=2.0, grad=True)
    found = LOSSES["gspo"](outside, 2.0, replace(S, beta=0.0))
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(-1.0004 * 2)
    assert outside.theta.grad.abs().max() < 1e-12
    assert float(found.sums["clipped_tokens"]) == 2


def test_dppo_stops_a_probability_that_moved_far_from_moving_further_but_lets_it_come_back():
    # mu .3, theta .5: |d| = .2 > .15 and r = 5/3
    moved = {"theta": [math.log(0.5)], "mu": [math.log(0.3)]}
    assert float(LOSSES["dppo"](batch(**moved, advantage=1.0), 1.0, S).loss) == 0.0
    assert float(LOSSES["dppo"](batch(**moved, advantage=-1.0), 1.0, S).loss) == pytest.approx(5 / 3)
    # a rare token may grow sixfold: mu .01, theta .06, weight capped at 2
    rare = batch([math.log(0.06)], mu=[math.log(0.01)], advantage=1.0, grad=True)
    found = LOSSES["dppo"](rare, 1.0, S)
    found.loss.backward()
    assert float(found.loss.detach()) == pytest.approx(-2.0)
    assert float(rare.theta.grad) == pytest.approx(-2.0)


def test_rloo_weighs_every_token_by_the_whole_response():
    # theta - mu = .2 + .3: W = e^.5 = 1.648721; L = -1.648721 * 2 * (-1 - 3) / 2
    found = LOSSES["rloo"](batch([-1.0, -3.0], mu=[-1.2, -3.3], advantage=2.0), 2.0, S)
    assert float(found.loss) == pytest.approx(1.648721 * 4, rel=1e-6)


@given(random_batches(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_micro_batches_of_whole_rows_add_up_to_the_batch(b, random):
    whole = float(decoupled_ppo(b, 9.0, S).loss)
    rows = list(range(b.rows))
    random.shuffle(rows)
    parts = 0.0
    for row in rows:
        at = torch.nonzero(b.segment == row)[:, 0]
        if len(at):
            fields = {name: getattr(b, name)[at] for name in ("theta", "prox", "mu", "ref", "advantage", "omega")}
            parts += float(decoupled_ppo(LossBatch(segment=torch.zeros(len(at), dtype=torch.long), rows=1, **fields), 9.0, S).loss)
    assert parts == pytest.approx(whole, abs=1e-12)


CORRECTED = ("decoupled_ppo", "cispo", "gspo", "dppo", "rloo")
"""Losses that claim to correct for who sampled the rows."""
OPEN = LossSettings(
    beta=1.0, weight_cap=1e9, sequence_ratio_low=1e-9, sequence_ratio_high=1e9, veto_low=1e-12, veto_high=1e12, negative_kl_cap=1e9,
    divergence_limit=0.999,
)  # fmt: skip
"""No mask and no cap: what is left is exact."""
LOGITS = ([0.3, -0.2, 1.0, -1.1, 0.0], [0.1, 0.2, 0.4, -0.9, 0.3], [-0.4, 0.5, 0.2, 0.1, -0.3])


def toy(mu_logits):
    """One-token responses over a vocabulary of five, each weighed by how often mu samples it: sums are expectations over mu."""
    logits = torch.tensor(LOGITS[0], dtype=torch.float64, requires_grad=True)
    log_theta = torch.log_softmax(logits, 0)
    log_mu = torch.log_softmax(torch.tensor(mu_logits, dtype=torch.float64), 0)
    log_ref = torch.log_softmax(torch.tensor(LOGITS[2], dtype=torch.float64), 0)
    return logits, LossBatch(
        theta=log_theta, prox=log_theta.detach(), mu=log_mu, ref=log_ref, advantage=torch.zeros(5, dtype=torch.float64),
        omega=log_mu.exp(), segment=torch.arange(5), rows=5,
    )  # fmt: skip


BEHAVIOURS = pytest.mark.parametrize("mu", [LOGITS[0], LOGITS[1]], ids=["on_policy", "off_policy"])


@BEHAVIOURS
@pytest.mark.parametrize("name", CORRECTED)
def test_the_anchor_is_exactly_the_gradient_of_the_divergence(name, mu):
    logits, b = toy(mu)
    (estimate,) = torch.autograd.grad(LOSSES[name](b, 1.0, OPEN).loss, logits, retain_graph=True)
    (truth,) = torch.autograd.grad((b.theta.exp() * (b.theta - b.ref)).sum(), logits)
    assert torch.allclose(estimate, truth, atol=1e-12)


@BEHAVIOURS
def test_k3_without_the_attached_ratio_is_off_by_more_than_a_tenth(mu):
    logits, b = toy(mu)
    d = b.ref - b.theta
    term = (b.omega * (b.theta.detach() - b.mu).exp() * (d.exp() - d - 1)).sum()
    (estimate,) = torch.autograd.grad(term, logits, retain_graph=True)
    (truth,) = torch.autograd.grad((b.theta.exp() * (b.theta - b.ref)).sum(), logits)
    assert float((estimate - truth).norm() / truth.norm()) > 0.1


@BEHAVIOURS
@pytest.mark.parametrize("name", CORRECTED)
def test_logged_rows_of_another_policy_give_the_true_policy_gradient(name, mu):
    logits, b = toy(mu)
    reward = torch.tensor([1.0, -0.5, 0.2, 0.7, -1.0], dtype=torch.float64)
    value = LOSSES[name](replace(b, advantage=reward), 1.0, replace(OPEN, beta=0.0)).loss
    (estimate,) = torch.autograd.grad(value, logits, retain_graph=True)
    (truth,) = torch.autograd.grad(-(b.theta.exp() * reward).sum(), logits)
    assert torch.allclose(estimate, truth, atol=1e-12)


ARMS = np.array([0.1, 0.9, 0.5, 0.4])
"""Expected reward of each arm of a bandit; the second is the best."""


def play(name, *, staleness, steps=160, rows=256, lr=0.12):
    """Train on rows that the policy of `staleness` steps ago sampled; returns the probability of the best arm."""
    rng = np.random.default_rng([staleness, len(name)])
    logits = torch.zeros(len(ARMS), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=lr)
    past = [torch.log_softmax(logits.detach(), 0)]
    for _ in range(steps):
        mu = past[max(0, len(past) - 1 - staleness)].numpy()
        arm = rng.choice(len(ARMS), size=rows, p=np.exp(mu))
        reward = (rng.random(rows) < ARMS[arm]).astype(float)
        theta = torch.log_softmax(logits, 0)[torch.from_numpy(arm)]
        b = LossBatch(
            theta=theta, prox=theta.detach(), mu=torch.from_numpy(mu[arm]), ref=theta.detach(),
            advantage=torch.from_numpy((reward - reward.mean()) / reward.std()), omega=torch.ones(rows, dtype=torch.float64),
            segment=torch.arange(rows), rows=rows,
        )  # fmt: skip
        optimizer.zero_grad()
        LOSSES[name](b, float(rows), replace(S, beta=0.0)).loss.backward()
        optimizer.step()
        past.append(torch.log_softmax(logits.detach(), 0))
    return float(past[-1][1].exp())


@pytest.mark.parametrize("staleness", range(5))
@pytest.mark.parametrize("name", CORRECTED)
def test_a_bandit_is_learned_from_rows_of_an_older_policy(name, staleness):
    assert play(name, staleness=staleness) > 0.9


def test_a_bandit_is_learned_on_policy_without_any_correction():
    assert play("reinforce", staleness=0) > 0.9


@pytest.mark.parametrize(
    ("beta", "kl", "expected"),
    [(0.02, 0.008, 0.04), (0.04, 0.0076, 0.08), (0.04, 0.005, 0.04), (0.04, 0.003, 0.02), (0.02, 0.0, 0.02), (1.28, 1.0, 1.28)],
    ids=["far over", "over", "on target", "well under", "never below the base", "never above 64 times the base"],
)
def test_beta_follows_the_divergence_between_its_bounds(beta, kl, expected):
    assert adapted_beta(beta, kl, base=0.02, target=0.005) == pytest.approx(expected)
