"""The members of an optimizer that a step by an update rule uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.rules.catch_up import CatchUpOption
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import SlotCodecs
from gpuopt.step.averages import FollowingAverages
from gpuopt.step.clips import GradientClips, StepClips
from gpuopt.step.known import KnownGroups, KnownObjects, StepPlan
from gpuopt.step.ledger import Ledger
from gpuopt.step.misuse import Misuse
from gpuopt.step.request import Listed
from gpuopt.step.stage_options import StageOption
from gpuopt.step.step import ThisThread
from gpuopt.step.updates import HookOptimizer
from gpuopt.variables.variable import Variable


class RuleOptimizer(HookOptimizer, Protocol):
    """The part of an optimizer that `RuleUpdates` uses."""

    rule: UpdateRule
    rule_of_other_rows: ClassVar[UpdateRule | None]
    instead_of_all_rows: ClassVar[str]
    catch_up: CatchUpOption
    known: KnownGroups
    plans: KnownObjects[StepPlan]
    misuse: Misuse
    clips: GradientClips | None
    averages: FollowingAverages | None
    ledger: Ledger
    slot_codecs: SlotCodecs
    stage_options: Sequence[StageOption]
    this_thread: ThisThread

    def get_name(self) -> str: ...

    def _prepare(self) -> None: ...

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any: ...

    def _all_non_slot_names(self) -> list[str]: ...

    @property
    def finish_is_undoable(self) -> bool: ...

    def _rule_of_call(
        self, variables: Sequence[Any], is_sparse: bool, listed: Listed
    ) -> tuple[UpdateRule, bytes]: ...

    def _initial_slot_values(self) -> Mapping[str, float]: ...

    def _group_of_scalars(self, variable: Variable, listed: Listed = None) -> int: ...

    def _scalars_of_groups(
        self, every: Sequence[Scalars], numbers: Sequence[int], is_sparse: bool
    ) -> list[Scalars]: ...

    def _check_groups(self, variables: Sequence[Variable]) -> None: ...

    def _in_group(self, number: int, compute: Callable[[], Any]) -> Any: ...

    def _scalars(self, real: type[np.floating[Any]]) -> Scalars: ...

    def _clips_of_step(self, unscale: float | None = None) -> StepClips | None: ...

    def _sparse_scalars(self, scalars: Scalars) -> Scalars: ...
