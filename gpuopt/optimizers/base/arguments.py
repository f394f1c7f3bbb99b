"""The arguments that every optimizer takes beside its hyperparameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
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
from gpuopt.optimizers.base.decaying import DecayVariables
from gpuopt.optimizers.base.declared import OTHER_NAMES, Hyperparameter, evaluated
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.optimizers.base.slot_options import SlotBits
from gpuopt.optimizers.base.stage_options import STAGE_OPTIONS
from gpuopt.state.slot_codecs import Masters, SlotDtype, SlotForm
from gpuopt.step.averages import MovingAverages

# By which formula gradients are scaled to a norm.
ClipFormName = Literal["tensorflow", "torch", "apex"]

# Whether gradients have their variables' types, or any float is converted to that of a step.
GradientDtype = Literal["strict", "cast"]

# Of the arguments that `RuleOptimizer` takes, and `Optimizer` does not, beside `STAGE_OPTIONS`.
_DEFAULTS: dict[str, Any] = {
    "groups": (),
    "clip_norm": None,
    "clip_value": None,
    "clip_form": "tensorflow",
    "slot_bits": 32,
    "slot_form": "root",
    "slot_dtype": None,
    "masters": None,
    "averages": None,
    "gradient_dtype": "strict",
    "decay_variables": None,
}


class Additions(TypedDict, total=False):
    """Arguments that every optimizer takes by name beside TensorFlow's.

    See `Optimizer`; for `groups`, `ParameterGroup`; and for the others, `RuleOptimizer`.
    """

    on_nonfinite: OnNonfinite
    groups: Sequence[ParameterGroup]
    clip_norm: Hyperparameter | None
    clip_value: Hyperparameter | None
    clip_form: ClipFormName
    slot_bits: SlotBits
    slot_form: SlotForm
    slot_dtype: SlotDtype | type[Any] | np.dtype[Any] | None
    masters: Masters | type[Any] | np.dtype[Any] | None
    stochastic_rounding: int | None
    averages: MovingAverages | None
    gradient_dtype: GradientDtype


class Common(Additions, total=False):
    """Arguments that every optimizer takes by name beside its hyperparameters; see `Optimizer`.

    TensorFlow's optimizers list `use_locking` and `name`, which have a position in their signature,
    and take `**common: Unpack[Additions]`. All others take `**common: Unpack[Common]`.
    """

    use_locking: bool
    name: str


_DECAYING = (
    'Which variables decay, by default all: "matrices", or a function of a Variable that returns '
    "True or False; see `RuleOptimizer`."
)


class DecayAdditions(Additions, total=False):
    """`Additions` of optimizers with weight decay; see `RuleOptimizer`."""

    decay_variables: Annotated[DecayVariables, _DECAYING]


class DecayCommon(Common, total=False):
    """`Common` of optimizers with weight decay; see `RuleOptimizer`."""

    decay_variables: Annotated[DecayVariables, _DECAYING]


GIVEN_BY_NAME = DecayCommon.__annotations__.keys()
"""The arguments of all optimizers, and of those with weight decay."""
GIVEN_ONCE = frozenset({*DecayAdditions.__annotations__, "use_locking"})
"""The arguments that are not hyperparameters. Of those that clip, one that is given is."""


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
    for name in common:
        if name not in DecayCommon.__annotations__ and name not in STAGE_OPTIONS:
            # A `**common` that is not annotated stands for all of Common.
            raise unknown_argument(optimizer_class, name, get_type_hints(Common))
    defaults = {"use_locking": False, "name": _default_name(optimizer_class)}
    ours = {**_DEFAULTS, **dict.fromkeys(STAGE_OPTIONS)}
    given = {name: value for name, value in common.items() if name not in ours}
    return {**defaults, **given}, {name: common.get(name, value) for name, value in ours.items()}


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
        init, signature = vars(owner).get(_SIGNATURE, (None, None))
        if init is not owner.__init__:
            # Kept by the class, as what keeps one apart from it would keep it alive.
            signature = self._make(owner)
            setattr(owner, _SIGNATURE, (owner.__init__, signature))
        return cast(inspect.Signature, signature)

    def _make(self, owner: type[Optimizer]) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        _, *parameters = signature.parameters.values()
        annotations = evaluated(owner.__init__)
        if parameters and get_origin(annotations.get(parameters[-1].name)) is Unpack:
            [common] = get_args(annotations[parameters.pop().name])
            hints = get_type_hints(common)
            more = {name: Any for name in STAGE_OPTIONS if name not in hints}
            parameters += [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=_default(name, owner),
                    annotation=annotation,
                )
                for name, annotation in {**hints, **more}.items()
            ]
        return signature.replace(parameters=parameters)


_SIGNATURE = "_full_signature"


def _default(name: str, optimizer_class: type[Optimizer]) -> Any:
    if name == "name":
        return _default_name(optimizer_class)
    if name in _DEFAULTS or name in STAGE_OPTIONS:
        return _DEFAULTS.get(name)
    default = inspect.signature(Optimizer.__init__).parameters[name].default
    return False if default is inspect.Parameter.empty else default


def _default_name(optimizer_class: type[Optimizer]) -> str:
    return optimizer_class.__name__.removesuffix("Optimizer")
