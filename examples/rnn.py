"""A recurrent network that predicts the next character, after autograd's example rnn."""

# Needs SciPy, for autograd.scipy: pip install scipy

from itertools import pairwise

import autograd.numpy as np
from autograd.scipy.special import logsumexp
from text import one_hot_text

import gpuopt

HIDDEN = 24


def main(steps: int = 150) -> tuple[float, float]:
    """Trains, and returns the loss for each character before and after, in nats."""
    sequence = one_hot_text()
    num_characters = sequence.shape[2]
    rng = np.random.default_rng(0)

    def variable(*shape):
        return gpuopt.Variable(0.2 * rng.standard_normal(shape))

    initial, change = variable(1, HIDDEN), variable(num_characters + HIDDEN + 1, HIDDEN)
    predict = variable(HIDDEN + 1, num_characters)

    def with_bias(weights, *inputs):
        together = np.hstack([*inputs, np.ones((len(inputs[0]), 1))])
        return np.dot(together, weights)

    def loss():
        hidden = np.repeat(initial, sequence.shape[1], axis=0)
        total = 0.0
        for now, following in pairwise(sequence):
            hidden = np.tanh(with_bias(change, now, hidden))
            scores = with_bias(predict, hidden)
            logs = scores - logsumexp(scores, axis=1, keepdims=True)
            total = total - np.sum(logs * following)
        return total / (sequence.shape[1] * (len(sequence) - 1))

    optimizer = gpuopt.AdamOptimizer(0.02)
    before = float(loss())
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, float(loss())


if __name__ == "__main__":
    print("loss of a character before and after: {:.3f} {:.3f}".format(*main()))
