"""Derivatives of numpy's functions, by every argument and with every argument, on every array type.

The reference is a central difference along a random direction.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import autograd.core
import autograd.numpy as anp
import derivative_cases
import fake_cupy
import numpy as np
import pytest
from derivative_cases import CASES, REFUSED, REFUSED_OF_UFUNCS, By, Call

from gpuopt import Device, Variable
from gpuopt.autodiff import autograd_engine, tracing
from gpuopt.autodiff.autograd_engine import AutogradEngine
from gpuopt.autodiff.derivatives import registry

Put = Callable[[Any], Any]


def find(name: str) -> Any:
    if name in ("full", "full_like"):  # numpy's own do not ask the value how to be called
        return getattr(anp, name)
    return functools.reduce(getattr, name.split("."), np)


def functions_of_numpy() -> set[str]:
    """The names of all functions of numpy that have a derivative."""
    functions = [*autograd.core.primitive_vjps, *registry._derivatives, *registry._compositions]
    names = {registry.name_of(function) for function in functions}
    return {name.removeprefix("numpy.") for name in names if name.startswith("numpy.")}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(function, "fun", function)).parameters)


def named_arguments(name: str, call: Call) -> set[str]:
    """The parameters that a call gives something to."""
    names = list(parameters(find(name)))
    taken = set(names[: len(call.args)]) | set(call.options)
    variable = [n for n, p in parameters(find(name)).items() if p.kind is p.VAR_POSITIONAL]
    return taken | set(variable if len(call.args) > 1 else ())


def has_any_options(name: str) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters(find(name)).values())


def is_ufunc(name: str) -> bool:
    return isinstance(find(name), np.ufunc)


ALL_CASES = [
    pytest.param(name, call, id=f"{name}-{number}")
    for name, calls in CASES.items()
    for number, call in enumerate(calls)
]


# The audit


def test_every_function_with_a_derivative_is_checked() -> None:
    assert functions_of_numpy() == set(CASES)


@pytest.mark.contract
def test_every_argument_is_honoured_or_refused(subtests: pytest.Subtests) -> None:
    for name in CASES:
        with subtests.test(name):
            honoured = set().union(*(named_arguments(name, call) for call in CASES[name]))
            refused = set(REFUSED.get(name, ())) | set(REFUSED_OF_UFUNCS if is_ufunc(name) else ())
            listed = honoured | refused
            keywords = [n for n, p in parameters(find(name)).items() if p.kind is p.VAR_KEYWORD]
            assert set(parameters(find(name))) - listed - set(keywords) == set()


@pytest.mark.contract
def test_cupy_has_no_other_arguments(subtests: pytest.Subtests) -> None:
    """What cupy's function takes reaches it through numpy's, which knows the names."""
    cupy = fake_cupy._cupy()
    if cupy is None:
        pytest.skip("needs CuPy, as a package alone")
    for name in CASES:
        with subtests.test(name):
            try:
                function = functools.reduce(getattr, name.split("."), cupy)
                in_cupy = list(parameters(function).values())
            except (AttributeError, ValueError):  # cupy has no such function, or it is a ufunc
                continue
            options = {p.name for p in in_cupy if p.default is not p.empty}
            assert options <= set(parameters(find(name)))


REFUSALS = [
    (name, argument, value)
    for name in CASES
    for argument, value in {
        **(REFUSED_OF_UFUNCS if is_ufunc(name) else {}),
        **REFUSED.get(name, {}),
    }.items()
    if argument in parameters(find(name)) or has_any_options(name)
]


@pytest.mark.contract
def test_what_is_not_honoured_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for name, argument, value in REFUSALS:
        with subtests.test(f"{name}-{argument}"):
            problem = Problem(name, CASES[name][0])
            call = Call(problem.call.args, {**problem.call.options, argument: value})
            if name == "linalg.svd":
                call = Call((derivative_cases.real(3, 2),), {argument: value})
            with pytest.raises(NotImplementedError) as raised:
                Problem(name, call).gradients()
            assert f"numpy.{name} " in str(raised.value)
            assert argument in str(raised.value)
            assert ";" in str(raised.value)  # what to do instead


@pytest.mark.parametrize(
    ("expression", "function", "argument"),
    [
        (lambda x: np.sum(x, initial=x[0]), "sum", "initial"),
        (lambda x: np.max(x, initial=x[0]), "max", "initial"),
        (lambda x: np.var(x, mean=x[:1]), "var", "mean"),
        (lambda x: np.clip(np.ones(3), x, None), "clip", "a_min"),
        (lambda x: np.clip(x, max=x), "clip", "max"),
        (lambda x: np.diff(np.ones(3), prepend=x), "diff", "prepend"),
        (lambda x: np.pad(x, 1, constant_values=x[0]), "pad", "constant_values"),
    ],
)
def test_an_argument_without_a_derivative_is_refused_by_name(
    expression: Any, function: str, argument: str
) -> None:
    x = Variable([1.0, 2.0, 3.0])
    with pytest.raises(NotImplementedError, match=f"numpy.{function} .*{argument}"):
        AutogradEngine().compute(lambda: np.sum(expression(x.value())))


# The values


class Problem:
    """A call as a function of the arrays in it, with a weighted sum of its results as a loss."""

    def __init__(self, name: str, call: Call, put: Put = lambda array: array) -> None:
        self.function = find(name)
        self.call = call
        self.put = put
        self.values = [by.value for by in found_in([*call.args, *call.options.values()])]
        rng = np.random.default_rng(1)
        self.directions = [rng.normal(size=value.shape) for value in self.values]
        if call.symmetric:
            self.directions = [d + np.swapaxes(d, -1, -2) for d in self.directions]

    def result(self, arrays: list[Any]) -> Any:
        remaining = iter(arrays)

        def filled(argument: Any) -> Any:
            if isinstance(argument, By):
                return next(remaining)
            if isinstance(argument, list | tuple):
                return type(argument)(map(filled, argument))
            return self.put(argument) if isinstance(argument, np.ndarray) else argument

        args = filled(self.call.args)
        options = {name: filled(value) for name, value in self.call.options.items()}
        return self.call.then(self.function(*args, **options))

    def loss(self, arrays: list[Any]) -> Any:
        rng = np.random.default_rng(2)
        total: Any = 0.0
        for part in parts_of(self.result(arrays)):
            weights, turned = (self.put(rng.normal(size=np.shape(part))) for _ in range(2))
            total = total + np.sum(np.real(part) * weights)
            if np.iscomplexobj(part):
                total = total + np.sum(np.imag(part) * turned)
        return total

    def variables(self) -> list[Variable]:
        # Strides matter for order="K".
        variables = [Variable(value.copy("K"), copy=False) for value in self.values]
        for variable, value in zip(variables, self.values, strict=True):
            array = self.put(value)
            if type(array) is not np.ndarray:
                variable._array, variable.device = array, Device("gpu")
        return variables

    def gradients(self, variables: list[Variable] | None = None) -> list[Any]:
        variables = self.variables() if variables is None else variables
        _, pairs = AutogradEngine().compute(
            lambda: self.loss([variable.value() for variable in variables]), variables
        )
        return [gradient for gradient, _ in pairs]

    def along(self, gradients: list[Any]) -> Any:
        """The derivative in the direction."""
        return sum(
            (np.sum(g * self.put(d)) for g, d in zip(gradients, self.directions, strict=True)), 0.0
        )

    def difference(self, function: Callable[[list[np.ndarray]], Any]) -> float:
        """Differentiates numerically in the direction, to the fourth order."""
        step = 1e-3

        def at(steps: int) -> float:
            pairs = zip(self.values, self.directions, strict=True)
            return float(function([like(v, v + steps * step * d) for v, d in pairs]))

        return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def like(array: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Gives values the strides of an array."""
    copy = np.empty_like(array)
    copy[...] = values
    return copy


