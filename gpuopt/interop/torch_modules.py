"""The parameters of torch modules as variables, on their own memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuopt.autodiff.torch_engine import gradient_array, to_array
from gpuopt.step.pairs import Gradient
from gpuopt.variables.variable import Variable


def variables_of_module(module: Any) -> dict[str, Variable]:
    """Makes a Variable of each parameter of a torch module, on the parameter's memory.

    An update of the variable is one of the parameter. Make them once, and again where the module
    gets other memory, as by `module.to(...)`.

    Args:
        module: With parameters in host memory or on GPUs; of the floating-point types, bfloat16
            too, and dense. A parameter that needs no gradient is left out.

    Returns:
        The variables by torch's names, which are their own names, too, as far as these are free.

    Raises:
        ValueError: a parameter overlaps itself, as one that was expanded.
        TypeError: a parameter is of another type.
    """
    return {
        name: Variable(to_array(parameter), copy=False, name=name)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def gradients_of_module(
    module: Any, variables: Mapping[str, Variable]
) -> list[tuple[Gradient | None, Variable]]:
    """Lists the gradients that torch's `backward` has left in a module's parameters.

    Args:
        module: With the parameters.
        variables: What `variables_of_module` returned for it, or some of them.

    Returns:
        Pairs for `apply_gradients`: the arrays share the memory of `parameter.grad`, or it is None.
        A sparse gradient is IndexedSlices.

    Raises:
        KeyError: the module has no parameter of a variable's name.
    """
    parameters = dict(module.named_parameters())
    return [
        (gradient_array(parameters[name].grad, variable), variable)
        for name, variable in variables.items()
    ]
