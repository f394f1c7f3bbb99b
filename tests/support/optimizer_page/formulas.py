"""Forms that only other libraries or papers have, in float64. Imports nothing of gpuopt.

As in `textbook.py`, each function takes a weight and its history and returns the state after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from textbook import History, State

Correction = Callable[[np.ndarray, int, float], np.ndarray]


def _corrected(average: np.ndarray, step: int, beta: float) -> np.ndarray:
    return average / (1 - beta**step)


def _moments(
    w: np.ndarray, history: History, beta1: float, beta2: float
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields step, gradient, and the averages of gradients and of their squares."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        yield step, g, m, v


def adam_with_epsilon_in_root(
    w, history: History, *, learning_rate, epsilon, beta1=0.9, beta2=0.999
) -> State:
    """optax.adam(eps=0, eps_root=epsilon^2)."""
    for step, _, m, v in _moments(w, history, beta1, beta2):
        root = np.sqrt(_corrected(v, step, beta2) + epsilon**2)
        w = w - learning_rate * _corrected(m, step, beta1) / root
    return {"var": w}


def adam_with_l2(
    w, history: History, *, learning_rate, weight_decay, beta1=0.9, beta2=0.999, epsilon=1e-8
) -> State:
    """torch.optim.Adam(weight_decay=...): what Loshchilov & Hutter 2019 call L2 regularization."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, given in history:
        g = given + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - learning_rate * _corrected(m, step, beta1) / (
            np.sqrt(_corrected(v, step, beta2)) + epsilon
        )
    return {"var": w}


def ams_grad_of_the_paper(w, history: History, *, learning_rate, beta1=0.9, beta2=0.999) -> State:
    """Reddi, Kale & Kumar 2018, algorithm 2: no bias is corrected, and there is no epsilon."""
    largest = np.zeros_like(w)
    for _, _, m, v in _moments(w, history, beta1, beta2):
        largest = np.maximum(largest, v)
        w = w - learning_rate * m / np.sqrt(largest)
    return {"var": w}


def ams_grad_with_epsilon_hat(
    w, history: History, *, learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-7
) -> State:
    """keras.optimizers.Adam(amsgrad=True)."""
    largest = np.zeros_like(w)
    for step, _, m, v in _moments(w, history, beta1, beta2):
        largest = np.maximum(largest, v)
        step_size = learning_rate * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w - step_size * m / (np.sqrt(largest) + epsilon)
    return {"var": w}


def nadam_of_optax(
    w, history: History, *, learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8
) -> State:
    """optax.nadam: mu is beta1; what is ahead is corrected as if it were the next step's."""
    for step, g, m, v in _moments(w, history, beta1, beta2):
        ahead = beta1 * _corrected(m, step + 1, beta1)
        ahead = ahead + (1 - beta1) * _corrected(g, step, beta1)
        w = w - learning_rate * ahead / (np.sqrt(_corrected(v, step, beta2)) + epsilon)
    return {"var": w}


def r_adam_with_epsilon_after(
    w,
    history: History,
    *,
    learning_rate,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    threshold=5.0,
) -> State:
    """optax.radam; without an epsilon and with a threshold of 4, Liu et al. 2020, algorithm 2."""
    longest = 2 / (1 - beta2) - 1
    for step, _, m, v in _moments(w, history, beta1, beta2):
        direction = _corrected(m, step, beta1)
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        if length > threshold:
            r = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            direction = direction * np.sqrt(r) / (np.sqrt(_corrected(v, step, beta2)) + epsilon)
        w = w - learning_rate * direction
    return {"var": w}


def ada_belief_with_epsilon_once(
    w, history: History, *, learning_rate, epsilon, beta1=0.9, beta2=0.999
) -> State:
    """Epsilon under the root, as a constant that does not add up in `s`."""
    m, s = np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2
        root = np.sqrt(_corrected(s, step, beta2) + epsilon)
        w = w - learning_rate * _corrected(m, step, beta1) / (root + epsilon)
    return {"var": w}


def lars_with_norm_of_sum(
    w, history: History, *, learning_rate, weight_decay, momentum=0.9, eeta=0.001
) -> State:
    """optax.lars: the ratio is to the norm of the gradient together with the decay."""
    velocity = np.zeros_like(w)
    for _, given in history:
        g = given + weight_decay * w
        norms = np.linalg.norm(w), np.linalg.norm(g)
        ratio = eeta * norms[0] / norms[1] if min(norms) > 0 else 1.0
        velocity = momentum * velocity + learning_rate * ratio * g
        w = w - velocity
    return {"var": w}


def rms_prop_from_zero(
    w, history: History, *, learning_rate, epsilon, decay=0.9, is_in_root=False
) -> State:
    """torch.optim.RMSprop; with its epsilon in the root, optax.rmsprop and Keras's."""
    v = np.zeros_like(w)
    for _, g in history:
        v = decay * v + (1 - decay) * g**2
        w = w - learning_rate * g / (np.sqrt(v + epsilon) if is_in_root else np.sqrt(v) + epsilon)
    return {"var": w}


def adagrad_with_epsilon(
    w,
    history: History,
    *,
    learning_rate,
    epsilon,
    initial_accumulator_value=0.0,
    is_in_root=False,
) -> State:
    """torch.optim.Adagrad; with its epsilon in the root, optax.adagrad and Keras's."""
    n = np.full_like(w, initial_accumulator_value)
    for _, g in history:
        n = n + g**2
        w = w - learning_rate * g / (np.sqrt(n + epsilon) if is_in_root else np.sqrt(n) + epsilon)
    return {"var": w}
