"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.optimizers.base import (
    Additions,
    Hyperparameter,
    RuleOptimizer,
    require_not_negative,
)
from gpuopt.optimizers.base.hyperparameters import with_all_digits
from gpuopt.optimizers.momentum import momentum as plain_momentum
from gpuopt.optimizers.momentum import nesterov_momentum
from gpuopt.quietly import quietly
from gpuopt.variables.variable import Variable


class LARSOptimizer(RuleOptimizer):
    """LARS (You, Gitman & Ginsburg 2017): each variable has a learning rate of its own.

        ratio = eeta * |w| / (|g| + weight_decay * |w| + epsilon)    1 if w or g is zero
        a = momentum * a + learning_rate * ratio * (g + weight_decay * w)
        w -= a                                              plain
        w -= learning_rate * ratio * (...) + momentum * a   Nesterov

    Variables whose name contains a text of `skip_list` have no ratio and no decay. As in
    TensorFlow, a sparse gradient makes a step of Momentum, on the rows it names, and then `a` is
    without the learning rate. It is TensorFlow's `contrib.opt.LARSOptimizer`.

    The norms are sums of numpy's or CuPy's, in the same order each time; the host waits for none. A
    gradient with its decay is rounded to the type of its variable.

    Args:
        learning_rate: Step size.
        momentum: What remains of the accumulator after a step; not below 0.
        weight_decay: How much of the weights is added to a gradient; not below 0.
        eeta: How far a variable moves in a step, in units of its own norm.
        epsilon: Bounds the ratio where gradients are small.
        name, on_nonfinite: See `Optimizer`.
        groups: See `ParameterGroup`.
        skip_list: Texts, such as "bias".
        use_nesterov: Look ahead along the accumulator.

    Raises:
        ValueError: `momentum` or `weight_decay` is below 0.
        TypeError: `skip_list` is no list of texts.
    """

    rule = plain_momentum
    prepares_gradients = True

    def __init__(
        self,
        learning_rate: Hyperparameter,
        momentum: Hyperparameter = 0.9,
        weight_decay: Hyperparameter = 0.0001,
        eeta: Hyperparameter = 0.001,
        epsilon: Hyperparameter = 0.0,
        name: str = "LARSOptimizer",
        skip_list: Sequence[str] | None = None,
        use_nesterov: bool = False,
        **common: Unpack[Additions],
    ) -> None:
        texts = [] if skip_list is None else skip_list
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"skip_list must be a list of texts, got {skip_list!r}")
        super().__init__(
            {"use_locking": False, "name": name, **common},
            learning_rate=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            eeta=eeta,
            epsilon=epsilon,
        )
        self._skipped = tuple(texts)
        if use_nesterov:
            self.rule = nesterov_momentum

    @classmethod
    def _checked(cls, name: str, value: Hyperparameter) -> Hyperparameter:
        if name in ("momentum", "weight_decay"):
            require_not_negative(**{name: value})
        return with_all_digits(super()._checked(name, value))

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        # The learning rate is in the prepared gradients.
        return {"learning_rate": real(1), "decay": real(self._hyper("momentum"))}

    def _sparse_scalars(
        self, scalars: Mapping[str, np.floating[Any]]
    ) -> Mapping[str, np.floating[Any]]:
        # TensorFlow rounds these to float32, and those of the dense form not.
        real = type(scalars["decay"])
        return {
            "learning_rate": real(np.float32(self._hyper("learning_rate"))),
            "decay": real(np.float32(self._hyper("momentum"))),
        }

    def _prepared(self, gradient: Any, variable: Variable) -> Any:
        with backend_for(variable.device).enter(variable.identity):
            return quietly(self._scaled, gradient, variable)

    def _scaled(self, gradient: Any, variable: Variable) -> Any:
        xp = backend_for(variable.device).xp
        real = compute_type(variable.dtype)
        learning_rate, weight_decay, eeta, epsilon = (
            real(self._hyper(key)) for key in ("learning_rate", "weight_decay", "eeta", "epsilon")
        )
        g = gradient.astype(real, copy=False)
        if any(text in variable.name for text in self._skipped):
            return xp.asarray(learning_rate * g).astype(variable.dtype, copy=False)
        w = variable.storage.astype(real, copy=False)
        w_norm, g_norm = xp.sqrt(xp.sum(w * w)), xp.sqrt(xp.sum(g * g))
        ratio = eeta * w_norm / (g_norm + weight_decay * w_norm + epsilon)
        # A choice on the device: the host does not learn the norms.
        ratio = xp.where((w_norm > 0) & (g_norm > 0), ratio, real(1))
        scaled = (g + weight_decay * w) * (learning_rate * ratio)
        # Of no dimensions, numpy's results are numbers.
        return xp.asarray(scaled).astype(variable.dtype, copy=False)
