"""A complex picture from the magnitudes of its diffraction patterns: complex parameters, by view.

A detector measures |F(mask * picture)| behind each of several masks, and no phase. The picture is
found by least squares of magnitudes ("amplitude flow": Wang, Giannakis & Eldar 2018).
"""

from __future__ import annotations

import numpy as np

import gpuopt

try:
    import cupy

    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np

SIZE = 64
MASKS = 10


def picture():
    """Returns [SIZE, SIZE], complex64: two discs that absorb, and a phase that waves."""
    y, x = xp.meshgrid(xp.linspace(-1, 1, SIZE), xp.linspace(-1, 1, SIZE), indexing="ij")
    magnitude = 1 - 0.5 * (xp.hypot(x - 0.3, y) < 0.4) - 0.3 * (xp.hypot(x + 0.4, y - 0.3) < 0.3)
    return (magnitude * xp.exp(1j * xp.sin(3 * x + 2 * y))).astype(xp.complex64)


def loss_and_gradient(guess, masks, measured):
    """Returns the square error of magnitudes behind a mask, and its gradient.

    The gradient is 2 dL / d conj(guess): its parts are the derivatives by the guess's parts.
    """
    waves = xp.fft.fft2(masks * guess, norm="ortho").astype(xp.complex64)
    magnitudes = xp.abs(waves)
    errors = magnitudes - measured
    loss = (errors**2).sum() / MASKS
    # With norm="ortho", the inverse transform is the adjoint.
    of_waves = 2 * errors * waves / xp.maximum(magnitudes, 1e-6)
    of_masked = xp.fft.ifft2(of_waves, norm="ortho").astype(xp.complex64)
    return loss, (xp.conj(masks) * of_masked).sum(axis=0) / np.float32(MASKS)


def distance(guess, truth):
    """Returns the relative error, less the one phase of all that no magnitude shows."""
    turn = xp.vdot(guess, truth)
    return float(xp.linalg.norm(guess * turn / xp.abs(turn) - truth) / xp.linalg.norm(truth))


def main(steps: int = 250) -> tuple[float, float]:
    """Searches for the picture, and returns the first loss and the last one."""
    rng = np.random.default_rng(0)
    truth = picture()
    masks = xp.asarray(rng.choice([1, -1, 1j, -1j], size=(MASKS, SIZE, SIZE)), xp.complex64)
    measured = xp.abs(xp.fft.fft2(masks * truth, norm="ortho")).astype(xp.float32)

    start = rng.standard_normal((SIZE, SIZE, 2)) @ [1, 1j]
    guess = xp.asarray(start, xp.complex64)
    # The same memory as pairs of real numbers: an optimizer trains real and imaginary parts.
    real = guess.view(xp.float32)
    optimizer = gpuopt.MomentumOptimizer(learning_rate=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss, gradient = loss_and_gradient(guess, masks, measured)
        optimizer.apply_gradients([(gradient.view(xp.float32), real)])
        losses.append(loss)
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.3f}, error {distance(guess, truth):.3f}")

    print(f"loss {float(losses[-1]):.3f}, error {distance(guess, truth):.3f}")
    return float(losses[0]), float(losses[-1])


if __name__ == "__main__":
    main()
