"""OptimizerWrapper: an optimizer around another one, whose state it shows as its own."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, TypeVar

from gpuopt.optimizer import Optimizer
from gpuopt.optimizers.base.arguments import refuse_unknown_arguments
from gpuopt.optimizers.base.hyperparameters import Hyperparameters
from gpuopt.state.copies import Changes, make_again
from gpuopt.state.state_dict import OptimizerState
from gpuopt.step.pairs import Gradient
from gpuopt.step.report import Report
from gpuopt.step.wide_gradients import GradientTypes
from gpuopt.variables.variable import Variable

Self = TypeVar("Self", bound="OptimizerWrapper")


class OptimizerWrapper(Optimizer):
    """Base of optimizers that bring gradients together and leave the update to `_inner`.

    Attributes:
        is_for_workers: Whether the optimizer decides when workers go on, or whose gradients count.
    """

    _unlisted = frozenset(["is_for_workers"])
    is_for_workers: ClassVar[bool] = False

    @property
    def _inner(self) -> Optimizer:
        raise NotImplementedError

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        refuse_unknown_arguments(cls, kwargs)
        # Not the arguments, which would keep variables alive.
        return object.__new__(cls)

    def _settings(self) -> dict[str, Any]:
        return {"opt": self._inner, "name": self.get_name()}

    def __copy__(self: Self) -> Self:
        """Returns a wrapper for the same variables, around a copy of the optimizer inside.

        Raises:
            TypeError: the wrapper cannot be copied.
        """
        cls, (args, kwargs), changes, state, variables = self._recipe()
        own = [each if isinstance(each, Variable) else copy.copy(each) for each in args]
        own_changes = [{name: copy.copy(each[name]) for name in each} for each in changes]
        return make_again(cls, (tuple(own), kwargs), own_changes, state, variables)

    def _recipe(self: Self) -> tuple[type[Self], tuple[Any, Any], Changes, Any, dict[str, Any]]:
        cls = type(self)
        maker = next(each for each in cls.__mro__ if "_made_with" in vars(each))
        below = cls.__mro__[: cls.__mro__.index(maker)]
        if any("__init__" in vars(each) for each in below):  # a user's own, with other arguments
            self._refuse_copies()
        return cls, self._made_with(), self._changes(), *self._own_state()

    def _made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns arguments of the constructor by which a copy is made; the first is `_inner`.

        A subclass that has no part in other threads or processes overrides this.
        """
        self._refuse_copies()

    def _own_state(self) -> tuple[Any, dict[str, Any]]:
        """Returns what `_take_state` of a copy is given: a state beside that of `_inner`."""
        return None, {}

    def _take_state(self, state: Any, variables: Mapping[str, Any]) -> None:
        pass

    def _refuse_copies(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: what it brings together belongs "
            "to this process. Copy the optimizer inside, and make another wrapper around the copy; "
            "or hand the state over by state_dict() and load_state_dict()"
        )

    @property
    def owner_of_state(self) -> Optimizer:
        return self._inner.owner_of_state

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Those of the optimizer inside, to be read and set; one of hooks alone has none."""
        owner: Any = self.owner_of_state
        found: Hyperparameters = owner.hyperparameters
        return found

    @property
    def groups(self) -> tuple[Hyperparameters, ...]:
        """Those of the optimizer inside, likewise."""
        owner: Any = self.owner_of_state
        found: tuple[Hyperparameters, ...] = owner.groups
        return found

    @property
    def global_norm(self) -> Any:
        """That of the optimizer inside, by the gradients that it is given, as means or unscaled."""
        owner: Any = self.owner_of_state
        return owner.global_norm

    @property
    def group_norms(self) -> dict[str, Any]:
        """Those of the optimizer inside, likewise."""
        owner: Any = self.owner_of_state
        found: dict[str, Any] = owner.group_norms
        return found

    @property
    def loss_scale(self) -> float:
        """That of the `LossScaleOptimizer` inside, if there is one."""
        inner: Any = self._inner
        return inner.loss_scale  # type: ignore[no-any-return]

    @property
    def num_skipped(self) -> int:
        """Likewise, how many steps it left out."""
        inner: Any = self._inner
        return inner.num_skipped  # type: ignore[no-any-return]

    @property
    def skipped_in_a_row(self) -> int:
        """Likewise, how many of them since the last step whose gradients were finite."""
        inner: Any = self._inner
        return inner.skipped_in_a_row  # type: ignore[no-any-return]

    @property
    def last_nonfinite(self) -> str | None:
        """That of the optimizer inside, about what it is given; see `Optimizer.last_nonfinite`."""
        return self._inner.last_nonfinite

    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient | None, Variable]]:
        """Asks the optimizer inside; see `Optimizer.compute_gradients`."""
        return self._inner.compute_gradients(*args, **kwargs)

    def get_slot(self, var: Any, name: str) -> Variable | None:
        """Asks the optimizer inside; see `Optimizer.get_slot`."""
        return self._inner.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Asks the optimizer inside; see `Optimizer.get_slot_names`."""
        return self._inner.get_slot_names()

    def variables(self) -> list[Variable]:
        """Asks the optimizer inside; see `Optimizer.variables`."""
        return self._inner.variables()

    def report(self) -> AbstractContextManager[Report]:
        """Watches the steps of the optimizer inside; see `Optimizer.report`."""
        return self._inner.report()

    def check(self) -> None:
        """Asks the optimizer inside; see `Optimizer.check`."""
        self._inner.check()

    def state_dict(self, variables: Mapping[str, Any] | None = None) -> OptimizerState:
        """Asks the optimizer inside; see `Optimizer.state_dict`."""
        return self._inner.state_dict(variables)

    def load_state_dict(
        self, state: OptimizerState, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Asks the optimizer inside; see `Optimizer.load_state_dict`."""
        self._inner.load_state_dict(state, variables)

    def _extra_saved_variables(self) -> Mapping[str, Variable]:
        return self._inner._extra_saved_variables()

    def _names_to_set(self) -> Collection[str]:
        return () if "_optimizer" not in vars(self) else self._inner._names_to_set()

    def _names_to_give(self) -> Collection[str]:
        if "_optimizer" not in vars(self):
            return ()
        return set(self._inner._names_to_give()) - vars(self).keys()

    def _hint_for_setting(self, name: str) -> str | None:
        hint = super()._hint_for_setting(name)
        for each in inner_optimizers(self) if "_optimizer" in vars(self) else ():
            found = getattr(type(each), name, None)
            if hint is None and isinstance(found, property) and found.fset is not None:
                return f"set it on the {type(each).__name__} inside"
        return hint

    def _note_nonfinite(self, description: str) -> None:
        self._inner._note_nonfinite(description)

    def _valid_dtypes(self) -> Iterable[Any]:
        return self._inner._valid_dtypes()

    @property
    def _gradient_types(self) -> GradientTypes:  # type: ignore[override]
        return self._inner._gradient_types


def inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields the optimizer, and those inside of it, as far as they are known."""
    yield optimizer
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer._inner
        yield optimizer


def check_inside_of_workers(optimizer: Any, outer: str) -> Optimizer:
    """Returns the optimizer that one for workers, of the class `outer`, is to wrap.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it is for workers itself, or has such a one inside.
    """
    for each in inner_optimizers(check_optimizer(optimizer)):
        if isinstance(each, OptimizerWrapper) and each.is_for_workers:
            raise ValueError(
                f"{outer} cannot be around {type(each).__name__}: both decide when workers go on, "
                "or whose gradients count; use one of them"
            )
    return optimizer  # type: ignore[no-any-return]


def check_optimizer(optimizer: Any) -> Optimizer:
    """Returns the optimizer, or raises TypeError."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the optimizer to wrap must be an Optimizer, got {optimizer!r}")
    return optimizer
