"""Which options an optimizer has, and what each cannot go with."""

from __future__ import annotations

from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option that an optimizer has.

    Attributes:
        given: As errors name it.
        by_hooks: Why it has no effect if a hook updates one variable at a time, and what to do.
        in_torch: Why torch's optimizers cannot continue with its state, and what to do; "" if they
            can.
    """

    given: str
    by_hooks: str
    in_torch: str = ""


def options_of(optimizer: Any) -> list[Option]:
    """Returns the options that a `RuleOptimizer` has, but for those of all optimizers."""
    codecs, options = optimizer.slot_codecs, []
    if optimizer.averages is not None:
        instead = "which `averages` do not follow: use gpuopt.MovingAverageOptimizer"
        options.append(Option("averages", instead))
    if optimizer.clips is not None:
        instead = "clip by hand, with gpuopt.clip_by_global_norm"
        by_hooks = f"which clip_norm and clip_value do not reach: {instead}"
        options.append(Option("clip_norm or clip_value", by_hooks))
    if codecs.slot_form is not None:
        by_hooks = "which has no slots in 8 bits: leave slot_bits=8 out"
        options.append(Option("slot_bits=8", by_hooks))
    if codecs.masters is not None:
        options.append(
            Option(
                f"masters={codecs.masters!r}",
                "which has no master copies: leave masters out",
                "torch's optimizers keep no master copies: export a run of float32 variables",
            )
        )
    if codecs.slot_dtype is not None:
        options.append(
            Option(
                f'slot_dtype="{codecs.slot_dtype}"',
                "whose slots have its variable's type: leave slot_dtype out",
                "torch's optimizers keep states in the types of parameters: load its state_dict "
                "into an optimizer without slot_dtype, and export that",
            )
        )
    for each in optimizer.stage_options:
        by_hooks = f"{each.by_hooks}: leave {each.name} out"
        options.append(Option(each.name, by_hooks, each.in_torch))
    return options


def refuse_options(optimizer: Any) -> None:
    """Raises NotImplementedError if an optimizer whose hooks get one variable has an option."""
    for option in options_of(optimizer):
        raise NotImplementedError(
            f"{type(optimizer).__name__} overrides a hook that updates one variable at a time, "
            f"{option.by_hooks}"
        )
