"""Times workloads of this checkout's `bench` with the gpuopt of another checkout, its argument.

It reads a command of `bench.against_commit` from each line of its input, and answers with a line of
JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
# Later steps compile and allocate nothing.
_WARM_UP_STEPS = 8


def main() -> None:
    _find_gpuopt(sys.argv[1])
    timed: _Timed | None = None
    for line in sys.stdin:
        command, argument = json.loads(line)
        answer: Any = None
        if command == "make":
            timed = None
            try:
                timed = _Timed(argument)
                answer = {"description": timed.description, "error": None}
            except (AttributeError, ImportError, TypeError, ValueError) as error:
                answer = {"error": str(error)}
        else:
            assert timed is not None
            answer = timed.time_block_ms(argument)
        print(json.dumps(answer), flush=True)


class _Timed:
    """gpuopt's step of a workload."""

    def __init__(self, name: str) -> None:
        from bench.workloads import offer_host_workloads
        from gpuopt.bench.contenders import as_contender
        from gpuopt.bench.sampling import rest

        [offer] = offer_host_workloads(name)
        workload = offer.make()
        self.description = workload.description
        self._ours = as_contender(workload.contenders["gpuopt"])
        # `rest` waits for other libraries' threads, and there are none here.
        self._settle = (lambda: None) if workload.settle is rest else workload.settle
        for _ in range(_WARM_UP_STEPS):
            self._time_step_ms()

    def time_block_ms(self, block_ms: float) -> float:
        """Returns the mean time of the steps of a block, in milliseconds; settling is not timed."""
        self._time_step_ms()  # the other worker's block has evicted this one's data from the caches
        total_ms, steps = 0.0, 0
        while total_ms < block_ms:
            total_ms += self._time_step_ms()
            steps += 1
        return total_ms / steps

    def _time_step_ms(self) -> float:
        self._ours.prepare()
        started = perf_counter()
        self._ours.step()
        elapsed_ms = 1e3 * (perf_counter() - started)
        self._settle()
        return elapsed_ms


def _find_gpuopt(checkout: str) -> None:
    """Imports gpuopt from a checkout, except `gpuopt.bench`, which is this checkout's."""
    sys.path[0] = checkout
    import gpuopt

    sys.path[0] = str(_ROOT)
    place = _ROOT / "gpuopt" / "bench"
    spec = importlib.util.spec_from_file_location(
        "gpuopt.bench", place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["gpuopt.bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["gpuopt.bench"])
    # Until 3c94777f, gpuopt read the environment's variables at each step.
    vars(gpuopt).setdefault(
        "environment", SimpleNamespace(forget=lambda: None, settings=lambda: None)
    )


if __name__ == "__main__":
    main()
