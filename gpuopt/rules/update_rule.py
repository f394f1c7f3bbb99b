"""An update rule: the arithmetic of one optimizer step on one element."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources.abc import Traversable
from typing import Any, overload

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.emitted import Functor, emit, emit_staged, field_name
from gpuopt.rules.functions import INEXACT
from gpuopt.rules.shift import Shift, shift_of
from gpuopt.rules.sources import CudaSource, kernel_root
from gpuopt.rules.stage import CLIPPED, Stage
from gpuopt.rules.tracing import NUMBER, REALS, Program, Rank, trace
from gpuopt.rules.unnamed import Unnamed

# The scalar of a row-wise rule that each row has for itself.
MEAN_SQUARE = "mean_square"
# A user's own header may call functions of <cmath> without including it, as in CUDA.
_FUNCTIONS_OF_C = "#if !defined(__CUDACC__)\n#include <cmath>\n#endif\n"


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of an array with one number for each row of an array of `shape`."""
    return (*shape[:1], *[1] * len(shape[1:]))


# Compared and hashed by identity, which is fast: each launch finds its kernel by the rule.
@dataclass(frozen=True, eq=False)
class UpdateRule:
    """A rule: a function of numpy, and the functor in C++ that is traced from it.

    Attributes:
        apply: The function. Takes flat chunks of any length and updates `var` and its slots in
            place. Its `grad` is read-only: the result of `gradient`. It is traced once, so its
            result must depend on its arguments alone. If the rule is row-wise, it takes rows,
            [num_rows, row_width], and each of `row_slots` as [num_rows, 1].
        slots: The slots' names, in order.
        scalars: The names of the scalars of a step, in order.
        cuda: The user's own functor, which is used instead of a traced one.
        squares: The slots that sum or average squares, or keep the largest, and so are never
            below 0.
        sums: Scalars that are sums over all elements of a variable: each variable has its own, and
            the optimizer does not give them. They stand side by side in `scalars`.
        terms: Takes the arguments of `apply`, with `sums` of 0. Writes nothing, and returns an
            array for each of `sums`, whose elements are summed.
        degrees: The degree of each sum in the gradient, if all are over the variable and the
            gradient alone; else empty.
        row_slots: The last slots, if the rule is row-wise: they have one number for each row. Such
            a rule has a scalar `mean_square`, [num_rows, 1]: the mean of each row's squared
            gradients.
        unnamed: The rule's effect where the gradient is 0, if rows without one can catch up.
        stored: The dtype that the variable is rounded to, if the rule depends on it; see
            `averaged`.
        stages: The stages around it, in the order that they are run in.
    """

    apply: Callable[..., None]
    slots: tuple[str, ...]
    scalars: tuple[str, ...]
    cuda: CudaSource | None = None
    squares: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    terms: Callable[..., Sequence[Any]] | None = None
    row_slots: tuple[str, ...] = ()
    unnamed: Unnamed | None = None
    degrees: tuple[int, ...] = ()
    stored: np.dtype[Any] | None = None
    stages: tuple[Stage, ...] = ()

    @property
    def name(self) -> str:
        return self.apply.__name__

    @computed_once
    def is_clipped(self) -> bool:
        """Whether a stage multiplies its gradient by a factor that is measured; see `clipped`."""
        return any(stage.name == CLIPPED for stage in self.stages)

    @computed_once
    def is_scaled(self) -> bool:
        """Whether kernels choose among the scalars of several counts of steps; see `scaled`."""
        return any(stage.has_device_count for stage in self.stages)

    @computed_once
    def is_rounded(self) -> bool:
        """Whether backends round the values that it writes stochastically; see `rounded`."""
        return any(stage.is_of("store") for stage in self.stages)

    @computed_once
    def is_averaged(self) -> bool:
        """Whether its first slot is a moving average of the variable; see `averaged`."""
        return any(stage.is_of("follow") for stage in self.stages)

    @computed_once
    def is_numbered(self) -> bool:
        """Whether a stage takes the numbers of elements."""
        return any(stage.is_numbered for stage in self.stages)

    @computed_once
    def reads_numbers(self) -> bool:
        """Whether the gradient is read by the numbers of its elements."""
        return any(stage.is_numbered and stage.is_of("gradient") for stage in self.stages)

    @computed_once
    def is_emitted(self) -> bool:
        """Whether its functor is emitted from a trace of the whole rule."""
        return self.cuda is None

    @computed_once
    def is_exact(self) -> bool:
        """Whether compiled code for the CPU writes the bits that numpy writes."""
        return self.cuda is None and INEXACT.isdisjoint(self._operations())

    def _operations(self) -> set[str]:
        return {node.op for program in self.programs.values() for node in program.nodes()}

    @computed_once
    def computed(self) -> tuple[str, ...]:
        """The scalars that the optimizer does not give."""
        return (*self.sums, MEAN_SQUARE) if self.row_slots else self.sums

    @computed_once
    def shift(self) -> Shift | None:
        """How its step depends on the variable's value; None if in another way than `Shift`."""
        try:
            return shift_of(self.programs["float64"])
        except Exception:  # a rule with its own form in C++ need not be traceable
            return None

    @computed_once
    def own_functor(self) -> Functor:
        """The functor in C++: the traced one, or one that calls the user's own."""
        if self.cuda is not None:
            constants = {
                "num_slots": len(self.slots),
                "num_row_slots": len(self.row_slots),
                "num_sums": len(self.sums),
            }
            return emit_staged(
                self.name,
                self.cuda.functor,
                constants,
                fields={},
                degrees=self.degrees,
                stages={"gradient": (), "apply": (None,), "store": (), "follow": ()},
                slots=(),
                has_own_sums=bool(self.sums),
            )
        counts = {"num_slots": len(self.slots)}
        counts |= {"num_row_slots": len(self.row_slots)} if self.row_slots else {}
        counts |= {"num_sums": len(self.sums)} if self.sums else {}
        return emit(
            self.name,
            self.slots,
            dict(zip(self.scalars, self.fields, strict=True)),
            counts | self._constant_of_written,
            self.degrees,
            self.programs,
            self.programs_of_terms,
        )

    @computed_once
    def _written(self) -> int:
        """Which arrays it writes: bit 0 for the variable, bit 1 + k for slot number k."""
        every = ("var", *self.slots)
        if self.cuda is not None:
            return (1 << len(every)) - 1
        stores = self.programs["float32"].stores
        return sum(1 << k for k, name in enumerate(every) if name in stores)

    @property
    def _constant_of_written(self) -> dict[str, int]:
        """The functor's constant; none if the rule writes all arrays."""
        every = (1 << 1 + len(self.slots)) - 1
        return {} if self._written == every else {"written": self._written}

    @computed_once
    def programs(self) -> Mapping[str, Program]:
        """The rule's operations on arrays of a dtype, as a program, by the dtype's name.

        Raises:
            TypeError: it is not arithmetic on elements, or it returns something.
            ValueError: it writes values to a slot of rows that differ within a row.
        """
        return {real.name: self._traced(real) for real in REALS}

    @computed_once
    def programs_of_terms(self) -> Mapping[str, Program]:
        """The traces of `terms`, by the dtype's name; empty if the rule has no sums."""
        if not self.sums:
            return {}
        return {real.name: self._trace(partial(self._call, self.terms), real) for real in REALS}

    def _traced(self, real: np.dtype[Any]) -> Program:
        def step(given: Mapping[str, Any]) -> None:
            returned: Any = self._call(self.apply, given)
            if returned is not None:
                raise TypeError(
                    f"{self.name}: an update rule writes into its arrays and returns nothing, got "
                    f"{returned!r}: write `var -= ...` for `return var - ...`"
                )

        return self._trace(step, real)

    def _call(self, function: Any, given: Mapping[str, Any]) -> Any:
        var, grad, *slots = (given[name] for name in ("var", "grad", *self.slots))
        is_read_only = function is self.terms
        grad = self.gradient(grad, slots, given, lambda: given[NUMBER], is_read_only=is_read_only)
        return function(var, grad, *slots, **{name: given[name] for name in self.scalars})

    def _trace(self, function: Callable[..., Any], real: np.dtype[Any]) -> Program:
        arrays = {
            name: Rank.ROW if name in self.row_slots else Rank.ELEMENT
            for name in ("var", "grad", *self.slots)
        }
        if self.reads_numbers:
            arrays[NUMBER] = Rank.ELEMENT
        scalars = dict.fromkeys(self.scalars, Rank.UNIFORM)
        read_only = {"grad": "the gradient"}
        if self.row_slots:
            scalars[MEAN_SQUARE] = Rank.ROW
            read_only[MEAN_SQUARE] = f"the scalar {MEAN_SQUARE}"
        return trace(
            self.name, function, arrays, scalars, real, read_only, is_emitted=self.is_emitted
        )

    @property
    def cpp(self) -> str:
        """The C++ that is compiled for GPUs and the CPU, with each statement's line of Python."""
        return "\n".join(self.definitions)

    @property
    def functor(self) -> str:
        """The name of the functor in C++."""
        return self.own_functor.name

    @property
    def definitions(self) -> tuple[str, ...]:
        """C++ that defines the functor, piece by piece."""
        if self.cuda is None:
            return (self.own_functor.definition,)
        own = f'{_FUNCTIONS_OF_C}#include "{self.cuda.header}"\n{self._checks}'
        return (own, self.own_functor.definition)

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        """The folders where compilers look for headers: gpuopt's first, then the rule's own."""
        own = [] if self.cuda is None else [self.cuda.folder]
        return tuple(dict.fromkeys((kernel_root(), *own)))

    @computed_once
    def fields(self) -> tuple[str, ...]:
        """The names of its scalars in C++."""
        return tuple(
            # Loops write MEAN_SQUARE by its name, and users' own functors name their fields.
            name if self.cuda is not None or name == MEAN_SQUARE else field_name(name, place)
            for place, name in enumerate(self.scalars)
        )

    def slot_shape(self, slot: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a slot of a variable of `shape`."""
        return row_shape(shape) if slot in self.row_slots else shape

    def own(self, scalars: Mapping[str, np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        """Returns the scalars that this rule takes, without the others."""
        return {name: scalars[name] for name in self.scalars}

    def gradient(
        self,
        grad: Any,
        slots: Sequence[Any],
        scalars: Mapping[str, Any],
        numbers: Callable[[], Any] | None = None,
        *,
        is_read_only: bool = False,
    ) -> Any:
        """Reads a gradient, which stays as it is: `apply` and `terms` get the result.

        Args:
            grad: An array of elements.
            slots: The slots of the same elements; stages of the gradient write their own.
            scalars: The rule's.
            numbers: Returns the numbers of the elements in their variable, uint64, if the rule
                `reads_numbers`.
            is_read_only: Whether the slots stay as they are: the gradient is read again in this
                step.
        """
        return grad

    @property
    def include(self) -> str:
        """C++ that defines the functor."""
        return "\n".join(self.definitions) + "\n"

    @property
    def _checks(self) -> str:
        """C++ that compiles only if the user's own functor fits this rule.

        It compares slots, scalars, row slots, sums and degrees. A count that differs is compared
        with each possible number, so that the message has both numbers.
        """
        assert self.cuda is not None
        functor, checks = self.cuda.functor, []
        slots, scalars = ", ".join(self.slots), ", ".join(self.scalars)
        as_many = f"not as many as the {{}} of {self.name} in Python"
        checks.append(
            (f"{functor}::num_slots == {len(self.slots)}", as_many.format(f"slots ({slots})"))
        )
        for real in ("float", "double"):
            struct = f"{functor}::Scalars<{real}>"
            checks.append(
                (
                    f"sizeof({struct}) / sizeof({real}) == {len(self.scalars)}",
                    as_many.format(f"scalars ({scalars})"),
                )
            )
            checks += [
                (
                    f"gpuopt::is_declared<decltype({struct}::{name}), {real}> && "
                    f"GPUOPT_OFFSET({name}, {struct}) == {place} * sizeof({real})",
                    f"not in the order of the scalars ({scalars}) of {self.name} in Python, or "
                    f"not {real}",
                )
                for place, name in enumerate(self.fields)
            ]
        for what, constant, names, most in (
            ("slots of rows", "num_row_slots", self.row_slots, len(self.slots)),
            ("sums", "num_sums", self.sums, len(self.scalars)),
        ):
            listed = f" ({', '.join(names)})" if names else ""
            found = f"gpuopt::{constant}<{functor}>"
            in_python = f"the number of {what} of {self.name} is {len(names)} in Python{listed}"
            checks += [
                (f"{found} != {other}", f"{in_python}, and {other} in {functor} ({constant})")
                for other in range(most + 1)
                if other != len(names)
            ]
            checks.append(
                (
                    f"{found} >= 0 && {found} <= {most}",
                    f"{in_python}, and above {most} in {functor} ({constant})",
                )
            )
        for place, degree in enumerate(self.degrees):
            checks.append(
                (
                    f"gpuopt::degree_of<{functor}>({place}) == {degree}",
                    f"the degree of {self.sums[place]} of {self.name} is {degree} in Python, and "
                    f"another in {functor} (degree)",
                )
            )
        includes = ['#include "shared/counts.cuh"', '#include "shared/declared.cuh"']
        return "\n".join(
            [*includes, *(f'static_assert({check}, "{what}");' for check, what in checks)]
        )


@overload
def update_rule(apply: Callable[..., None], /) -> UpdateRule: ...


@overload
def update_rule(
    *,
    cuda: CudaSource | None = None,
    squares: Sequence[str] = (),
    sums: Sequence[str] = (),
    terms: Callable[..., Sequence[Any]] | None = None,
    row_slots: Sequence[str] = (),
    unnamed: Unnamed | None = None,
    degrees: Sequence[int] = (),
) -> Callable[[Callable[..., None]], UpdateRule]: ...


def update_rule(
    apply: Callable[..., None] | None = None,
    /,
    *,
    cuda: CudaSource | None = None,
    squares: Sequence[str] = (),
    sums: Sequence[str] = (),
    terms: Callable[..., Sequence[Any]] | None = None,
    row_slots: Sequence[str] = (),
    unnamed: Unnamed | None = None,
    degrees: Sequence[int] = (),
) -> UpdateRule | Callable[[Callable[..., None]], UpdateRule]:
    """Makes an update rule from a function of numpy; a decorator, with or without arguments.

    The signature is the rule's contract: after `var` and `grad`, positional parameters are slots
    and keyword-only parameters are scalars. The rule writes in place, as by `var -= ...` or
    `slot[...] = ...`: `var = ...` and `slot = ...` only give the name another array. It is
    arithmetic on elements: the function is called with stand-ins that record each operation, and
    these operations are compiled for GPUs and for the CPU.

    Args:
        apply: The function.
        cuda: The place of your own CUDA code, which is compiled instead of a traced functor.
        squares: The names of the slots that sum or average squares. A state with numbers below 0
            there is not restored.
        sums: The names of scalars that are sums over a whole variable. They stand side by side in
            the signature. Your own CUDA code then has `num_sums`, and `terms` beside `apply`.
        terms: A function of the rule's arguments that returns an array for each of `sums`, whose
            elements are summed before the rule is applied.
        row_slots: The names of the last slots, if they have one number for each row. The rule then
            takes the scalar `mean_square`: the mean of a row's squared gradients, of each row its
            own. The values that it writes to these slots depend only on them and the scalars. Your
            own CUDA code then has `num_row_slots`.
        unnamed: The rule's effect where the gradient is 0. An optimizer whose
            `rule_of_other_rows` is this rule can then take `catch_up`.
        degrees: The degree of each sum in the gradient, if all are over the variable and the
            gradient alone: terms of `c * grad` are `c ** degree` of those of `grad`. A GPU can then
            add them up as it measures gradients for `clip_norm`, before their factor is known.
            Your own CUDA code then has a `degree(sum)`.

    Raises:
        TypeError: the signature does not have this form, `cuda` is no CudaSource, the rule
            returns something or is no arithmetic on elements (with the file and the line), or only
            one of `sums` and `terms` is given.
        ValueError: the rule writes to none of its arrays, `squares` names no slot, `sums` are no
            scalars side by side, or `degrees` are not theirs; or `row_slots` are not the last
            slots, or the rule has sums beside them, takes no `mean_square`, or writes to one of
            them what differs within a row; or `unnamed` names something else than its slots and
            scalars.
    """
    if not isinstance(cuda, CudaSource | None):
        raise TypeError(f"cuda must be a gpuopt.CudaSource, got {cuda!r}")
    make = partial(
        _rule_of,
        cuda=cuda,
        squares=tuple(squares),
        sums=tuple(sums),
        terms=terms,
        row_slots=tuple(row_slots),
        unnamed=unnamed,
        degrees=tuple(degrees),
    )
    return make if apply is None else make(apply)


def _rule_of(
    apply: Callable[..., None],
    cuda: CudaSource | None,
    squares: tuple[str, ...],
    sums: tuple[str, ...],
    terms: Callable[..., Sequence[Any]] | None,
    row_slots: tuple[str, ...],
    unnamed: Unnamed | None,
    degrees: tuple[int, ...],
) -> UpdateRule:
    """Reads a rule's contract from the signature of its function."""
    parameters = list(inspect.signature(apply).parameters.values())
    if [parameter.name for parameter in parameters[:2]] != ["var", "grad"]:
        raise TypeError(f"{apply.__name__}: an update rule starts with (var, grad)")
    rest = parameters[2:]
    slots = tuple(p.name for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD)
    scalars = tuple(p.name for p in rest if p.kind is p.KEYWORD_ONLY)
    if len(slots) + len(scalars) != len(rest) or any(p.default is not p.empty for p in rest):
        raise TypeError(
            f"{apply.__name__}: after (var, grad), an update rule takes slots by position and "
            "scalars by keyword, without defaults"
        )
    if not set(squares) <= set(slots):
        raise ValueError(f"{apply.__name__}: squares={squares} must be of its slots, {slots}")
    if bool(sums) != (terms is not None):
        raise TypeError(f"{apply.__name__}: sums={sums} and terms={terms} belong together")
    first = scalars.index(sums[0]) if sums and sums[0] in scalars else 0
    if scalars[first : first + len(sums)] != sums:
        raise ValueError(
            f"{apply.__name__}: sums={sums} must stand side by side among its scalars, {scalars}"
        )
    if degrees and (len(degrees) != len(sums) or not all(map(_is_degree, degrees))):
        raise ValueError(
            f"{apply.__name__}: degrees={degrees} must be an integer from 0 for each of its sums, "
            f"{sums}"
        )
    if row_slots:
        _check_row_slots(apply.__name__, slots, scalars, sums, row_slots)
    if unnamed is not None:
        unnamed.check(apply.__name__, slots, scalars)
    rule = UpdateRule(
        apply,
        slots,
        scalars,
        cuda,
        squares,
        sums,
        terms,
        row_slots,
        unnamed,
        degrees=degrees,
    )
    if not (apply.__module__ or "").startswith("gpuopt."):
        # Tests trace ours; an import of gpuopt is to be quick.
        _refuse_by_trace(rule)
    if degrees:
        _refuse_other_degrees(rule)
    return rule


def _refuse_by_trace(rule: UpdateRule) -> None:
    """Raises what `UpdateRule.programs` does, and ValueError if the rule writes nothing."""
    try:
        stores = rule.programs["float32"].stores
        _ = rule.programs_of_terms
    except NameError:  # of a function that stands below the rule: the first step traces again
        return
    except Exception:
        if rule.is_emitted:
            raise
        return  # it is raised by the first step on a CPU
    if not stores:
        raise ValueError(
            f"{rule.name} writes to none of its arrays, so it would train nothing: write "
            "`var -= ...` or `var[...] = ...` for `var = ...`"
        )


def _refuse_other_degrees(rule: UpdateRule) -> None:
    """Raises ValueError unless terms of twice the gradient, with other slots, are as declared."""
    var, grad = np.array([0.5, 2.0, -1.0, 10.0]), np.array([-50.0, -0.25, 0.75, 3.0])
    with np.errstate(all="ignore"):
        try:
            once, twice = (
                _some_terms(rule, var, times * grad, np.full_like(var, other))
                for times, other in ((1, 0.25), (2, 3.0))
            )
        except Exception:
            return
    for name, degree, mine, doubled in zip(rule.sums, rule.degrees, once, twice, strict=True):
        if not np.allclose(doubled, 2.0**degree * mine, rtol=1e-9, atol=0):
            raise ValueError(
                f"{rule.name} sums what is not of degree {degree} in the gradient alone, as "
                f"degrees={rule.degrees} declares {name}: for twice the gradient, and other slots "
                f"and scalars, terms are {doubled} for {mine}. Give its degree, or no degrees"
            )


def _some_terms(rule: UpdateRule, var: Any, grad: Any, others: Any) -> Sequence[Any]:
    assert rule.terms is not None, "it has sums"
    slots = [others.copy() for _ in rule.slots]
    scalars = {name: others[0] for name in rule.scalars if name not in rule.sums}
    scalars |= dict.fromkeys(rule.sums, np.float64(0))
    return rule.terms(var, grad, *slots, **scalars)


def _is_degree(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_row_slots(
    name: str,
    slots: tuple[str, ...],
    scalars: tuple[str, ...],
    sums: tuple[str, ...],
    row_slots: tuple[str, ...],
) -> None:
    if slots[-len(row_slots) :] != row_slots:
        raise ValueError(f"{name}: row_slots={row_slots} must be the last of its slots, {slots}")
    if sums:
        raise ValueError(f"{name}: a rule has sums={sums} or row_slots={row_slots}, not both")
    if MEAN_SQUARE not in scalars:
        raise ValueError(
            f"{name}: a rule with row_slots={row_slots} takes the scalar {MEAN_SQUARE}, the mean "
            f"of a row's squared gradients; it takes {scalars}"
        )
