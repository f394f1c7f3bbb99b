"""The kernel that evaluates schedules."""

from __future__ import annotations

from functools import cache

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.kernels.common import INT64
from gpuopt.backends.cuda.parameters import CPP_TYPES, Pointer
from gpuopt.rules.schedule_formulas import FORMULAS, constants_of, functor_of, piecewise_constant


@cache
def evaluate_schedule(real: str) -> Kernel:
    return Kernel(
        "evaluate_schedule",
        {
            "form": Pointer("float64"),
            "step": Pointer("int64"),
            "count": INT64,
            "values": Pointer(real),
        },
        (CPP_TYPES[real],),
        constants=_of_formulas(),
    )


def _of_formulas() -> dict[str, int]:
    """The kinds of schedules, and the places of their constants."""
    values = {}
    for kind, formula in enumerate(FORMULAS):
        functor = functor_of(formula)
        values[f"gpuopt::schedule_kind<{functor}>"] = kind
        for place, name in enumerate(constants_of(formula)):
            if formula is not piecewise_constant:
                values[f"{functor}::{name}"] = place
    return values
