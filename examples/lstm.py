"""A network with long short-term memory that predicts the next character, after autograd's lstm."""

# Needs SciPy, for autograd.scipy: pip install scipy

from itertools import pairwise

import autograd.numpy as np
from autograd.scipy.special import expit, logsumexp
from text import one_hot_text

import gpuopt

HIDDEN = 16


def main(steps: int = 120) -> tuple[float, float]:
    """Trains, and returns the loss for each character before and after, in nats."""
    sequence = one_hot_text()
    num_characters = sequence.shape[2]
    rng = np.random.default_rng(0)

    def variable(*shape):
        return gpuopt.Variable(0.2 * rng.standard_normal(shape))

    cells, hiddens = variable(1, HIDDEN), variable(1, HIDDEN)
    gates = {
        name: variable(num_characters + HIDDEN + 1, HIDDEN)
        for name in ("change", "forget", "ingate", "outgate")
    }
    predict = variable(HIDDEN + 1, num_characters)

    def with_bias(weights, *inputs):
        together = np.hstack([*inputs, np.ones((len(inputs[0]), 1))])
        return np.dot(together, weights)

    def loss():
        cell = np.repeat(cells, sequence.shape[1], axis=0)
        hidden = np.repeat(hiddens, sequence.shape[1], axis=0)
        total = 0.0
        for now, following in pairwise(sequence):
            change = np.tanh(with_bias(gates["change"], now, hidden))
            forget, ingate, outgate = (
                expit(with_bias(gates[name], now, hidden))
                for name in ("forget", "ingate", "outgate")
            )
            cell = cell * forget + ingate * change
            hidden = outgate * np.tanh(cell)
            scores = with_bias(predict, hidden)
            logs = scores - logsumexp(scores, axis=1, keepdims=True)
            total = total - np.sum(logs * following)
        return total / (sequence.shape[1] * (len(sequence) - 1))

    optimizer = gpuopt.AdamOptimizer(0.03)
    before = float(loss())
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, float(loss())


if __name__ == "__main__":
    print("loss of a character before and after: {:.3f} {:.3f}".format(*main()))
