"""A network that reads handwritten digits, after autograd's example neural_net."""

# Needs SciPy, for autograd.scipy: pip install scipy

from itertools import pairwise

import autograd.numpy as np
from autograd.misc.flatten import flatten
from autograd.scipy.special import logsumexp

import gpuopt
from gpuopt.demo.digits import load_digits


def main(steps: int = 120) -> tuple[float, float]:
    """Trains, and returns the test images' error at the beginning and at the end."""
    (images, labels), (test_images, test_labels) = load_digits()
    images, test_images = images / 16.0, test_images / 16.0
    one_hot = np.eye(10)[labels]
    rng = np.random.default_rng(0)
    sizes = [64, 50, 10]
    layers = [
        (gpuopt.Variable(0.1 * rng.standard_normal((m, n))), gpuopt.Variable(np.zeros(n)))
        for m, n in pairwise(sizes)
    ]

    def log_probabilities(inputs):
        for weights, biases in layers:
            outputs = np.dot(inputs, weights) + biases
            inputs = np.tanh(outputs)
        return outputs - logsumexp(outputs, axis=1, keepdims=True)

    def error():
        guesses = np.argmax(log_probabilities(test_images), axis=1)
        return float(np.mean(guesses != test_labels))

    def loss():
        flat, _ = flatten(layers)
        batch = next(batches)
        log_likelihood = np.sum(log_probabilities(images[batch]) * one_hot[batch])
        return 1e-4 * np.sum(flat**2) - log_likelihood / len(batch)

    batches = (rng.integers(len(images), size=128) for _ in range(steps))
    optimizer = gpuopt.AdamOptimizer(0.01)
    before = error()
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, error()


if __name__ == "__main__":
    print("error before and after: {:.3f} {:.3f}".format(*main()))