def found_in(arguments: Any) -> list[By]:
    if isinstance(arguments, By):
        return [arguments]
    if isinstance(arguments, list | tuple):
        return [by for argument in arguments for by in found_in(argument)]
    return []


def parts_of(result: Any) -> list[Any]:
    is_sequence = isinstance(result, list | tuple) or type(result).__name__ == "SequenceBox"
    return [part for each in result for part in parts_of(each)] if is_sequence else [result]


@pytest.mark.parametrize(("name", "call"), ALL_CASES)
@pytest.mark.one_in(3, call=type)
def test_gradient_agrees_with_finite_differences(name: str, call: Call) -> None:
    problem = Problem(name, call)
    gradients = problem.gradients()
    for gradient, value in zip(gradients, problem.values, strict=True):
        assert gradient.shape == value.shape
    expected = problem.difference(problem.loss)
    assert float(problem.along(gradients)) == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("name", "call"), [case for case in ALL_CASES if case.values[1].order > 1])
@pytest.mark.one_in(3, call=type)
def test_gradient_of_a_gradient_agrees_with_finite_differences(name: str, call: Call) -> None:
    problem = Problem(name, call)
    variables = problem.variables()
    _, pairs = AutogradEngine().compute(
        lambda: problem.along(problem.gradients(variables)), variables
    )
    gradients = [0.0 if gradient is None else gradient for gradient, _ in pairs]

    def slope(values: list[np.ndarray]) -> Any:
        moved = Problem(name, call)
        moved.values = values
        return moved.along(moved.gradients())

    expected = problem.difference(slope)
    assert float(problem.along(gradients)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def to_device(array: Any) -> Any:
    return fake_cupy.asarray(array) if isinstance(array, np.ndarray) else array


@pytest.mark.parametrize(("name", "call"), ALL_CASES)
@pytest.mark.one_in(12, call=type)
def test_gradient_of_a_devices_arrays_is_the_same(name: str, call: Call) -> None:
    tracing.add_array_type(fake_cupy.ndarray, fake_cupy)
    problem = Problem(name, call, to_device)
    try:
        problem.loss([to_device(value) for value in problem.values])
    except TypeError:  # CuPy itself has no such function, or does not take these arguments
        return
    gradients = [fake_cupy.asnumpy(gradient) for gradient in problem.gradients()]
    for gradient, expected in zip(gradients, Problem(name, call).gradients(), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "call"), ALL_CASES)
@pytest.mark.one_in(12, call=type)
def test_gradient_stays_in_float32(name: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(argument is np.float64 for argument in [*call.args, *call.options.values()]):
        return

    def to_float32(array: Any) -> Any:
        is_float64 = isinstance(array, np.ndarray) and array.dtype == np.float64
        return array.astype(np.float32) if is_float64 else array

    arrived = []
    of_variable = autograd_engine._of_variable

    def seen(gradient: Any, variable: Variable) -> Any:
        arrived.append(gradient.dtype)
        return of_variable(gradient, variable)

    monkeypatch.setattr(autograd_engine, "_of_variable", seen)
    problem = Problem(name, call, to_float32)
    problem.values = [value.astype(np.float32) for value in problem.values]
    gradients = problem.gradients()
    assert set(arrived) == {np.dtype(np.float32)}
    for gradient, expected in zip(gradients, Problem(name, call).gradients(), strict=True):
        scale = np.abs(expected).max(initial=1e-30)
        assert np.abs(gradient - expected).max(initial=0) <= 1e-4 * scale
