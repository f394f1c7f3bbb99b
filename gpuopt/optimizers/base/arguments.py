"""The arguments that every optimizer takes beside its hyperparameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from gpuopt.optimizer import OnNonfinite, Optimizer
from gpuopt.optimizers.base.decaying import MATRICES, DecayVariables
from gpuopt.optimizers.base.declared import (
    OTHER_NAMES,
    Declared,
    Hyperparameter,
    Mark,
    Option,
    declared_among,
    evaluated,
)
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.optimizers.base.slot_options import SlotBits
from gpuopt.state.slot_codecs import Masters, SlotDtype, SlotForm
from gpuopt.step.averages import MovingAverages
from gpuopt.step.options import STAGE_OPTIONS
from gpuopt.step.rounding import StochasticRounding

# By which formula gradients are scaled to a norm.
ClipFormName = Literal["tensorflow", "torch", "apex"]

# Whether gradients have their variables' types, or any float is converted to that of a step.
GradientDtype = Literal["strict", "cast"]

_UNCLIPPED = (
    "which clip_norm and clip_value do not reach, so clip by hand, with gpuopt.clip_by_global_norm"
)


class Additions(TypedDict, total=False):
    """Arguments that every optimizer takes by name beside TensorFlow's.

    See `Optimizer` for `on_nonfinite`. Each other one is declared here: its default, what it cannot
    go with, and its meaning, of which `gpuopt show --help` has the first sentence.
    """

    on_nonfinite: OnNonfinite
    groups: Annotated[
        Sequence[ParameterGroup],
        Option(()),
        "Other hyperparameters for some variables: a list of `ParameterGroup`.",
    ]
    clip_norm: Annotated[
        Hyperparameter | None,
        Option(alone=1.0, by_hooks=_UNCLIPPED),
        "A step's gradients are scaled down together if their norm is larger than this. They are "
        "only read, and a sparse gradient's equal rows are added up first. It is a hyperparameter. "
        "A group that has a `clip_norm` or `clip_value` is clipped for itself, to the norm of its "
        "own gradients; one that has None is not clipped. An infinite `clip_norm` clips nothing: "
        "`global_norm` is known then. It cannot be combined with `clip_value`.",
    ]
    clip_value: Annotated[
        Hyperparameter | None,
        Option(alone=1.0, by_hooks=_UNCLIPPED),
        "Elements of gradients are clipped to this magnitude. It is a hyperparameter, also of "
        "groups. It cannot be combined with `clip_norm`.",
    ]
    clip_form: Annotated[
        ClipFormName,
        Option("tensorflow", alone="torch"),
        "The formula of `clip_norm`. For a `clip_norm` of `c`, gradients of norm `n` are "
        'multiplied by `c * min(1 / n, 1 / c)` with "tensorflow", which is NaN if the norm is not '
        'finite; by `min(c / (n + 1e-6), 1)` with "torch"; and by `1 / (n / c)` if `n > c` with '
        '"apex".',
    ]
    slot_bits: Annotated[
        SlotBits,
        Option(32, alone=8, by_hooks="which has no slots in 8 bits"),
        "8 stores each slot in a byte, with a scale for each 256. It cannot be combined with slots "
        "that have a number for each row. Steps are computed in float32, from "
        "slots before they are rounded. An element whose slots would not be finite has 0 there.",
    ]
    slot_form: Annotated[
        SlotForm,
        Option("root", alone="bitsandbytes"),
        'How a sum of squares is stored with `slot_bits=8`. "root" stores its square root; '
        '"bitsandbytes" stores the sum, as that library does, for dense gradients only.',
    ]
    slot_dtype: Annotated[
        SlotDtype | type[Any] | np.dtype[Any] | None,
        Option(
            alone="bfloat16",
            by_hooks="whose slots have its variable's type",
            in_torch="torch's optimizers keep states in the types of parameters: load its "
            "state_dict into an optimizer without slot_dtype, and export that",
        ),
        'The type of slots. "bfloat16" is for slots of variables of at most 32 bits: rounded to '
        'nearest, or by `stochastic_rounding`; "float32" is for those of 16-bit variables, '
        "without `stochastic_rounding`. It may be a type, as `np.float32`. It cannot be "
        "combined with `slot_bits=8`, or with slots that have a number for each row.",
    ]
    masters: Annotated[
        Masters | type[Any] | np.dtype[Any] | None,
        Option(
            alone="float32",
            by_hooks="which has no master copies",
            in_torch="torch's optimizers keep no master copies: export a run of float32 variables",
        ),
        '16-bit variables have master copies. "float32" keeps one of each in a slot "master": a '
        "step updates the copy, and rounds it to the variable. Other slots are float32, or stored "
        "by `slot_dtype` or `slot_bits`. An assignment to the variable or to its copy goes to "
        'both. "remainder" keeps only the 16 bits of the copy that a bfloat16 variable, rounded '
        "half up, does not have. It may be a type, as `np.float32`.",
    ]
    stochastic_rounding: Annotated[int | None, StochasticRounding]
    averages: Annotated[
        MovingAverages | None,
        Option(
            alone=0.999,
            by_hooks="which averages do not follow (use gpuopt.MovingAverageOptimizer)",
        ),
        "Moving averages that follow each step. It is an `ExponentialMovingAverage`, whose `apply` "
        "is made a part of the step, for the variables that have a gradient: with the same "
        "values, and mostly in the launch that updates them. It may belong to several optimizers. "
        "With `masters`, it is of the master copies, and float32.",
    ]
    gradient_dtype: Annotated[
        GradientDtype,
        Option("strict", alone="cast"),
        '"cast" takes gradients of any float type. Each, or the values of `IndexedSlices`, is '
        "converted to the type that the step computes in, float32 or float64, before all else. So "
        'a float64 gradient of 1e300 is infinite beside a float32 variable. With "strict", a '
        "gradient of another type than its variable's is an error.",
    ]


class Common(Additions, total=False):
    """Arguments that every optimizer takes by name beside its hyperparameters; see `Optimizer`.

    TensorFlow's optimizers list `use_locking` and `name`, which have a position in their signature,
    and take `**common: Unpack[Additions]`. All others take `**common: Unpack[Common]`.
    """

    use_locking: bool
    name: str


class DecayAdditions(Additions, total=False):
    """`Additions` of optimizers with weight decay."""

    decay_variables: Annotated[
        DecayVariables,
        Option(alone=MATRICES),
        "Which variables decay, by default all, where there is a `weight_decay`. "
        '"matrices" are those of two or more dimensions; a function of a Variable returns True or '
        "False, and is called once for each. Others are updated with a `weight_decay` of 0, also "
        "in a group that has one.",
    ]


class DecayCommon(Common, DecayAdditions, total=False):
    """`Common` of optimizers with weight decay."""


def options() -> Mapping[str, Declared]:
    """Returns what is declared of the options of all optimizers, also of stages of others."""
    stages = {
        name: Declared(False, None, each.meaning, False, each)
        for name, each in STAGE_OPTIONS.items()
    }
    return {**_our_options(), **stages}


@cache
def _our_options() -> Mapping[str, Declared]:
    every = declared_among(get_type_hints(DecayCommon, include_extras=True))
    return {name: each for name, each in every.items() if each.option is not None}


def with_defaults(
    common: Common, optimizer_class: type[Optimizer]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `Optimizer`, and those of `RuleOptimizer` alone.

    The name is by default the class's, less "Optimizer".

    Raises:
        TypeError: `common` is no mapping, or an argument is unknown; the message lists those that
            the class takes.
    """
    if not isinstance(common, Mapping):
        raise TypeError(
            f"{optimizer_class.__name__}: RuleOptimizer takes a mapping of the common arguments "
            f"first, got {common!r}: define __init__(self, learning_rate, **common), and call "
            "super().__init__(common, learning_rate=learning_rate) there"
        )
    ours = {name: each.option.default for name, each in options().items() if each.option}
    for name in common:
        if name not in DecayCommon.__annotations__ and name not in ours:
            # A `**common` that is not annotated stands for all of Common.
            raise unknown_argument(optimizer_class, name, get_type_hints(Common))
    defaults = {"use_locking": False, "name": _default_name(optimizer_class)}
    given = {name: value for name, value in common.items() if name not in ours}
    return {**defaults, **given}, {name: common.get(name, value) for name, value in ours.items()}


