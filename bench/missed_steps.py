"""Rows that catch up by sums, and step by step: how long both take, by how many steps they missed.

They take 2 GB of memory and a core. `bench.pages` writes the table of the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from bench.harness import Offer
from bench.targets import Target
from gpuopt.backends import Target as Arrays
from gpuopt.backends import backend_for
from gpuopt.bench.workloads import Workload
from gpuopt.device import Device

STEPPING = "stepping"
# The closed form stays if stepping takes more than so many times as long, at this many steps.
MOST, GAP_OF_RULE = 3, 1_000
GAPS = (10, GAP_OF_RULE, 100_000)
SIZES = ((1_000_000, 64), (10_000_000, 16))
# AddSign's slot is a momentum, which decays in rows without a gradient.
RULES = {"Adam": "adam", "momentum": "add_sign"}
_NUMBERS = {"epsilon": 1e-8, "beta1": 0.9, "beta2": 0.999, "beta": 0.9}
_RATE = 0.001


def name_run(rule: str, height: int, width: int, gap: int) -> str:
    """Returns the name of a run in a file of results."""
    return f"missed_{rule.lower()}_{height}x{width}_{gap}"


def _offer() -> Iterator[Offer]:
    for rule in RULES:
        for height, width in SIZES:
            for gap in GAPS:
                name = name_run(rule, height, width, gap)
                targets = []
                if rule == "Adam" and gap == GAP_OF_RULE:
                    targets = [Target(name, "ratio", STEPPING, at_most=1 / MOST)]
                make = partial(_make, rule, height, width, gap)
                yield Offer(name, make, targets, is_slow=True)


def _make(name: str, height: int, width: int, gap: int) -> Workload:
    """Brings all rows of a table up to date, each of which has missed as many steps."""
    # Here, as other commits, for which the workloads are listed, may have these elsewhere.
    from gpuopt.backends.backend import SparseUpdate
    from gpuopt.backends.catch_up import CatchUp
    from gpuopt.rules.catch_up import Factors

    class Roomy(Factors):
        """Has room for all steps: usually, rows are brought up to date every 16,384 steps."""

        room = GAPS[-1]

        def room_for(self, height: int) -> int:
            return self.room

    rule = getattr(import_module(f"gpuopt.optimizers.{RULES[name]}"), RULES[name])
    scalars = {each: np.float32(_NUMBERS.get(each, _RATE)) for each in rule.scalars}
    rng = np.random.default_rng(1)
    some = rng.normal(scale=0.01, size=(1_000, width)).astype(np.float32)
    starts = {"v": np.square(some)}
    arrays = [np.empty((height, width), np.float32) for _ in ("var", *rule.slots)]
    backend = backend_for(Device.cpu)
    plan: Any = backend.plan_dense([Arrays(arrays[0], arrays[1:])])
    empty = np.empty((0, width), np.float32), np.empty(0, np.int64)
    counts = {}
    for contender, stepping in (("gpuopt", False), (STEPPING, True)):
        factors = Roomy(rule, rule.own(scalars), np.float32, stepping=stepping)
        count = CatchUp(rule, factors, np.zeros(height, np.int32), partial(np.zeros, dtype="f4"))
        for _ in range(gap):
            update = SparseUpdate(plan, *empty, 0, count)
            backend.apply_sparse(rule, [update], [scalars], other_rows=None)
        counts[contender] = count

    def fall_behind() -> None:
        for array, slot in zip(arrays, ("var", *rule.slots), strict=True):
            array.reshape(-1, *some.shape)[...] = starts.get(slot, some)
        for count in counts.values():
            count.last[...] = 0

    fall_behind()
    contenders: dict[str, Callable[[], object]] = {
        each: partial(backend.bring_up_rows, plan, count) for each, count in counts.items()
    }
    return Workload(
        f"{name}, {height:,} x {width}, all rows brought up to date after {gap:,} missed steps",
        contenders,
        2 * len(arrays) * arrays[0].nbytes,
        settle=fall_behind,
    )


OFFERS = (*_offer(),)
