"""A transformer that learns to reverse digits; gpuopt differentiates its loss."""

from __future__ import annotations

import numpy as np

import gpuopt

try:
    import cupy

    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np

DIGITS = 6  # of a number
TOKENS = 11  # ten digits, and a sign after which the number comes in reverse
LENGTH = 2 * DIGITS
WIDTH, HEADS, LAYERS = 32, 4, 2
BATCH = 64


class Transformer:
    """Predicts the next token at each place from the tokens up to it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.tokens = self.weights("tokens", TOKENS, WIDTH)
        self.places = self.weights("places", LENGTH, WIDTH)
        self.layers = [
            {
                "attention": self.weights(f"layer_{number}/attention", WIDTH, 3 * WIDTH),
                "mix": self.weights(f"layer_{number}/mix", WIDTH, WIDTH),
                "in": self.weights(f"layer_{number}/in", WIDTH, 4 * WIDTH),
                "out": self.weights(f"layer_{number}/out", 4 * WIDTH, WIDTH),
                "norm_1": self.ones(f"layer_{number}/norm_1"),
                "norm_2": self.ones(f"layer_{number}/norm_2"),
            }
            for number in range(LAYERS)
        ]
        self.norm = self.ones("norm")
        # Added to the scores, so that no place attends to a later one.
        self.mask = xp.triu(xp.full((LENGTH, LENGTH), -1e9, xp.float32), 1)

    def weights(self, name, rows, columns):
        value = self.rng.standard_normal((rows, columns)) / np.sqrt(rows)
        return gpuopt.Variable(xp.asarray(value, xp.float32), name=name)

    def ones(self, name):
        return gpuopt.Variable(xp.ones(WIDTH, xp.float32), name=name)

    def logarithms(self, tokens):
        """Returns [batch, LENGTH, TOKENS]: the log probabilities of the next token."""
        x = self.tokens[tokens] + self.places
        for layer in self.layers:
            x = x + self.attend(layer, normalized(x) * layer["norm_1"])
            x = x + np.maximum(normalized(x) * layer["norm_2"] @ layer["in"], 0) @ layer["out"]
        scores = normalized(x) * self.norm @ np.transpose(self.tokens)
        shifted = scores - np.max(scores, axis=-1, keepdims=True)
        return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))

    def attend(self, layer, x):
        batch = x.shape[0]
        parts = np.reshape(x @ layer["attention"], (batch, LENGTH, 3, HEADS, WIDTH // HEADS))
        queries, keys, values = np.transpose(parts, (2, 0, 3, 1, 4))
        scores = queries @ np.swapaxes(keys, 2, 3) / np.sqrt(WIDTH // HEADS) + self.mask
        powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        heads = powers / np.sum(powers, axis=-1, keepdims=True) @ values
        together = np.reshape(np.transpose(heads, (0, 2, 1, 3)), (batch, LENGTH, WIDTH))
        return together @ layer["mix"]


def normalized(x):
    """Returns x with a mean of 0 and a variance of 1 at each place."""
    x = x - np.mean(x, axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def batch_of(rng):
    """Returns inputs and targets [BATCH, LENGTH]: 4 0 7 = 7 0 and 0 7 = 7 0 4."""
    digits = rng.integers(10, size=(BATCH, DIGITS))
    sign = np.full((BATCH, 1), 10)
    line = np.concatenate([digits, sign, digits[:, ::-1]], axis=1)
    return xp.asarray(line[:, :-1]), xp.asarray(line[:, 1:])


def main(steps: int = 200) -> tuple[float, float]:
    """Trains, and returns the first loss and the last one, of the reversed digits."""
    rng = np.random.default_rng(0)
    model = Transformer(rng)
    global_step = gpuopt.Variable(0, name="global_step", trainable=False)
    optimizer = gpuopt.TorchAdamWOptimizer(
        gpuopt.one_cycle(0.01, global_step, total_steps=steps),
        groups=[gpuopt.ParameterGroup("norm", weight_decay=0)],
    )
    one_hot = xp.eye(TOKENS, dtype=xp.float32)

    def loss():
        # The first digits are random: those after the sign count.
        logarithms = model.logarithms(inputs)[:, DIGITS:]
        return -np.mean(np.sum(logarithms * one_hot[targets[:, DIGITS:]], axis=-1))

    losses = []
    for step in range(steps):
        inputs, targets = batch_of(rng)
        value, gradients = gpuopt.value_and_gradients(loss)
        optimizer.apply_gradients(gradients, global_step)
        losses.append(value)
        if step % 25 == 0:
            print(f"step {step}: loss {float(value):.3f}")

    inputs, targets = batch_of(rng)
    guesses = model.logarithms(inputs)[:, DIGITS:].argmax(axis=-1)
    right = (guesses == targets[:, DIGITS:]).all(axis=1)
    print(f"loss {float(losses[-1]):.3f}; {float(right.mean()):.0%} of new numbers are reversed")
    return float(losses[0]), float(losses[-1])


if __name__ == "__main__":
    main()
