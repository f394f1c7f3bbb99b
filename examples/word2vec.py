"""Vectors of words by skip-grams and negative samples: gradients of some rows of two tables."""

from __future__ import annotations

import numpy as np

import gpuopt

try:
    import cupy

    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np

TOPICS = 20
WORDS = 2_000  # a word's topic is its number modulo TOPICS
WIDTH = 32
BATCH = 512
NEGATIVES = 5


def text(rng, paragraphs=4_000, length=20):
    """Returns paragraphs of words that are mostly of one topic; low numbers are frequent."""
    topics = rng.integers(TOPICS, size=(paragraphs, 1))
    ranks = np.minimum(rng.zipf(1.3, size=(paragraphs, length)), WORDS // TOPICS) - 1
    is_other = rng.random((paragraphs, length)) < 0.1
    others = rng.integers(TOPICS, size=(paragraphs, length))
    return TOPICS * ranks + np.where(is_other, others, topics)


def samples(rng, paragraphs):
    """Returns words, a neighbour of each in `others[:, 0]`, and random words after it."""
    of_paragraph = rng.integers(len(paragraphs), size=BATCH)
    places = rng.integers(2, paragraphs.shape[1] - 2, size=BATCH)
    words = paragraphs[of_paragraph, places]
    neighbours = paragraphs[of_paragraph, places + rng.choice([-2, -1, 1, 2], size=BATCH)]
    negatives = rng.choice(paragraphs.ravel(), size=(BATCH, NEGATIVES))
    return xp.asarray(words), xp.asarray(np.column_stack([neighbours, negatives]))


def loss_and_gradients(inputs, outputs, words, others):
    """Returns the mean logistic loss of a word's pairs, and gradients of the rows in them."""
    of_words, of_others = inputs[words], outputs[others]  # [n, width], [n, 1 + negatives, width]
    scores = xp.einsum("nw,nkw->nk", of_words, of_others)
    is_neighbour = xp.zeros(scores.shape, xp.float32)
    is_neighbour[:, 0] = 1
    signs = 1 - 2 * is_neighbour
    loss = xp.logaddexp(0, signs * scores).sum(axis=1).mean()

    of_scores = 1 / (1 + xp.exp(-scores)) - is_neighbour
    of_inputs = xp.einsum("nk,nkw->nw", of_scores, of_others)
    of_outputs = of_scores[:, :, None] * of_words[:, None, :]
    # Gradients of the sum over the batch: each pair counts as much as in a batch of one.
    return loss, [
        gpuopt.IndexedSlices(of_inputs, words),
        gpuopt.IndexedSlices(of_outputs.reshape(-1, WIDTH), others.ravel()),
    ]


def same_topic(inputs, words=200):
    """Returns how often the nearest one of the frequent words is of a word's topic."""
    vectors = inputs[:words] / xp.linalg.norm(inputs[:words], axis=1, keepdims=True)
    likeness = vectors @ vectors.T - 2 * xp.eye(words, dtype=xp.float32)
    return float((likeness.argmax(axis=1) % TOPICS == xp.arange(words) % TOPICS).mean())


def main(steps: int = 400) -> tuple[float, float]:
    """Trains, and returns the mean loss of the first ten batches and of the last ten."""
    rng = np.random.default_rng(0)
    paragraphs = text(rng)
    inputs = xp.asarray(rng.uniform(-0.5, 0.5, (WORDS, WIDTH)), xp.float32)
    outputs = xp.zeros((WORDS, WIDTH), xp.float32)
    optimizer = gpuopt.AdagradOptimizer(learning_rate=0.1)
    losses = []
    for step in range(steps):
        words, others = samples(rng, paragraphs)
        loss, gradients = loss_and_gradients(inputs, outputs, words, others)
        optimizer.update([inputs, outputs], gradients)
        losses.append(loss)
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.3f}")

    before, after = (float(sum(part)) / len(part) for part in (losses[:10], losses[-10:]))
    print(f"loss {after:.3f}; the nearest word is of the same topic for {same_topic(inputs):.1%}")
    return before, after


if __name__ == "__main__":
    main()