def given_options(ours: Mapping[str, Any], groups: Iterable[ParameterGroup]) -> dict[str, Mark]:
    """Returns the options that an optimizer or a group of it has, with what each declares.

    Args:
        ours: The values of all, as they were given.
        groups: The optimizer's.
    """
    of_groups = {name for group in groups for name in group.hyperparameters}
    marks = {name: each.option for name, each in options().items() if each.option is not None}
    return {
        name: mark
        for name, mark in marks.items()
        if name in of_groups
        # Only a default that is text or a number is compared: a given value may be an array.
        or not (ours[name] is mark.default or (mark.default and ours[name] == mark.default))
    }


def unknown_argument(cls: type[Any], name: str, more: Iterable[str] = ()) -> TypeError:
    """Returns the error about an argument that a class does not take, with those that it takes.

    Args:
        cls: The class.
        name: The argument's.
        more: Others that it takes, beside those of its signature.
    """
    parameters = inspect.signature(cls).parameters.values()
    own = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    known = list(dict.fromkeys([*own, *more]))
    names = {ours: [each.partition("[")[0] for each in OTHER_NAMES[ours]] for ours in OTHER_NAMES}
    meant = [ours for ours, theirs in names.items() if name in theirs]
    hint = ""
    if meant and set(meant) <= {*known}:
        hint = f": it calls that {' and '.join(meant)}"
    elif name in ("params", "parameters", "variables"):
        hint = ": variables come with their gradients, in apply_gradients or update"
    elif name in ("weight_decay", "decay_variables"):
        hint = ", and has no weight decay: AdamWOptimizer, MomentumWOptimizer and others have"
    return TypeError(f"{cls.__name__} takes no {name}{hint}; it takes {', '.join(known)}")


