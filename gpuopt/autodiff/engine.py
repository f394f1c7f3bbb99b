"""The protocol of engines, which differentiate losses for `compute_gradients`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from gpuopt.autodiff.array_modules import overlap
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

Loss: TypeAlias = Callable[[], Any]
Gradient: TypeAlias = Any | IndexedSlices | None
GradsAndVars: TypeAlias = list[tuple[Gradient, Variable]]
OnGradient: TypeAlias = Callable[[Any, Variable], None]


class Engine(Protocol):
    """Differentiates losses of one kind.

    Attributes:
        streams: Whether some gradients are final before others are computed, so that `on_grad`
            saves memory.
        without_variables: Why a loss may have no variables, as an error says it.
    """

    streams: bool
    without_variables: str

    def compute(
        self,
        loss_fn: Loss,
        var_list: Any = None,
        grad_loss: Any = None,
        on_grad: OnGradient | None = None,
    ) -> tuple[Any, GradsAndVars]:
        """Runs the loss once, and differentiates it.

        Args:
            loss_fn: Takes no arguments. If it returns an array, the sum is differentiated.
            var_list: Variables and arrays, in nested lists if need be; by default the trainable
                variables that the loss reads, in order of creation.
            grad_loss: What the gradients are multiplied by: a scalar, or of the loss's shape.
            on_grad: Called with each gradient and its variable as soon as the gradient is final,
                inside the backward pass; the engine then forgets the gradient, and returns None
                for it. It may write the variable: the other gradients stay what they would be.

        Returns:
            (the loss's value, pairs in the order of `var_list`). A gradient is None where the loss
            does not depend on the variable. Gradients may share memory: they are only to be read.
        """


class ReadRecorder:
    """Records which variables a loss reads; every read of a variable returns the same object.

    Attributes:
        leaves: (variable, the object that it is read as), by identity, in order of the first read.
        lookup: What `embedding_lookup` calls while this recorder is the innermost one.
    """

    def __init__(
        self,
        var_list: list[Variable] | None,
        make_leaf: Callable[[Variable], Any],
        make_constant: Callable[[Variable], Any],
        lookup: Callable[[Any, Any], Any],
        is_constant: Callable[[Variable], bool],
    ) -> None:
        """Starts without reads.

        Args:
            var_list: The variables to watch; None for all that are trainable.
            make_leaf: Makes the object that a watched variable is read as.
            make_constant: Makes the object that any other variable is read as.
            lookup: See above.
            is_constant: Returns whether a derivative may still read a variable's memory, because
                the loss used it as a constant.
        """
        self._wanted = None if var_list is None else {v.identity for v in var_list}
        self._make_leaf = make_leaf
        self._make_constant = make_constant
        self._is_constant = is_constant
        self.leaves: dict[Identity, tuple[Variable, Any]] = {}
        self._read: dict[Identity, Variable] = {}
        self.lookup = lookup

    def watches(self, variable: Variable) -> bool:
        if variable.dtype not in FLOAT_DTYPES:
            return False
        if self._wanted is None:
            return variable.trainable
        return variable.identity in self._wanted

    def read(self, variable: Variable) -> Any:
        found = self.leaves.get(variable.identity)
        if found is not None:
            return found[1]
        variable.follow_updates()
        self._read[variable.identity] = variable
        if not self.watches(variable):
            return self._make_constant(variable)
        leaf = self._make_leaf(variable)
        self.leaves[variable.identity] = variable, leaf
        return leaf

    def end(self) -> None:
        """Has next updates of what was read wait for the derivatives, which read it, too."""
        for variable in self._read.values():
            variable.note_reading()

    def before_write(self, variable: Variable) -> None:
        """Refuses a write that would change gradients of what the loss has read.

        Raises:
            RuntimeError: the loss has computed with the variable's present value.
        """
        leaves = (leaf.unread_storage for leaf, _ in self.leaves.values())
        if (
            variable.identity in self.leaves
            or any(overlap(leaf, variable.unread_storage) for leaf in leaves)
            or self._is_constant(variable)
        ):
            raise RuntimeError(
                f'"{variable.name}" would be written in a loss that has computed with its present '
                "value: gradients would see the new one. Write it before the loss reads it, or "
                "after the loss; or compute with a copy, its numpy()"
            )

    def variables(self) -> list[Variable]:
        """The watched variables that were read, in order of creation."""
        return sorted((variable for variable, _ in self.leaves.values()), key=Variable.serial)


def traced_variables(var_list: Any) -> list[Variable] | None:
    """Flattens a `var_list` for an engine that watches reads; None stays None.

    Raises:
        TypeError: the list holds something else than Variables. Reads of an array are not seen.
    """
    if var_list is None:
        return None
    variables = list(flatten(var_list))
    for variable in variables:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"var_list holds {type(variable).__name__}, not a Variable: only a Variable's use "
                "in a loss is seen. gpuopt.Variable(array, copy=False) shares an array's memory"
            )
    return variables


def checked_loss(loss: Any) -> Any:
    """Returns the value of a loss, if it is one number or array.

    Raises:
        TypeError: the loss returned None, or several values.
    """
    if hasattr(loss, "dtype") or isinstance(loss, float | int | complex):
        return loss
    if loss is None:
        raise TypeError("the loss returned None: it must return the value to differentiate")
    raise TypeError(
        f"the loss returned {type(loss).__name__}, not one number or array. Return the sum of its "
        "parts; keep what else is wanted in a variable outside"
    )


def flatten(var_list: Any) -> Iterator[Any]:
    """Walks nested lists and tuples of variables."""
    if isinstance(var_list, list | tuple):
        for element in var_list:
            yield from flatten(element)
    else:
        yield var_list
