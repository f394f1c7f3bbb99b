"""A rule with more slots than any of ours has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpuopt


@gpuopt.update_rule(
    cuda=gpuopt.CudaSource(Path(__file__).parent, "four_slots.cuh", "tests::FourSlots")
)
def four_slots(
    var: Any, grad: Any, first: Any, second: Any, third: Any, fourth: Any, *, step_size: Any
) -> None:
    for place, slot in enumerate((first, second, third, fourth)):
        slot += (grad - slot) / (place + 2)
    var -= step_size * (first + second + third + fourth)
