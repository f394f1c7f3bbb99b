"""Finds the demo's learning rates, and writes them into `data/learning_rates.toml`.

    python -m gpuopt.demo.tune [optimizer ...]

By default all optimizers are tuned. A rate is judged by how many of the training images are read
correctly after the demo's steps, in float32, by a model that was trained without them: they are cut
into five folds, each of which is left out once. The test images are not looked at. Rates are 1, 2
and 5 times a power of ten. All are tried with one fold left out, and those that come near the best
with each. Of rates that are as good as the best, the smallest is taken, as it is the furthest from
those that diverge. An optimizer takes one or two minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from gpuopt.demo.digits import Digits, load_digits
from gpuopt.demo.settings import NAMES, RATES_FILE, TUNED
from gpuopt.demo.train import DEFAULT_STEPS, train
from gpuopt.device import Device

NUM_FOLDS = 5
# Accuracies further below the best one are no accident of one fold; of five folds.
NEAR_ON_ONE_FOLD = 0.02
NEAR_ON_ALL_FOLDS = 0.003
RATES = [float(f"{digit}e{power}") for power in range(-4, 3) for digit in (1, 2, 5)]


def main(arguments: Sequence[str]) -> int:
    """Tunes the named optimizers; returns the exit status."""
    wanted = arguments or NAMES
    if unknown := [name for name in wanted if name not in NAMES]:
        print(f"{', '.join(unknown)}: not among {', '.join(NAMES)}", file=sys.stderr)
        return 2
    found = dict(TUNED)
    for name in wanted:
        found[name] = tuned_rate(name)
        print(f"{name}: {found[name]:g}", flush=True)
    lines = [f"{name} = {rate}\n" for name, rate in sorted(found.items()) if name in NAMES]
    comment = "# The demo's learning rates, written by `python -m gpuopt.demo.tune`.\n"
    Path(str(RATES_FILE)).write_text(comment + "".join(lines))
    return 0


def tuned_rate(name: str, rates: Sequence[float] = RATES, steps: int = DEFAULT_STEPS) -> float:
    """Returns the smallest rate that is as good as the best one, over all folds.

    Args:
        name: One of `NAMES`.
        rates: What to try.
        steps: How many batches to train on.
    """
    first = {rate: accuracy(name, rate, steps, folds=[0]) for rate in rates}
    means = {
        rate: accuracy(name, rate, steps, folds=range(NUM_FOLDS))
        for rate in _near_best(first, NEAR_ON_ONE_FOLD)
    }
    for rate, mean in means.items():
        print(f"    {name} at {rate:g}: {mean:.2%}", flush=True)
    return min(_near_best(means, NEAR_ON_ALL_FOLDS))


def _near_best(accuracies: Mapping[float, float], within: float) -> list[float]:
    best = max(accuracies.values())
    return [rate for rate, share in accuracies.items() if share >= best - within]


def accuracy(name: str, rate: float, steps: int, folds: Iterable[int]) -> float:
    """Returns the share of images read correctly by models that were trained without their fold."""
    images, labels = load_digits()[0]
    fold_of = np.arange(len(labels)) % NUM_FOLDS
    shares = []
    for fold in folds:
        kept, left_out = (
            Digits(images[chosen], labels[chosen]) for chosen in (fold_of != fold, fold_of == fold)
        )
        with np.errstate(all="ignore"):  # a rate that is too large
            result = train(
                name,
                device=Device.cpu,
                dtype=np.dtype(np.float32),
                steps=steps,
                learning_rate=rate,
                digits=(kept, left_out),
            )
        shares.append(result.accuracies[-1][2])
    return fmean(shares)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
