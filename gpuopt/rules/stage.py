"""Stages of a step around its rule: plain functions, each with its slots and its scalars.

A stage is written for numpy, like a rule, and traced like one. A step is made in this order:

    gradient    before anything else: writes the gradient, as clipping does
    variable    before the rule: writes the variable, as weight decay does
    rule        the optimizer's own arithmetic
    step        in the rule's place: gets the step that the rule makes from 0, as caution does
    store       as the variable and the slots are stored: loops do it, with the stage's scalars
    stored      once the variable is stored: gets what is stored of it, as an average does
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.emitted import EmittedStage
from gpuopt.rules.tracing import REALS, Program, Rank, trace


class Place(IntEnum):
    """When a stage is run; see the module."""

    GRADIENT = 0
    VARIABLE = 1
    STEP = 2
    STORE = 3
    STORED = 4


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of a step.

    Attributes:
        name: What a rule with it is called: `decayed` for `decayed_adam`.
        place: When it is run.
        function: Its parameters are the arrays that it takes, by their names: `var`, `grad`,
            `step`, or one of `slots`; and behind a `*`, scalars. It writes in place.
        slots: The slots that it has.
        sums: Those of its scalars that are sums over the variable.
        terms: Takes the gradient and the step, and returns an array for each of `sums`, whose
            elements are summed.
        of_counts: Whether its scalars, and all others of the step, depend on how many steps a
            device has made by its own count.
    """

    name: str
    place: Place
    function: Callable[..., None]
    slots: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    terms: Callable[[Any, Any], Sequence[Any]] | None = None
    of_counts: bool = False

    @computed_once
    def arrays(self) -> tuple[str, ...]:
        return self._parameters(inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @computed_once
    def scalars(self) -> tuple[str, ...]:
        return self._parameters(inspect.Parameter.KEYWORD_ONLY)

    def _parameters(self, kind: Any) -> tuple[str, ...]:
        every = inspect.signature(self.function).parameters.values()
        return tuple(each.name for each in every if each.kind is kind)

    def run(self, arrays: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        self.function(
            *(arrays[name] for name in self.arrays),
            **{name: scalars[name] for name in self.scalars},
        )

    @computed_once
    def emitted(self) -> EmittedStage:
        """Its function and its terms, traced for each type."""
        programs = {real.name: self._trace(self.run, real) for real in REALS}
        terms = {}
        if self.terms is not None:
            terms = {real.name: self._trace(self._terms_of, real) for real in REALS}
        return EmittedStage(self.function.__name__, self.arrays, programs, terms)

    def _terms_of(self, arrays: Mapping[str, Any], scalars: Mapping[str, Any]) -> Sequence[Any]:
        assert self.terms is not None
        return self.terms(arrays["grad"], arrays["step"])

    def _trace(self, function: Callable[..., Any], real: np.dtype[Any]) -> Program:
        arrays = dict.fromkeys(self.arrays, Rank.ELEMENT)
        scalars = dict.fromkeys(self.scalars, Rank.UNIFORM)
        return trace(
            self.name, lambda given: function(given, given), arrays, scalars, real, read_only={}
        )
