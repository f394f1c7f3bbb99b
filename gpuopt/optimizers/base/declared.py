"""What a constructor declares of its arguments, beside their types.

beta1: Annotated[Hyperparameter, Range(above=0), "How much of `y` is `x`."] = 0.9
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import FunctionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    SupportsFloat,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from gpuopt.step.options import STAGE_OPTIONS
from gpuopt.step.stage_options import StageOption
from gpuopt.variables.scalars import as_scalar

# A number, something with a scalar value, or a function without arguments that returns one and is
# called in each step.
Hyperparameter = SupportsFloat | Callable[[], SupportsFloat]


class Range(NamedTuple):
    """The numbers that an argument may be. What a function returns is not looked at.

    Attributes:
        low: The smallest of them.
        high: The largest.
        above: What they are all larger than.
        below: What they are all smaller than.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        limits = {
            "at least": self.low,
            "above": self.above,
            "at most": self.high,
            "below": self.below,
        }
        return " and ".join(
            f"{word} {limit}" for word, limit in limits.items() if limit is not None
        )

    def has(self, number: float) -> bool:
        """Whether a number is one of them; NaN is none."""
        return (
            (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


class AllDigits:
    """Marks a hyperparameter that is not rounded to float32 if it is a Python float."""


class Option(NamedTuple):
    """Marks an argument of `Additions` or `DecayAdditions`.

    Attributes:
        default: Its value if it is not given.
        alone: Its value in `gpuopt show`, where it is named without one; None if it needs one.
        by_hooks: Why it does nothing where a hook updates one variable at a time; "" if it works.
        in_torch: Why torch's optimizers cannot continue a run that has it; "" if they can.
    """

    default: Any = None
    alone: Any = None
    by_hooks: str = ""
    in_torch: str = ""


# What an option declares of itself; that of a stage is a class.
Mark = Option | type[StageOption]


class Declared(NamedTuple):
    """What stands beside an argument's type.

    Attributes:
        is_hyperparameter: Whether its type is `Hyperparameter`, perhaps or None.
        range: None if it may be any number.
        meaning: A text for its reader.
        keeps_all_digits: Whether it is marked by `AllDigits`.
        option: Its mark, if it has one; a stage's option is its own.
    """

    is_hyperparameter: bool
    range: Range | None
    meaning: str
    keeps_all_digits: bool
    option: Mark | None


def declared(cls: type[Any]) -> Mapping[str, Declared]:
    """Returns what the constructors of a class and of its bases declare, by argument."""
    # Kept by the class, as what keeps one apart from it would keep it alive.
    init, found = vars(cls).get(_DECLARED, (None, {}))
    if init is not cls.__init__:
        inits = [vars(base)["__init__"] for base in cls.__mro__[::-1] if "__init__" in vars(base)]
        found = {name: each for init in inits for name, each in _read(init).items()}
        setattr(cls, _DECLARED, (cls.__init__, found))
    return found  # type: ignore[no-any-return]


_DECLARED = "_declared_arguments"

# What other libraries call arguments; first torch's name, which is bitsandbytes', too.
OTHER_NAMES = {
    "learning_rate": ("lr",),
    "learning_rate_decay": ("lr_decay",),
    "beta1": ("betas[0]", "b1", "beta_1"),
    "beta2": ("betas[1]", "b2", "beta_2"),
    "epsilon": ("eps",),
    "epsilon_root": ("eps_root",),
    "use_nesterov": ("nesterov",),
    "decay": ("alpha", "rho", "decay_rate"),
    "eeta": ("trust_coefficient",),
}


def hyperparameters_of(cls: type[Any]) -> list[str]:
    """Returns the names of an optimizer's own hyperparameters: those of no option."""
    return [
        name for name, each in declared(cls).items() if each.is_hyperparameter and not each.option
    ]


def check_range(cls: type[Any], name: str, value: Any) -> None:
    """Raises ValueError if an argument is outside of the range that a class declares."""
    given = declared(cls).get(name)
    if given is not None and given.range is not None and not given.range.has(float(value)):
        raise ValueError(f"{name} must be {given.range}, got {value!s}")


def check_numbers(cls: type[Any], **arguments: Any) -> None:
    """Checks arguments that are no hyperparameters, as what a slot starts with.

    Raises:
        TypeError: one is no real number, or a function.
        ValueError: one is an array of numbers, or outside of the range that the class declares.
    """
    for name, value in arguments.items():
        if callable(value):
            raise TypeError(f"{name} must be a number, got {value!r}")
        as_scalar(value, name)
        check_range(cls, name, value)


class Documented:
    """A class's docstring, with what its constructor declares as `Args`."""

    def __init__(
        self,
        text: str | None,
        common: Collection[str] = (),
        all_of: Callable[[], Mapping[str, Declared]] | None = None,
    ) -> None:
        """Keeps a docstring.

        Args:
            text: As the class has it.
            common: The arguments that `RuleOptimizer` describes.
            all_of: Returns the arguments to describe, if not those of the constructor.
        """
        self._text = text or ""
        self._common = common
        self._all_of = all_of

    def __get__(self, instance: object, owner: type[Any]) -> str:
        cleaned = inspect.cleandoc(self._text)
        given = self._all_of() if self._all_of else declared(owner)
        if not given or "\nArgs:\n" in cleaned:
            return cleaned
        names = given if self._all_of else inspect.signature(owner).parameters
        shared = () if self._all_of else {*self._common, *STAGE_OPTIONS}
        common = [name for name in names if name in shared]
        own = [name for name in names if name in given and name not in shared]
        texts = [f"{name}: {meaning_of(given[name])}" for name in own]
        if not texts:
            return cleaned
        texts += [f"{', '.join(common)}: See `RuleOptimizer`."] if common else []
        lines = map(_filled, texts)
        before, raises, after = cleaned.partition("\n\nRaises:\n")
        return "\n".join([f"{before}\n\nArgs:", *lines]) + raises + after


def meaning_of(argument: Declared) -> str:
    """Returns the text about an argument, with its range."""
    if argument.range is None:
        return argument.meaning
    return f"{argument.meaning.removesuffix('.')}; {argument.range}."


def show_types_alone(init: Any) -> None:
    """Has `help` show a constructor without what stands beside the types."""
    if not isinstance(init, FunctionType):
        return
    try:
        signature = inspect.signature(init)
    except NameError:  # Python 3.14 evaluates here what only type checkers can
        return
    parameters = [
        each.replace(annotation=type_in(each.annotation)) for each in signature.parameters.values()
    ]
    init.__dict__["__signature__"] = signature.replace(parameters=parameters)


def type_in(annotation: Any) -> Any:
    """Returns an annotation without what stands beside the type."""
    if isinstance(annotation, str):
        with suppress(SyntaxError):
            return ast.unparse(_TypesAlone().visit(ast.parse(annotation, mode="eval")))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


class _TypesAlone(ast.NodeTransformer):
    """Replaces `Annotated[type, ...]` by the type."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        is_annotated = isinstance(node.value, ast.Name) and node.value.id == "Annotated"
        if is_annotated and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return self.generic_visit(node)


def evaluated(init: Any) -> dict[str, Any]:
    """Returns the annotations of a constructor, but for those that only type checkers know."""
    found, init = {}, inspect.unwrap(init)
    with suppress(NameError):  # Python 3.14 evaluates them all at once, if they are not texts
        for name, annotation in getattr(init, "__annotations__", {}).items():
            is_text = isinstance(annotation, str)
            with suppress(Exception):  # as of `int | "Later"`, which type checkers can evaluate
                found[name] = eval(annotation, init.__globals__) if is_text else annotation
    return found


def _read(init: Any) -> dict[str, Declared]:
    found: dict[str, Declared] = {}
    for name, annotation in evaluated(init).items():
        if get_origin(annotation) is Unpack:
            [common] = get_args(annotation)
            with suppress(NameError):
                found |= declared_among(get_type_hints(common, include_extras=True))
        found |= declared_among({name: annotation})
    return found


def declared_among(types: Mapping[str, Any]) -> dict[str, Declared]:
    """Returns what stands beside types, by the names of arguments."""
    found = {}
    for name, annotation in types.items():
        if get_origin(annotation) is Annotated:
            given, *items = get_args(annotation)
            is_hyperparameter = given in (Hyperparameter, Hyperparameter | None)
            limits = next((each for each in items if isinstance(each, Range)), None)
            option = next((each for each in items if _is_option(each)), None)
            meaning = " ".join(each for each in items if isinstance(each, str))
            meaning = meaning or getattr(option, "meaning", "")
            has_all_digits = any(each is AllDigits for each in items)
            found[name] = Declared(is_hyperparameter, limits, meaning, has_all_digits, option)
    return found


def _is_option(mark: Any) -> bool:
    return isinstance(mark, Option) or (isinstance(mark, type) and issubclass(mark, StageOption))


def _filled(text: str) -> str:
    return textwrap.fill(text, 96, initial_indent=4 * " ", subsequent_indent=8 * " ")
