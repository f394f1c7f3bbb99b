"""Digits from a few numbers each (Kingma & Welling 2014): autograd's variational_autoencoder."""

# Needs SciPy, for autograd.scipy: pip install scipy

from itertools import pairwise

import autograd.numpy as np
from autograd.scipy.stats import norm

import gpuopt
from gpuopt.demo.digits import load_digits

LATENT, HIDDEN, BATCH = 6, 40, 100


def main(steps: int = 200) -> tuple[float, float]:
    """Trains, and returns the bound on an image's negative log-likelihood before and after."""
    (images, _), _ = load_digits()
    images = (images > 8).astype(np.float64)
    rng = np.random.default_rng(0)

    def network(*sizes):
        return [
            (gpuopt.Variable(0.05 * rng.standard_normal((m, n))), gpuopt.Variable(np.zeros(n)))
            for m, n in pairwise(sizes)
        ]

    encoder, decoder = network(64, HIDDEN, 2 * LATENT), network(LATENT, HIDDEN, 64)

    def apply(layers, inputs):
        for weights, biases in layers:
            outputs = np.dot(inputs, weights) + biases
            inputs = np.tanh(outputs)
        return outputs

    def bound(batch, noise):
        encoded = apply(encoder, batch)
        mean, log_std = encoded[:, :LATENT], encoded[:, LATENT:]
        latent = mean + noise * np.exp(log_std)
        scores = apply(decoder, latent)
        # Of a pixel that is 1 or 0: log sigmoid of the score, or of its negative.
        log_likelihood = -np.logaddexp(0, (1 - 2 * batch) * scores).sum(axis=1)
        log_prior = norm.logpdf(latent, 0.0, 1.0).sum(axis=1)
        log_posterior = norm.logpdf(latent, mean, np.exp(log_std)).sum(axis=1)
        return np.mean(log_posterior - log_likelihood - log_prior)

    def loss():
        rows = rng.integers(len(images), size=BATCH)
        return bound(images[rows], rng.standard_normal((BATCH, LATENT)))

    def bound_of_all():
        noise = np.random.default_rng(1).standard_normal((len(images), LATENT))
        return float(bound(images, noise))

    optimizer = gpuopt.AdamOptimizer(0.01)
    before = bound_of_all()
    for _ in range(steps):
        optimizer.minimize(loss)
    return before, bound_of_all()


if __name__ == "__main__":
    print("bound before and after: {:.2f} {:.2f}".format(*main()))
