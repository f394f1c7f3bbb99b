"""The tasks of `gpuopt bench` under pytest-benchmark, for a baseline of one's own machine.

pytest bench --benchmark-autosave
pytest bench --benchmark-compare --benchmark-compare-fail=median:10%
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuopt.backends.cuda.availability import why_no_gpu
from gpuopt.bench.contenders import as_contender, compiled_as_now
from gpuopt.bench.measure import Bench, prepare
from gpuopt.bench.peers import PEERS
from gpuopt.bench.workloads import Task, Workload, list_tasks, make_contenders, why_not
from gpuopt.device import Device

_TASKS = list(list_tasks())
_ROUNDS, _WARM_UP_ROUNDS = 30, 3


@pytest.fixture(scope="module")
def where() -> Bench:
    return prepare(Device.cpu if why_no_gpu() else Device.parse("gpu:0"))


@pytest.fixture(scope="module", params=_TASKS, ids=[task.name for task in _TASKS])
def made(request: pytest.FixtureRequest, where: Bench) -> Iterator[Workload]:
    """All contenders of a task, which are freed before those of the next one are made."""
    task: Task = request.param
    if (reason := why_not(task, "adam", "float32", where.count_free_bytes())) is not None:
        pytest.skip(reason)
    with compiled_as_now():
        yield make_contenders(task, "adam", "float32", where.place)


@pytest.mark.parametrize("contender", [peer.name for peer in PEERS])
def test_step(
    benchmark: Any, request: pytest.FixtureRequest, where: Bench, made: Workload, contender: str
) -> None:
    if contender not in made.contenders:
        pytest.skip(made.left_out.get(contender, "it has no part in this task"))
    chosen = as_contender(made.contenders[contender])

    def set_up() -> None:
        chosen.prepare()

    def step() -> None:
        chosen.step_to_its_end()
        where.clock.synchronize()

    benchmark.group = request.node.callspec.params["made"].name
    benchmark.extra_info["bytes_moved"] = made.bytes_moved
    benchmark.pedantic(step, setup=set_up, rounds=_ROUNDS, warmup_rounds=_WARM_UP_ROUNDS)
