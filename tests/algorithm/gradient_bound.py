"""How small gradients are sure to become; proof, and why the paper's fails: ``docs/theory.md``."""

from collections.abc import Sequence


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
