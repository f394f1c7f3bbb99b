"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    DecayAdditions,
    DecayCommon,
    Hyperparameter,
    Range,
    RuleOptimizer,
    update_rule,
)
from gpuopt.optimizers.momentum import momentum as plain_momentum
from gpuopt.optimizers.momentum import nesterov_momentum
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.request import Listed
from gpuopt.variables.variable import Variable

# Of variables that have neither a ratio nor a decay: see `RuleOptimizer._variant_of`.
_SKIPPED = 2


def _lars_terms(var: Any, grad: Any, momentum: Any, **_: Any) -> Sequence[Any]:
    return var * var, grad * grad


@update_rule(
    sums=("weights_squared", "gradient_squared"),
    terms=_lars_terms,
    degrees=(0, 2),
)
def lars(
    var: Any,
    grad: Any,
    momentum: Any,
    *,
    learning_rate: Any,
    decay: Any,
    weight_decay: Any,
    eeta: Any,
    epsilon: Any,
    is_nesterov: Any,
    is_adapted: Any,
    weights_squared: Any,
    gradient_squared: Any,
) -> None:
    if is_adapted > 0 and weights_squared > 0 and gradient_squared > 0:
        norm = np.sqrt(weights_squared)
        scale = np.sqrt(gradient_squared) + weight_decay * norm + epsilon
        learning_rate = learning_rate * (eeta * norm / scale)
    _move(var, learning_rate * (grad + weight_decay * var), momentum, decay, is_nesterov)


def _move(var: Any, step: Any, momentum: Any, decay: Any, is_nesterov: Any) -> None:
    momentum *= decay
    momentum += step
    var -= step + decay * momentum if is_nesterov else momentum


class LARSOptimizer(RuleOptimizer):
    """LARS (You, Gitman & Ginsburg 2017): each variable has a learning rate of its own.

        ratio = eeta * |w| / (|g| + weight_decay * |w| + epsilon)    1 if w or g is zero
        a = momentum * a + learning_rate * ratio * (g + weight_decay * w)
        w -= a                                              plain
        w -= learning_rate * ratio * (...) + momentum * a   Nesterov

    Variables whose name contains a text of `skip_list` have no ratio and no decay. As in
    TensorFlow, a sparse gradient makes a step of Momentum, on the rows it names, and then `a` is
    without the learning rate. It is TensorFlow's `contrib.opt.LARSOptimizer`.

    The norms are over a whole variable, and the host waits for none.

    Raises:
        TypeError: `skip_list` is no list of texts.
    """

    rule = lars
    _keeps_all_digits = True

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        momentum: Annotated[
            Hyperparameter, Range(0), "What remains of the accumulator after a step."
        ] = 0.9,
        weight_decay: Annotated[
            Hyperparameter, Range(0), "How much of the weights is added to a gradient."
        ] = 0.0001,
        eeta: Annotated[
            Hyperparameter, "How far a variable moves in a step, in units of its own norm."
        ] = 0.001,
        epsilon: Annotated[Hyperparameter, "Bounds the ratio where gradients are small."] = 0.0,
        name: str = "LARSOptimizer",
        skip_list: Annotated[Iterable[str] | None, 'Texts, such as "bias".'] = None,
        use_nesterov: Annotated[bool, "Look ahead along the accumulator."] = False,
        **common: Unpack[DecayAdditions],
    ) -> None:
        is_one = isinstance(skip_list, str) or not isinstance(skip_list, Iterable | None)
        texts: list[Any] = [skip_list] if is_one else [*(skip_list or ())]
        if is_one or [text for text in texts if not isinstance(text, str)]:
            raise TypeError(f"skip_list must be a list of texts, got {skip_list!r}")
        every: DecayCommon = {"use_locking": False, "name": name, **common}
        super().__init__(
            every,
            learning_rate=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            eeta=eeta,
            epsilon=epsilon,
        )
        self._skipped = tuple(texts)
        self._is_nesterov = use_nesterov

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        names = ("learning_rate", "weight_decay", "eeta", "epsilon")
        return {
            **{name: real(self._hyper(name)) for name in names},
            "decay": real(self._hyper("momentum")),
            "is_nesterov": real(self._is_nesterov),
            "is_adapted": real(1),
        }

    def _sparse_scalars(
        self, scalars: Mapping[str, np.floating[Any]]
    ) -> Mapping[str, np.floating[Any]]:
        # TensorFlow rounds these to float32, and those of the dense form not.
        real = type(scalars["decay"])
        return {
            "learning_rate": real(np.float32(scalars["learning_rate"])),
            "decay": real(np.float32(scalars["decay"])),
        }

    def _rule_of_call(
        self, variables: Sequence[Any], is_sparse: bool, listed: Listed
    ) -> tuple[UpdateRule, bytes]:
        rule, choice = super()._rule_of_call(variables, is_sparse, listed)
        if is_sparse:
            rule = nesterov_momentum if self._is_nesterov else plain_momentum
        return rule, choice

    def _variant_of(self, variable: Variable, listed: Listed = None) -> int:
        is_skipped = any(text in variable.name for text in self._skipped)
        return _SKIPPED if is_skipped else super()._variant_of(variable, listed)

    def _scalars_of_variant(
        self, variant: int, scalars: Mapping[str, np.floating[Any]]
    ) -> Mapping[str, np.floating[Any]]:
        if "weight_decay" not in scalars:  # those of a sparse gradient, which nothing decays by
            return scalars
        scalars = super()._scalars_of_variant(variant, scalars)
        if variant == _SKIPPED:
            scalars = {**scalars, "is_adapted": scalars["is_adapted"].dtype.type(0)}
        return scalars
