"""Rules with stages around them; see `gpuopt.rules.stage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.emitted import EmittedStage, Functor, emit_staged, field_name
from gpuopt.rules.functions import INEXACT
from gpuopt.rules.stage import ORDER, UNSCALED, Stage, in_order
from gpuopt.rules.tracing import NUMBER
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
        """False: stages are emitted one by one. Only replay uses a trace of the whole."""
        return False

    @computed_once
    def is_exact(self) -> bool:
        return self.rule.is_exact and INEXACT.isdisjoint(self._operations())

    @computed_once
    def own_functor(self) -> Functor:
        own = len(self.rule.fields)
        has = {
            "is_unscaled": any(stage.name == UNSCALED for stage in self.stages),
            "is_clipped": self.is_clipped,
            "is_rounded": self.is_rounded,
            "has_gradient_slots": any(
                stage.slots and stage.is_of("gradient") for stage in self.stages
            ),
        }
        return emit_staged(
            self.name,
            self.rule.functor,
            {
                "num_slots": len(self.slots),
                "num_row_slots": len(self.row_slots),
                "num_sums": len(self.sums),
                "num_averages": int(self.is_averaged),
                **{name: 1 for name, is_so in has.items() if is_so},
                **self._constant_of_written,
            },
            dict(zip(self.scalars[own:], self.fields[own:], strict=True)),
            self.degrees,
            {function: self._emitted(function) for function in ORDER},
            self.slots[: len(self.slots) - len(self.rule.slots)],
            has_own_sums=bool(self.rule.sums),
        )

    def _emitted(self, function: str) -> list[EmittedStage | None]:
        every = in_order(self.stages, function)
        return [None if each is None else each.emitted for each in every]

    @computed_once
    def _written(self) -> int:
        of_rule, num_own = self.rule._written, len(self.slots) - len(self.rule.slots)
        moves_var = any(stage.is_of("apply") for stage in self.stages)
        written = frozenset[str]().union(*(stage.written for stage in self.stages))
        own = sum(1 << k for k, name in enumerate(self.slots[:num_own]) if name in written)
        slots = of_rule >> 1 << num_own | own
        return slots << 1 | of_rule & 1 | moves_var

    @property
    def definitions(self) -> tuple[str, ...]:
        return (*self.rule.definitions, self.own_functor.definition)

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        return self.rule.include_folders

    @computed_once
    def fields(self) -> tuple[str, ...]:
        num_own = len(self.rule.scalars)
        of_stages = (
            # Loops write these.
            name if name in ("unscale", "clip_factor") else field_name(name, num_own + place)
            for place, name in enumerate(self.scalars[num_own:])
        )
        return (*self.rule.fields, *of_stages)

    def gradient(
        self,
        grad: Any,
        slots: Sequence[Any],
        scalars: Mapping[str, Any],
        numbers: Callable[[], Any] | None = None,
        *,
        is_read_only: bool = False,
    ) -> Any:
        stages = [stage for stage in in_order(self.stages, "gradient") if stage is not None]
        if not stages:
            return grad
        arrays = {"grad": grad.copy()}
        for stage in stages:
            for name in stage.slots:
                slot = slots[self.slots.index(name)]
                arrays[name] = slot.copy() if is_read_only else slot
        if self.reads_numbers:
            assert numbers is not None, "loops have them"
            arrays[NUMBER] = numbers()
        for stage in stages:
            stage.run(arrays, scalars)
        return arrays["grad"]


@cache
def staged(base: UpdateRule, stage: Stage, stored: np.dtype[Any] | None = None) -> StagedRule:
    """Returns a rule with one more stage.

    Slots of averages come first, then those of other stages, the later stage first, and then those
    of the rule, of which slots of rows are the last; the order in which stages are given does not
    matter. Scalars come after those of `base`.

    Args:
        base: A rule, which may have stages.
        stage: The stage.
        stored: The type that the variable is rounded to before stages of "follow" get it; None for
            the type that rules compute in.

    Raises:
        ValueError: the stage is not in `ORDER`, takes an array that it does not get, has sums and
            no array `step` or beside others, or has a slot or a scalar that `base` has.
    """
    rule, before = (base.rule, base.stages) if isinstance(base, StagedRule) else (base, ())
    stages = [each for name in ORDER for each in in_order((*before, stage), name) if each]
    if len(stages) == len(before):
        raise ValueError(f"the stage {stage.name} is not in ORDER of gpuopt/rules/stage.py")
    if others := {*stage.arrays} - {*stage.slots, *_given_to(stage)}:
        raise ValueError(
            f"the stage {stage.name} takes {sorted(others)}: neither its slots {stage.slots}, nor "
            f"of {_given_to(stage)}, which a stage in its place gets"
        )
    if stage.sums and "step" not in stage.arrays:
        raise ValueError(
            f"the stage {stage.name} has sums={stage.sums}, which are over the gradient and the "
            f"step: it takes {stage.arrays}, without `step`"
        )
    if stage.sums and base.computed:
        raise ValueError(
            f"the stage {stage.name} has sums={stage.sums}, and {base.name} has "
            f"{base.computed}: a step has the sums of one of them"
        )
    for what, mine, theirs in (
        ("scalars", stage.scalars, base.scalars),
        ("slots", stage.slots, base.slots),
    ):
        if both := {*mine} & {*theirs}:
            raise ValueError(
                f"the stage {stage.name} and {base.name} both have {what} {sorted(both)}"
            )
    of_stages = [name for each in reversed(stages) for name in each.slots]
    slots, sums = (*of_stages, *rule.slots), stage.sums or base.sums
    stored = stored or base.stored
    apply, terms = _functions(rule, stages, slots, stored)
    apply.__name__ = f"{stage.name}_{base.name}"
    apply.__module__ = rule.apply.__module__
    has_other_sums = bool(stage.sums) or (stage.is_of("gradient") and not stage.is_measured)
    return StagedRule(
        apply=apply,
        slots=slots,
        scalars=(*base.scalars, *stage.scalars),
        squares=base.squares,
        sums=sums,
        row_slots=base.row_slots,
        unnamed=base.unnamed,
        degrees=() if has_other_sums else base.degrees,
        stored=stored,
        terms=terms if sums else None,
        rule=rule,
        stages=tuple(stages),
    )


def _given_to(stage: Stage) -> tuple[str, ...]:
    """Returns the arrays that a stage gets beside its slots."""
    if stage.is_of("gradient"):
        return "grad", NUMBER
    if stage.is_of("store"):
        return "var", NUMBER
    return ("var",) if stage.is_of("follow") else ("var", "grad", "step")


@cache
def of_named_rows(rule: UpdateRule) -> UpdateRule:
    """Returns the rule with stages that skip the rows that a sparse gradient does not name.

    The rule itself still updates these rows, by a gradient of 0; see `Stage.of_named_rows`.
    """
    if not isinstance(rule, StagedRule):
        return rule
    stages = tuple(
        stage.of_named_rows
        if {"var", "grad"} & {*stage.arrays}
        and not (stage.is_measured or stage.is_of("follow"))
        and "step" not in stage.arrays
        else stage
        for stage in rule.stages
    )
    if stages == rule.stages:
        return rule
    apply, terms = _functions(rule.rule, stages, rule.slots, rule.stored)
    apply.__name__, apply.__module__ = f"{rule.name}_of_named_rows", rule.apply.__module__
    return replace(rule, apply=apply, terms=rule.terms and terms, stages=stages)


def _functions(
    rule: UpdateRule,
    stages: Sequence[Stage],
    names: Sequence[str],
    stored: np.dtype[Any] | None,
) -> tuple[Callable[..., None], Callable[..., Sequence[Any]]]:
    """Returns `apply` and `terms` of a rule with stages; both take the result of `gradient`."""
    first = len(names) - len(rule.slots)
    steps, after = in_order(stages, "apply"), in_order(stages, "follow")
    in_place = [stage for stage in steps if stage is not None and "step" in stage.arrays]

    def apply(var: Any, grad: Any, *slots: Any, **scalars: Any) -> None:
        target = np.zeros_like(var) if in_place else var
        arrays = {"var": var, "grad": grad, "step": target, **dict(zip(names, slots, strict=True))}
        for stage in steps:
            if stage is None:
                rule.apply(target, grad, *slots[first:], **rule.own(scalars))
            else:
                stage.run(arrays, scalars)
        if after and stored is not None:
            arrays["var"] = var.astype(stored).astype(var.dtype)
        for stage in after:
            if stage is not None:
                stage.run(arrays, scalars)

    def terms(var: Any, grad: Any, *slots: Any, **scalars: Any) -> Sequence[Any]:
        for stage in in_place:
            if stage.terms is not None:
                step, copies = np.zeros_like(var), [slot.copy() for slot in slots[first:]]
                rule.apply(step, grad, *copies, **rule.own(scalars))
                return stage.terms(grad, step)
        assert rule.terms is not None, "it has sums"
        return rule.terms(var, grad, *slots[first:], **rule.own(scalars))

    return apply, terms
