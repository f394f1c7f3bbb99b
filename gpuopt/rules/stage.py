"""Stages of a step around its rule: plain functions, each with its slots and its scalars.

A stage is written for numpy, like a rule, and traced like one. `ORDER` has the place of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.emitted import EmittedStage
from gpuopt.rules.random_bits import NUM_PARTS, key_of_step, random_words
from gpuopt.rules.tracing import NUMBER, REALS, Program, Rank, trace

RULE, UNSCALED, CLIPPED = "rule", "unscaled", "clipped"
RANDOM = "random"

# The names of all stages in the order of a step, by the functions of a program that call them.
# Loops call these functions one after the other.
ORDER: dict[str, list[str]] = {
    # Called when the gradient is read: these stages change it.
    "gradient": [UNSCALED, "bounded", CLIPPED],
    # Before and after the rule. For a stage with the array `step`, the rule updates zeros.
    "apply": ["decayed", RULE, "cautious"],
    # Called by loops as they store the variable and the slots: returns random bits for rounding.
    "store": ["rounded"],
    # Called after the variable is stored, with its stored value.
    "follow": ["averaged"],
}


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of a step.

    Attributes:
        name: One of `ORDER`, an ASCII identifier. It is a prefix of the rule's name, as `decayed`
            in `decayed_adam`.
        function: Its positional parameters are arrays: `var`, `grad`, `step`, one of `slots`, or,
            in stages of the gradient or the store, uint64: `number`, of each element in its
            variable, or `random`, a word of random bits for each, by `key`. Keyword-only parameters
            are scalars. It writes in place.
        slots: The stage's own slots. A stage of the gradient writes them where there is a gradient,
            and once in a step, however often loops read the gradient. Rows that a sparse gradient
            does not name keep them, whatever the rule does there.
        sums: The scalars that are sums over the variable.
        terms: Takes the gradient and the step, and returns an array for each of `sums`, whose
            elements are summed.
        has_device_count: Whether the device chooses the step's scalars by its own count of steps.
        is_measured: Whether measuring takes its effect into account. Norms ignore other stages of
            the gradient, even those before clipping.
        is_of_named_rows: Whether it skips elements with the gradient -0: see `of_named_rows`.
    """

    name: str
    function: Callable[..., None]
    slots: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    terms: Callable[[Any, Any], Sequence[Any]] | None = None
    has_device_count: bool = False
    is_measured: bool = False
    is_of_named_rows: bool = False

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier()):
            raise ValueError(f"a stage's name must be an ASCII identifier, not {self.name!r}")

    @computed_once
    def arrays(self) -> tuple[str, ...]:
        own = self._parameters(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = [NUMBER if each == RANDOM else each for each in own]
        return tuple(dict.fromkeys([*given, *["grad"] * self.is_of_named_rows]))

    @computed_once
    def scalars(self) -> tuple[str, ...]:
        return (*self._parameters(inspect.Parameter.KEYWORD_ONLY), *self._key)

    @computed_once
    def _key(self) -> tuple[str, ...]:
        """The scalars that are the parts of the random bits' key."""
        is_random = RANDOM in self._parameters(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(f"{self.name}_key_{place}" for place in range(NUM_PARTS * is_random))

    def key(self, seed: int, step: int) -> dict[str, np.float32]:
        """Returns the scalars by which `random` is that of a seed and a step, counted from 0."""
        return dict(zip(self._key, key_of_step(seed, step), strict=True))

    def random(self, scalars: Mapping[str, Any], numbers: Any) -> Any:
        """Returns the words of random bits that belong to some numbers."""
        return random_words([scalars[name] for name in self._key], numbers)

    @computed_once
    def idle(self) -> Stage:
        """A stage with the same slots that changes nothing."""

        def keep() -> None:
            pass

        keep.__name__ = f"keep_{self.name}"
        return Stage(self.name, keep, self.slots)

    @computed_once
    def written(self) -> frozenset[str]:
        """The arrays that it writes."""
        return frozenset(self.emitted.programs["float32"].stores)

    @computed_once
    def is_numbered(self) -> bool:
        """Whether it takes the numbers of elements."""
        return NUMBER in self.arrays

    def is_of(self, function: str) -> bool:
        """Whether it stands in a function of `ORDER`."""
        return self.name in ORDER[function]

    def _parameters(self, kind: Any) -> tuple[str, ...]:
        every = inspect.signature(self.function).parameters.values()
        return tuple(each.name for each in every if each.kind is kind)

    def run(self, arrays: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        own = self._parameters(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = {
            name: self.random(scalars, arrays[NUMBER]) if name == RANDOM else arrays[name]
            for name in own
        }
        kept = ("var", "grad", *self.slots) if self.is_of_named_rows else ()
        written = [name for name in kept if name in given]
        given |= {name: arrays[name].copy() for name in written}
        named = self._parameters(inspect.Parameter.KEYWORD_ONLY)
        function: Any = self.function
        returned = function(*given.values(), **{name: scalars[name] for name in named})
        if returned is not None and not any(returned is each for each in given.values()):
            raise TypeError(
                f"the stage {self.name} returns {returned!r}: a stage writes into its arrays, as "
                "by `grad *= ...` or `grad[...] = ...`"
            )
        if written:
            grad = arrays["grad"]
            is_named = (grad != 0) | ~np.signbit(grad)
        for name in written:
            arrays[name][...] = np.where(is_named, given[name], arrays[name])

    @computed_once
    def of_named_rows(self) -> Stage:
        """The same stage, which skips elements with the gradient -0.

        A sparse gradient that is made dense has -0 in all rows that it does not name, and nowhere
        else.
        """
        return replace(self, is_of_named_rows=True)

    @computed_once
    def emitted(self) -> EmittedStage:
        """Its function and its terms, traced for each type; of the store, its random bits."""
        programs = {real.name: self._trace(self.run, real) for real in REALS}
        terms = {}
        if self.is_of("store"):
            programs = {
                real.name: self._trace(lambda a, s: [self.random(s, a[NUMBER])], real)
                for real in REALS
            }
        if self.terms is not None:
            terms = {real.name: self._trace(self._terms_of, real) for real in REALS}
        # Several stages may have one function, or functions of one name, which may be a keyword.
        return EmittedStage(f"run_{self.name}", self.arrays, programs, terms)

    def _terms_of(self, arrays: Mapping[str, Any], scalars: Mapping[str, Any]) -> Sequence[Any]:
        assert self.terms is not None
        return self.terms(arrays["grad"], arrays["step"])

    def _trace(self, function: Callable[..., Any], real: np.dtype[Any]) -> Program:
        arrays = dict.fromkeys(self.arrays, Rank.ELEMENT)
        scalars = dict.fromkeys(self.scalars, Rank.UNIFORM)
        return trace(
            self.name, lambda given: function(given, given), arrays, scalars, real, read_only={}
        )


def in_order(stages: Sequence[Stage], function: str) -> list[Stage | None]:
    """Returns the stages of a function of `ORDER`, in order; None stands for the rule."""
    found: list[Stage | None] = []
    for name in ORDER[function]:
        found += [None] if name == RULE else [stage for stage in stages if stage.name == name]
    return found
