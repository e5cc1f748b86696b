"""How small gradients are sure to become: the bound holds, and the paper's theorem fails.

Proof, and why the paper's fails: ``docs/explanation/theory.md``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest


def gradient_bound(
    *,
    excess_loss: float,
    learning_rate: float,
    smoothness: float,
    rounds: int,
    local_steps: Sequence[int],
    weights: Sequence[float],
    noise: float,
    biases: Sequence[float],
    joint_bias: float,
) -> float:
    """Bound the mean of E |grad F(x_t)|^2 over the global models x_0 to x_(T-1).

    For plain SGD without momentum, where worker i draws its samples from p_i, each independently
    given the past, so that its gradients have the mean grad F_i. With the mean number of steps
    ``tau_e = sum w_i tau_i`` and shares ``a_i = w_i tau_i / tau_e`` it is::

        3.6 (F(x_0) - F*) / (eta tau_e T)
        + 3.6 L eta sigma^2 (sum w_i^2 tau_i) / tau_e + 10.8 L^2 eta^2 sigma^2 sum a_i tau_i
        + 28.8 L^2 eta^2 sum a_i tau_i^2 B_i^2 + 3.6 Bbar^2

    The last term stays, however small the learning rate is and however long training lasts.

    Parameters
    ----------
    excess_loss : float
        F(x_0) - F*, >= 0; F* is a lower bound of the loss F over all samples.
    learning_rate : float
        eta, constant, in (0, 1 / (6 L tau_max)].
    smoothness : float
        L > 0: the gradients of F and of all F_i are L-Lipschitz.
    rounds : int
        T >= 1.
    local_steps, weights : sequence of int, sequence of float
        tau_i >= 1 and w_i >= 0 of each worker; the weights add up to 1.
    noise : float
        sigma: E |gradient - grad F_i|^2 <= sigma^2 at every local model of every worker.
    biases : sequence of float
        B_i >= |grad F_i - grad F| of each worker, at every global model.
    joint_bias : float
        Bbar >= |sum a_i (grad F_i - grad F)|, likewise; at most sum a_i B_i, and below it where the
        workers' biases cancel.
    """
    assert learning_rate * smoothness * 6 * max(local_steps) < 1 + 1e-9
    rows = list(zip(weights, local_steps, biases, strict=True))
    mean_steps, step = sum(w * tau for w, tau, _ in rows), smoothness * learning_rate
    return (
        3.6 * excess_loss / (learning_rate * mean_steps * rounds)
        + 3.6 * step * noise**2 * sum(w**2 * tau for w, tau, _ in rows) / mean_steps
        + 10.8 * step**2 * noise**2 * sum(w * tau**2 for w, tau, _ in rows) / mean_steps
        + 28.8 * step**2 * sum(w * tau**3 * bias**2 for w, tau, bias in rows) / mean_steps
        + 3.6 * joint_bias**2
    )


SETTINGS: dict[str, Any] = {
    **{"excess_loss": 5.0, "learning_rate": 0.02, "smoothness": 2.0, "rounds": 10},
    **{"local_steps": (4, 1), "weights": (0.8, 0.2), "noise": 0.5},
    **{"biases": (0.6, 0.3), "joint_bias": 0.5},
}


def test_bound_worked() -> None:
    """tau_e = 3.4, a = (16/17, 1/17), L eta = 0.04.

    3.6 x 5 / (0.02 x 3.4 x 10) + 3.6 x 0.04 x 0.25 x (0.64 x 4 + 0.04) / 3.4
    + 10.8 x 0.0016 x 0.25 x 65/17 + 28.8 x 0.0016 x (256 x 0.36 + 0.09) / 17 + 3.6 x 0.25.
    """
    parts = 26.470588, 0.0275294, 0.0165176, 0.2500518, 0.9
    assert gradient_bound(**SETTINGS) == pytest.approx(sum(parts), abs=1e-6)


# --- on random quadratics, whose expectations are exact


def random_problem(seed: int) -> tuple[float, dict[str, Any]]:
    """Return the mean of E |grad F|^2 of a random problem, and the arguments of its bound.

    F(x) = sum_k h_k x_k^2 / 2, and grad F_i = h_i x + c_i in each coordinate, with independent
    noise. So tau steps take x to r^tau x - eta sum_(j < tau) r^j (c_i + noise), r = 1 - eta h_i,
    and the mean and the variance of each coordinate follow from one global model to the next.
    Either all h_i are h, or there is no noise: else there would be no bound of the biases.
    """
    rng = np.random.default_rng(seed)
    workers, size = rng.integers(1, 5), rng.integers(1, 4)
    curvature = rng.uniform(0, 1, size) ** 2 + 1e-3
    curvatures, deviations = np.tile(curvature, (workers, 1)), np.zeros(size)
    if seed % 2:
        deviations = rng.uniform(0, 1, size) * 10.0 ** rng.uniform(-2, 1)
    else:
        curvatures = rng.uniform(-0.2, 1, (workers, size))
    constants = rng.normal(size=(workers, size)) * 10.0 ** rng.uniform(-3, 1)
    smoothness = max(curvature.max(), np.abs(curvatures).max())
    steps, weights = rng.integers(1, 9, workers), rng.dirichlet(np.ones(workers))
    rate = 10.0 ** rng.uniform(-1.5, 0) / (6 * smoothness * steps.max())
    rounds, start = int(10.0 ** rng.uniform(0, 2.5)), rng.normal(size=size)

    done = np.arange(steps.max())[:, None, None] < steps[:, None]
    powers = (1 - rate * curvatures) ** np.arange(steps.max())[:, None, None] * done
    keep = weights @ (1 - rate * curvatures) ** steps[:, None]
    push = -rate * weights @ (constants * powers.sum(0))
    spread = (rate * deviations) ** 2 * (weights**2 @ (powers**2).sum(0))
    shares = weights * steps / (weights @ steps)
    mean, variance, total = start, np.zeros(size), 0.0
    biases, joint_bias = np.zeros(workers), 0.0
    for _ in range(rounds):
        total += float(curvature**2 @ (mean**2 + variance))
        each = (curvatures - curvature) * mean + constants
        biases = np.maximum(biases, np.linalg.norm(each, axis=1))
        joint_bias = max(joint_bias, float(np.linalg.norm(shares @ each)))
        mean, variance = keep * mean + push, keep**2 * variance + spread
    return total / rounds, {
        **{"excess_loss": curvature @ start**2 / 2, "learning_rate": rate, "rounds": rounds},
        **{"smoothness": smoothness, "local_steps": steps.tolist(), "weights": weights.tolist()},
        **{"noise": np.linalg.norm(deviations), "biases": biases, "joint_bias": joint_bias},
    }


def test_bound_holds_on_random_quadratics_and_needs_its_terms() -> None:
    """Of 200 problems each has less; without a term some have more."""
    problems = [random_problem(seed) for seed in range(200)]
    for found, arguments in problems:
        assert found <= gradient_bound(**arguments)
    for name in ("excess_loss", "noise", "joint_bias"):
        assert any(found > gradient_bound(**{**args, name: 0.0}) for found, args in problems)


def test_bound_does_not_hold_with_momentum() -> None:
    """One worker, F = x^2 / 2, x_0 = 0, eta = 0.01, sigma = 1, momentum 0.9: 0.0501 against 0.0371.

    E x^2 goes to (1 + m) eta / ((1 - m) (2 (1 + m) - eta)); without momentum to eta / (2 - eta).
    """
    eta = 0.01
    quadratic: dict[str, Any] = {
        **{"excess_loss": 0.0, "learning_rate": eta, "smoothness": 1.0, "rounds": 2000},
        **{"local_steps": [1], "weights": [1.0], "noise": 1.0, "biases": [0.0], "joint_bias": 0.0},
    }
    bound = gradient_bound(**quadratic)
    assert bound == pytest.approx(0.03708)
    for momentum, limit in ((0.0, 0.0050251), (0.9, 0.0501319)):
        step = np.array([[1 - eta, -eta * momentum], [1, momentum]])  # of (x, momentum buffer)
        noise, second, total = np.array([-eta, 1.0]), np.zeros((2, 2)), 0.0
        for _ in range(2000):
            total += second[0, 0]
            second = step @ second @ step.T + np.outer(noise, noise)
        assert second[0, 0] == pytest.approx(limit, rel=1e-3)
        assert (total / 2000 > bound) == (momentum > 0)


# --- the paper's theorem


@pytest.mark.parametrize(
    ("tau", "eta", "start"), [(1, 1 / 6, 2.0), (4, 1 / 24, 2.0), (8, 0.01, 0.0)]
)
def test_printed_theorem_fails_where_one_of_two_samples_is_drawn(
    tau: int, eta: float, start: float
) -> None:
    """f1 = (x - 1)^2 / 2 and f2 = (x + 1)^2 / 2, all probability on f1: x goes to 1.

    F = (x^2 + 1) / 2, grad F = x, L = 1, sigma = 0. All workers go the same way, so the weights do
    not matter. Whatever |grad F|^2 is on the way, it goes to 1, and what is claimed goes to 0.
    """
    rounds = 20_000
    models = 1 + (start - 1) * (1 - eta) ** (tau * np.arange(rounds + 1.0))
    losses = (models**2 + 1) / 2
    shared: dict[str, Any] = {"learning_rate": eta, "smoothness": 1.0, "rounds": rounds}
    claimed = 2 * (losses[0] - losses[-1]) / (eta * rounds)  # + L eta tau^2 sigma^2, which is 0
    assert (models[1:] ** 2).mean() == pytest.approx(1, abs=0.01)
    assert claimed < 0.01
    workers = {"local_steps": [tau, tau], "weights": [0.3, 0.7], "biases": [1.0, 1.0]}
    bound = gradient_bound(
        excess_loss=losses[0] - 0.5, noise=0.0, joint_bias=1.0, **workers, **shared
    )
    assert (models[:-1] ** 2).mean() < 3.6 < bound < 4.41
