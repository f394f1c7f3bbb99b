"""Copies and prints of optimizers, with the hyperparameters as they are now."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from gpuopt.optimizers.base.clipping import CLIPPING
from gpuopt.optimizers.base.groups import Groups
from gpuopt.optimizers.base.hyperparameters import Hyperparameters
from gpuopt.state.copies import Changes, CopiedByConstructor, of_state
from gpuopt.state.state import State


class CopiedByHyperparameters(CopiedByConstructor):
    """The part of a `RuleOptimizer` that copies and prints the settings as they are now."""

    state: State
    hyperparameters: Hyperparameters
    groups: tuple[Hyperparameters, ...]
    derived_hyperparameters: ClassVar[tuple[str, ...]] = ()
    _grouping: Groups

    def _settings(self) -> dict[str, Any]:
        given = {**super()._settings(), **self.hyperparameters.changed}
        parameters = inspect.signature(type(self)).parameters
        defaults = {
            name: parameters[name].default if name in parameters else value
            for name, value in self.hyperparameters.items()
            if name not in (*CLIPPING, *self.derived_hyperparameters)
        }
        settings: dict[str, Any] = {
            name: given.get(name, default) for name, default in defaults.items()
        }
        if self.groups:
            together = zip(self._grouping, self.groups, strict=True)
            given["groups"] = [group.with_changes(now.changed) for group, now in together]
        return {**settings, **given}

    def _recipe(self) -> Any:
        cls, (args, kwargs), *rest = super()._recipe()
        # Not what was given, which may have been an iterator.
        groups = {"groups": list(self._grouping)} if "groups" in kwargs else {}
        return cls, (args, {**kwargs, **groups}), *rest

    def _changes(self) -> Changes:
        return [each.changed for each in (self.hyperparameters, *self.groups)]

    def _repeat_changes(self, changes: Changes) -> None:
        of_all: list[Any] = [self.hyperparameters, *self.groups]
        for given, changed in zip(of_all, changes, strict=True):
            follow = {name: of_state(value, self.state) for name, value in given.own.items()}
            mine = {name: new for name, new in follow.items() if new is not given.own[name]}
            for name, value in {**mine, **changed}.items():
                given[name] = of_state(value, self.state)