def refuse_unknown_arguments(cls: type[Any], names: Iterable[str]) -> None:
    """Raises TypeError for an argument that is not in the signature of a class."""
    parameters = inspect.signature(cls).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for name in names:
            if name not in parameters:
                raise unknown_argument(cls, name)


class FullSignature:
    """Makes `help` and `inspect.signature` of a class list the arguments behind `**common`."""

    def __get__(self, instance: object, owner: type[Optimizer]) -> inspect.Signature:
        made_of, signature = vars(owner).get(_SIGNATURE, (None, None))
        if made_of != (owner.__init__, *STAGE_OPTIONS):
            # Kept by the class, as what keeps one apart from it would keep it alive.
            signature = self._make(owner)
            setattr(owner, _SIGNATURE, ((owner.__init__, *STAGE_OPTIONS), signature))
        return cast(inspect.Signature, signature)

    def _make(self, owner: type[Optimizer]) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        _, *parameters = signature.parameters.values()
        annotations = evaluated(owner.__init__)
        if parameters and get_origin(annotations.get(parameters[-1].name)) is Unpack:
            [common] = get_args(annotations[parameters.pop().name])
            hints = get_type_hints(common)
            more = dict.fromkeys(STAGE_OPTIONS, Any)
            parameters += [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=_default(name, owner),
                    annotation=annotation,
                )
                # In the order of `hints`, with the types that it has.
                for name, annotation in (hints | more | hints).items()
            ]
        return signature.replace(parameters=parameters)


_SIGNATURE = "_full_signature"


def _default(name: str, optimizer_class: type[Optimizer]) -> Any:
    if name == "name":
        return _default_name(optimizer_class)
    if (declared_here := options().get(name)) and declared_here.option:
        return declared_here.option.default
    default = inspect.signature(Optimizer.__init__).parameters[name].default
    return False if default is inspect.Parameter.empty else default


def _default_name(optimizer_class: type[Optimizer]) -> str:
    return optimizer_class.__name__.removesuffix("Optimizer")
