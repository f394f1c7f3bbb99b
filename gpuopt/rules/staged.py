"""Rules with stages around them; see `gpuopt.rules.stage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.emitted import Functor, emit_staged
from gpuopt.rules.stage import Place, Stage
from gpuopt.rules.update_rule import UpdateRule


@dataclass(frozen=True, eq=False)
class StagedRule(UpdateRule):
    """A rule with stages around it.

    Attributes:
        rule: The rule itself.
    """

    rule: UpdateRule = field(kw_only=True)

    @computed_once
    def is_emitted(self) -> bool:
        """False: stages are emitted one by one; what is traced of the whole is replayed alone."""
        return False

    @computed_once
    def own_functor(self) -> Functor:
        return emit_staged(
            self.name,
            self.rule.functor,
            {
                "num_slots": len(self.slots),
                "num_row_slots": len(self.row_slots),
                "num_sums": len(self.sums),
                "num_averages": int(self.is_averaged),
                "is_rounded": int(self.is_rounded),
                **self._constant_of_written,
            },
            self.fields[len(self.rule.fields) :],
            self.degrees,
            {
                place.name.lower(): [s.emitted for s in self.stages if s.place is place]
                for place in Place
                if place is not Place.STORE
            },
            self.slots[: len(self.slots) - len(self.rule.slots)],
            has_own_sums=bool(self.rule.sums),
        )

    @computed_once
    def _written(self) -> int:
        of_rule, num_own = self.rule._written, len(self.slots) - len(self.rule.slots)
        moves_var = any(stage.place in (Place.VARIABLE, Place.STEP) for stage in self.stages)
        slots = of_rule >> 1 << num_own | (1 << num_own) - 1
        return slots << 1 | of_rule & 1 | moves_var

    @property
    def definitions(self) -> tuple[str, ...]:
        return (*self.rule.definitions, self.own_functor.definition)

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        return self.rule.include_folders

    @computed_once
    def fields(self) -> tuple[str, ...]:
        return (*self.rule.fields, *self.scalars[len(self.rule.scalars) :])

    def gradient(self, grad: Any, scalars: Mapping[str, Any]) -> Any:
        return _gradient(self.stages, grad, scalars)


@cache
def staged(base: UpdateRule, stage: Stage, stored: np.dtype[Any] | None = None) -> StagedRule:
    """Returns a rule with a stage more.

    It has the stage's slots before those of `base`, as slots of rows are the last ones, and the
    stage's scalars behind those of `base`.

    Args:
        base: A rule, which may have stages.
        stage: The stage.
        stored: The type that the variable is rounded to before stages get it that follow; None if
            it is the one that rules compute in.
    """
    rule, before = (base.rule, base.stages) if isinstance(base, StagedRule) else (base, ())
    stages = tuple(sorted((*before, stage), key=lambda each: each.place))
    slots, sums = (*stage.slots, *base.slots), stage.sums or base.sums
    stored = stored or base.stored
    apply, terms = _functions(rule, stages, slots, stored)
    apply.__name__ = f"{stage.name}_{base.name}"
    apply.__module__ = rule.apply.__module__
    return StagedRule(
        apply=apply,
        slots=slots,
        scalars=(*base.scalars, *stage.scalars),
        squares=base.squares,
        sums=sums,
        row_slots=base.row_slots,
        eight_bit=base.eight_bit,
        degrees=() if stage.sums else base.degrees,
        stored=stored,
        terms=terms if sums else None,
        rule=rule,
        stages=stages,
    )


def _functions(
    rule: UpdateRule,
    stages: Sequence[Stage],
    names: Sequence[str],
    stored: np.dtype[Any] | None,
) -> tuple[Callable[..., None], Callable[..., Sequence[Any]]]:
    """Returns what a rule and its stages do, and what they sum."""
    first = len(names) - len(rule.slots)
    before = [stage for stage in stages if stage.place is Place.VARIABLE]
    in_place = [stage for stage in stages if stage.place is Place.STEP]
    after = [stage for stage in stages if stage.place is Place.STORED]

    def apply(var: Any, grad: Any, *slots: Any, **scalars: Any) -> None:
        grad = _gradient(stages, grad, scalars)
        arrays = {"var": var, "grad": grad, **dict(zip(names, slots, strict=True))}
        for stage in before:
            stage.run(arrays, scalars)
        target = np.zeros_like(var) if in_place else var
        rule.apply(target, grad, *slots[first:], **rule.own(scalars))
        for stage in in_place:
            stage.run({**arrays, "step": target}, scalars)
        if after and stored is not None:
            arrays["var"] = var.astype(stored).astype(var.dtype)
        for stage in after:
            stage.run(arrays, scalars)

    def terms(var: Any, grad: Any, *slots: Any, **scalars: Any) -> Sequence[Any]:
        grad = _gradient(stages, grad, scalars)
        for stage in in_place:
            if stage.terms is not None:
                step, copies = np.zeros_like(var), [slot.copy() for slot in slots[first:]]
                rule.apply(step, grad, *copies, **rule.own(scalars))
                return stage.terms(grad, step)
        assert rule.terms is not None, "it has sums"
        return rule.terms(var, grad, *slots[first:], **rule.own(scalars))

    return apply, terms


def _gradient(stages: Sequence[Stage], grad: Any, scalars: Mapping[str, Any]) -> Any:
    """Returns what stages make of a gradient, which itself stays."""
    stages = [stage for stage in stages if stage.place is Place.GRADIENT]
    if not stages:
        return grad
    arrays = {"grad": grad.copy()}
    for stage in stages:
        stage.run(arrays, scalars)
    return arrays["grad"]
