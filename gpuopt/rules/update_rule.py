"""An update rule: the arithmetic of one optimizer step on one element."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources.abc import Traversable
from typing import overload

from gpuopt.rules.sources import CudaSource, kernel_root


# Compared and hashed by identity, which is fast: each launch finds its kernel by the rule.
@dataclass(frozen=True, eq=False)
class UpdateRule:
    """The numpy form of a rule, and where its CUDA form is.

    Attributes:
        apply: The numpy form. Takes flat chunks of any length and updates `var` and its slots in
            place; the gradient is read-only. It must depend on its arguments alone: for large
            arrays its numpy calls are recorded, once for the same scalars, and replayed.
        slots: Slot names, in the order both forms take them.
        scalars: Per-step scalar names, in the order both forms take them.
        cuda: The CUDA form. Without one, the rule updates variables in host memory alone, and is
            not compiled there.
    """

    apply: Callable[..., None]
    slots: tuple[str, ...]
    scalars: tuple[str, ...]
    cuda: CudaSource | None = None

    @property
    def name(self) -> str:
        return self.apply.__name__

    def require_cuda(self, to_update: str = "variables on a GPU") -> CudaSource:
        """Returns the CUDA form.

        Args:
            to_update: What it is needed for, in the words of the error.

        Raises:
            NotImplementedError: the rule has no CUDA form.
        """
        if self.cuda is None:
            raise NotImplementedError(
                f'the update rule "{self.name}" of {self.apply.__module__} cannot update '
                f"{to_update}, as it has no CUDA form: name one by "
                "@update_rule(cuda=gpuopt.CudaSource(folder, header, functor)), or keep the "
                "variables in host memory"
            )
        return self.cuda

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        """The folders where compilers look for headers: gpuopt's first, then the rule's own."""
        return tuple(dict.fromkeys((kernel_root(), self.require_cuda().folder)))

    @property
    def include(self) -> str:
        """C++ that includes the CUDA form, and compiles only if its slots and scalars fit."""
        source = self.require_cuda()
        checks = {
            f"{source.functor}::num_slots == {len(self.slots)}": f"slots ({', '.join(self.slots)})",
            **{
                f"sizeof({source.functor}::Scalars<{real}>) / sizeof({real}) == "
                f"{len(self.scalars)}": f"scalars ({', '.join(self.scalars)})"
                for real in ("float", "double")
            },
        }
        lines = [f'#include "{source.header}"'] + [
            f'static_assert({check}, "not as many as the {what} of {self.name} in Python");'
            for check, what in checks.items()
        ]
        return "\n".join(lines) + "\n"


@overload
def update_rule(apply: Callable[..., None], /) -> UpdateRule: ...


@overload
def update_rule(
    *, cuda: CudaSource | None = None
) -> Callable[[Callable[..., None]], UpdateRule]: ...


def update_rule(
    apply: Callable[..., None] | None = None, /, *, cuda: CudaSource | None = None
) -> UpdateRule | Callable[[Callable[..., None]], UpdateRule]:
    """Makes an update rule of its numpy form; a decorator, with or without arguments.

    The signature is the rule's contract: after `var` and `grad`, positional parameters are slots
    and keyword-only parameters are scalars. The rule writes in place, as `var -= ...` does: what it
    returns is ignored, and `var = ...` only gives the name to another array.

    Args:
        apply: The numpy form.
        cuda: Where the CUDA form is. With it, the rule also runs on GPUs, and compiled on the CPU.

    Raises:
        TypeError: the signature does not have this form, or `cuda` is no CudaSource.
    """
    if not isinstance(cuda, CudaSource | None):
        raise TypeError(f"cuda must be a gpuopt.CudaSource, got {cuda!r}")
    if apply is None:
        return partial(_rule_of, cuda=cuda)
    return _rule_of(apply, cuda)


def _rule_of(apply: Callable[..., None], cuda: CudaSource | None) -> UpdateRule:
    """Reads a rule's contract from the signature of its numpy form."""
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
    return UpdateRule(apply, slots, scalars, cuda)
