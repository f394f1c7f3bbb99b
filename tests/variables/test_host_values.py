"""Whatever is written to a variable may be in host memory, wherever the variable is."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable

ROW = np.array([3, 1, 2], np.float32)
ALL = np.arange(12, dtype=np.float32).reshape(4, 3) / 4 + 1
MASK = np.array([[True, False, True]] * 4)

OPERANDS = {
    "a row": ROW,
    "a list": [1, 2, 3],
    "a tuple": (1, 2, 3),
    "a range": range(1, 4),
    "a buffer": array("f", [1, 2, 3]),
}

WAYS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda v: v.__setitem__(0, ROW),
    "all": lambda v: v.__setitem__(slice(None), ALL),
    "a list": lambda v: v.__setitem__(0, [1, 2, 3]),
    "a tuple": lambda v: v.__setitem__(0, (1, 2, 3)),
    "a range": lambda v: v.__setitem__(0, range(3)),
    "a buffer": lambda v: v.__setitem__(0, array("f", [1, 2, 3])),
    "a view of memory": lambda v: v.__setitem__(0, memoryview(ROW)),
    "lists": lambda v: v.__setitem__(slice(1, 3), [[1.5, 2, 3], [4, 5, 6]]),
    "integers": lambda v: v.__setitem__(1, np.array([1, 2, 3])),
    "float64": lambda v: v.__setitem__((2, slice(None)), np.array([1 / 3, 2, 3])),
    "rows": lambda v: v.__setitem__([0, 1], np.ones((2, 3), np.float32)),
    "a variable in host memory": lambda v: v.__setitem__(0, Variable(ROW)),
    "an array of no dimensions": lambda v: v.__setitem__(..., np.array(2.0)),
    "numpy.copyto": lambda v: np.copyto(v, ALL),
    "numpy.copyto by names": lambda v: np.copyto(dst=v, src=ALL),
    "numpy.put by names": lambda v: np.put(a=v, ind=np.array([0, 5]), v=np.array([7.0, 8.0])),
    "numpy.copyto of a row": lambda v: np.copyto(v, ROW),
    "numpy.copyto of a list": lambda v: np.copyto(v, [1, 2, 3]),
    "numpy.copyto where": lambda v: np.copyto(v, ALL, where=MASK),
    "numpy.putmask": lambda v: np.putmask(v, MASK, ALL),
    "numpy.add": lambda v: np.add(ALL, ROW, out=v),
    "numpy.multiply": lambda v: np.multiply(v, ROW, out=v),
    "numpy.concatenate": lambda v: np.concatenate([ALL[:1], ALL[1:]], out=v),
    **{
        name: lambda v, name=name: getattr(operator, name)(v, ALL)
        for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod")
    },
    **{
        f"iadd {form}": lambda v, value=value: operator.iadd(v, value)
        for form, value in OPERANDS.items()
    },
    "imatmul": lambda v: operator.imatmul(v, np.eye(3, k=1, dtype=np.float32)),
    "iadd of a variable": lambda v: operator.iadd(v, Variable(ROW)),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "a row of another length": lambda v: v.__setitem__(0, np.ones(4, np.float32)),
    "text": lambda v: v.__setitem__(0, ["a", "b", "c"]),
    "lists of several lengths": lambda v: v.__setitem__(0, [[1], [1, 2], [3]]),
    "a sum of another shape": lambda v: operator.iadd(v, np.ones(5, np.float32)),
    "a sum with nothing": lambda v: operator.iadd(v, None),
    "a sum with text": lambda v: operator.iadd(v, ["a", "b", "c"]),
    "a complex sum": lambda v: operator.iadd(v, np.ones(3, complex)),
    "a copy of another shape": lambda v: np.copyto(v, np.ones(5, np.float32)),
    "a complex copy": lambda v: np.copyto(v, np.ones(3, complex)),
}


@pytest.fixture(
    params=[
        pytest.param("emulated", marks=pytest.mark.emulator),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def gpu(request: pytest.FixtureRequest) -> str:
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpus")
    return "gpu:0"


def written(device: str, write: Callable[[Any], Any]) -> np.ndarray:
    variable = Variable(ALL, device=device)
    write(variable)
    return variable.numpy()


def test_values_in_host_memory_are_written_on_every_device(
    gpu: str, subtests: pytest.Subtests
) -> None:
    for name, way in WAYS.items():
        with subtests.test(name):
            np.testing.assert_array_equal(written(gpu, way), written("cpu", way))


def test_what_the_host_refuses_is_refused_by_gpus(gpu: str, subtests: pytest.Subtests) -> None:
    for name, way in REFUSED.items():
        raised = []
        for device in ("cpu", gpu):
            variable = Variable(ALL, device=device)
            with subtests.test(name), pytest.raises((TypeError, ValueError)) as error:
                way(variable)
            np.testing.assert_array_equal(variable.numpy(), ALL)
            raised.append(TypeError if isinstance(error.value, TypeError) else ValueError)
        assert raised[0] is raised[1], name


def test_items_of_slots_and_averages_are_written(gpu: str) -> None:
    variable = Variable(ALL, device=gpu)
    averages = gpuopt.ExponentialMovingAverage(0.5)
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(ALL, variable)])
    averages.apply([variable])
    for each in (optimizer.get_slot(variable, "momentum"), averages.average(variable)):
        each[0] = [7, 8, 9]
        each[1:3] = ALL[1:3]
        each += ROW
        np.testing.assert_array_equal(each.numpy()[0], [10, 9, 11])
        np.testing.assert_array_equal(each.numpy()[1:3], ALL[1:3] + ROW)
