"""Two layers that read handwritten digits: a dict of parameters, a dict of gradients, one call."""

from __future__ import annotations

import numpy as np

import gpuopt
from gpuopt.demo.digits import load_digits

try:
    import cupy

    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np

HIDDEN = 50
BATCH = 100


def initial(rng: np.random.Generator) -> dict:
    """Returns the parameters: small random weights, and biases of 0."""

    def weights(rows, columns):
        return xp.asarray(rng.standard_normal((rows, columns)) / np.sqrt(rows), xp.float32)

    return {
        "W1": weights(64, HIDDEN),
        "b1": xp.zeros(HIDDEN, xp.float32),
        "W2": weights(HIDDEN, 10),
        "b2": xp.zeros(10, xp.float32),
    }


def scores_of(params, images):
    """Returns the hidden layer [n, HIDDEN] and the scores of the digits [n, 10]."""
    hidden = xp.maximum(images @ params["W1"] + params["b1"], 0)
    return hidden, hidden @ params["W2"] + params["b2"]


def loss_and_gradients(params, images, labels):
    """Returns the mean cross entropy, and its gradients under the names of the parameters."""
    hidden, scores = scores_of(params, images)
    scores -= scores.max(axis=1, keepdims=True)
    probabilities = xp.exp(scores)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = xp.arange(len(labels))
    loss = -xp.log(probabilities[rows, labels]).mean()

    # The derivative of cross entropy by the scores: probabilities less 1 for the right digit.
    of_scores = probabilities
    of_scores[rows, labels] -= 1
    of_scores /= len(labels)
    of_hidden = (of_scores @ params["W2"].T) * (hidden > 0)
    gradients = {
        "W1": images.T @ of_hidden,
        "b1": of_hidden.sum(axis=0),
        "W2": hidden.T @ of_scores,
        "b2": of_scores.sum(axis=0),
    }
    return loss, gradients


def main(steps: int = 500) -> tuple[float, float]:
    """Trains, and returns the loss of the first and of the last batch."""
    rng = np.random.default_rng(0)
    train, test = load_digits()
    images, labels = xp.asarray(train.images / 16, xp.float32), xp.asarray(train.labels)
    params = initial(rng)
    optimizer = gpuopt.AdamOptimizer(learning_rate=0.003)
    losses = []
    for step in range(steps):
        batch = xp.asarray(rng.integers(len(labels), size=BATCH))
        loss, gradients = loss_and_gradients(params, images[batch], labels[batch])
        optimizer.update(params, gradients)
        losses.append(loss)
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss):.3f}")

    _, scores = scores_of(params, xp.asarray(test.images / 16, xp.float32))
    right = scores.argmax(axis=1) == xp.asarray(test.labels)
    print(f"loss {float(losses[-1]):.3f}; {float(right.mean()):.1%} of the test images are right")
    return float(losses[0]), float(losses[-1])


if __name__ == "__main__":
    main()
