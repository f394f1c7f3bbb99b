"""The members of an optimizer that a step by an update rule uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.rules.catch_up import CatchUpOption
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.ledger import Ledger
from gpuopt.step.options import Options
from gpuopt.step.plan_cache import PlanCache
from gpuopt.step.request import Listed
from gpuopt.step.step import ThisThread
from gpuopt.step.updates import HookOptimizer
from gpuopt.variables.variable import Variable


class Grouping(Protocol):
    """The part of an optimizer's groups that `RuleUpdates` uses."""

    def check(self, variables: Sequence[Variable]) -> None:
        """Raises ValueError if variables that are new to the optimizer do not fit the groups."""


class RuleOptimizer(HookOptimizer, Protocol):
    """The part of an optimizer that `RuleUpdates` uses."""

    rule: UpdateRule
    rule_with_slots: UpdateRule
    rule_of_other_rows: ClassVar[UpdateRule | None]
    catch_up: CatchUpOption
    own_counts: Mapping[str, np.generic]
    plans: PlanCache
    ledger: Ledger
    options: Options
    this_thread: ThisThread

    def get_name(self) -> str: ...

    def _prepare(self) -> None: ...

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any: ...

    def _all_non_slot_names(self) -> list[str]: ...

    def _rule_of_call(
        self, variables: Sequence[Any], is_sparse: bool, listed: Listed
    ) -> tuple[UpdateRule, bytes]: ...

    @property
    def _grouping(self) -> Grouping: ...

    def _slot_starts(self) -> Mapping[str, float]: ...

    def _number_of_scalars(self, variable: Variable, listed: Listed = None) -> int: ...

    def _scalars_of_groups(
        self, every: Any, numbers: Sequence[int], is_sparse: bool
    ) -> list[Scalars]: ...

    def _in_group(self, number: int, compute: Callable[[], Any]) -> Any: ...

    def _scalars(self, real: type[np.floating[Any]]) -> Scalars: ...

    def _sparse_scalars(self, scalars: Scalars) -> Scalars: ...
