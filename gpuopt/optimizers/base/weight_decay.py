"""Decoupled weight decay (Loshchilov & Hutter 2019) for any optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np

from gpuopt.autodiff.engine import Loss
from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer, leaves_gradients_alone
from gpuopt.optimizers.base.decaying import Decaying, DecayVariables
from gpuopt.optimizers.base.declared import AllDigits, Hyperparameter
from gpuopt.optimizers.base.hyperparameters import with_all_digits
from gpuopt.optimizers.base.rule_optimizer import WEIGHT_DECAY, RuleOptimizer, hooks_of
from gpuopt.rules.decayed import decayed
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.pairs import Gradient
from gpuopt.step.replica_context import replica_context
from gpuopt.step.request import (
    Listed,
    StepRequest,
    is_overridden,
    joined,
    make_step,
    pass_on,
    through_users_code,
)
from gpuopt.step.updates import Updates
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import Variable, as_variable, known_identity

# Of decays that are multiplied by the learning rate, as torch's.
DECAY_BY_RATE = "Times the learning rate, the part of the weights that a step takes away."


class WeightDecay(Optimizer):
    """The part of an optimizer with decoupled weight decay that is for all ways of updates."""

    _decaying: Decaying | None = None

    def __init__(
        self,
        weight_decay: Hyperparameter,
        *args: Any,
        decay_variables: DecayVariables = None,
        **kwargs: Any,
    ) -> None:
        self._weight_decay = with_all_digits(weight_decay)
        if not callable(weight_decay):
            as_scalar(weight_decay, WEIGHT_DECAY)
        super().__init__(*args, **kwargs)
        if decay_variables is not None:
            self._decaying = Decaying(decay_variables)

    def minimize(
        self,
        loss: Loss,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
        decay_var_list: Iterable[Any] | None = None,
    ) -> None:
        """Does what `Optimizer.minimize` does; `apply_gradients` explains `decay_var_list`."""
        options: dict[str, Any] = {
            "var_list": var_list,
            "gate_gradients": gate_gradients,
            "aggregation_method": aggregation_method,
            "colocate_gradients_with_ops": colocate_gradients_with_ops,
            "grad_loss": grad_loss,
        }
        request = StepRequest(None, global_step, name, decaying=_identities(decay_var_list))
        if not is_overridden(self, "minimize"):
            make_step(self, request, partial(self._minimize, loss=loss, **options))
            return
        minimize = partial(super().minimize, loss, global_step, name=name, **options)
        through_users_code(self, joined(self, request), minimize)

    @leaves_gradients_alone
    def apply_gradients(  # type: ignore[override]  # TensorFlow's fourth argument
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        decay_var_list: Iterable[Any] | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Does what `Optimizer.apply_gradients` does.

        `decay_var_list` are the variables that decay, of those that have a gradient, whatever
        `decay_variables` are; an empty list lets none decay. The rate is that of its group.

        Raises:
            TypeError: `decay_var_list` is no list of variables.
            ValueError: it is given in a replica, where each variable has several copies.
        """
        if decay_var_list is None:
            # Only then: a base class of a user's own may not take it.
            options = {"skip_gradients_aggregation": True} if skip_gradients_aggregation else {}
            super().apply_gradients(grads_and_vars, global_step, name, **options)
            return
        request = StepRequest(
            grads_and_vars,
            global_step,
            name,
            skip_gradients_aggregation,
            decaying=_identities(decay_var_list),
        )
        make_step(self, request, partial(pass_on, self, method=super().apply_gradients))

    def _decays(self, variable: Variable, listed: Listed = None) -> bool:
        if listed is not None:
            return variable.identity in listed
        return self._decaying is None or self._decaying.has(variable)


class RuleWithWeightDecay(WeightDecay, RuleOptimizer):
    """Weight decay as a part of the rule: nothing is read or written twice."""

    def __init__(
        self,
        weight_decay: Annotated[
            Hyperparameter, AllDigits, "The part of the weights that a step takes away."
        ],
        *args: Any,
        decay_variables: DecayVariables = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight_decay, *args, decay_variables=decay_variables, **kwargs)
        self.rule = decayed(self.rule)

    def _all_hyperparameters(self, given: dict[str, Hyperparameter]) -> dict[str, Hyperparameter]:
        return {**super()._all_hyperparameters(given), WEIGHT_DECAY: self._weight_decay}

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        return {**super()._scalars(real), WEIGHT_DECAY: real(self._hyper(WEIGHT_DECAY))}

    def _rule_of_call(
        self, variables: Sequence[Any], is_sparse: bool, listed: Listed
    ) -> tuple[UpdateRule, bytes]:
        rule, _ = super()._rule_of_call(variables, is_sparse, listed)
        if rule is not self.rule:
            rule = decayed(rule)
        if listed is None:
            return rule, b""
        return rule, bytes(known_identity(each) in listed for each in variables)


class HooksWithWeightDecay(WeightDecay):
    """Weight decay before the hooks of an optimizer that updates one variable at a time."""

    def _checked_updates(self, request: StepRequest) -> Updates:
        updates = super()._checked_updates(request)
        for variable in updates.variables() if self._decaying is not None else ():
            self._decays(variable, request.decaying)  # its errors come before anything is written
        return updates

    def _variant_of(self, variable: Variable, listed: Listed = None) -> int:
        """Returns 0: the scalars of a rule inside have no part in the decay."""
        return 0

    def _prepare(self) -> None:
        super()._prepare()
        this_thread = self.this_thread
        decay = as_scalar(self._call_if_callable(self._weight_decay), WEIGHT_DECAY)
        this_thread.hyperparameters = {**this_thread.hyperparameters, WEIGHT_DECAY: decay}

    def _apply_one(self, gradient: Gradient, variable: Variable) -> Any:
        if self._decays(variable, self.this_thread.decaying):
            rows = gradient.indices if isinstance(gradient, IndexedSlices) else None
            with backend_for(variable.device).enter(variable.identity):
                variable.bring_up(rows)
                ignore_fp_warnings(partial(self._decay, variable.unread_storage, rows))
        return super()._apply_one(gradient, variable)

    def _decay(self, array: Any, rows: Any) -> None:
        real = compute_type(array.dtype)
        # A row that is named twice is written twice, with the same value.
        at = ... if rows is None else rows
        weights = array[at].astype(real, copy=False)
        array[at] = weights - real(self.this_thread.hyperparameters[WEIGHT_DECAY]) * weights


def extend_with_decoupled_weight_decay(base_optimizer: type[Optimizer]) -> Any:
    """Returns a class: an optimizer with decoupled weight decay.

    Its first argument is `weight_decay`, and the others are those of `base_optimizer`. A step first
    does `w -= weight_decay * w`, on the rows that a sparse gradient names, and then what
    `base_optimizer` does. `decay_variables` are those that decay, as for `RuleOptimizer`;
    `minimize` and `apply_gradients` take a `decay_var_list` for one call. It is TensorFlow's
    `contrib.opt.extend_with_decoupled_weight_decay`.

        AdagradW = extend_with_decoupled_weight_decay(AdagradOptimizer)
        optimizer = AdagradW(weight_decay=0.01, learning_rate=0.1)

    Args:
        base_optimizer: A class of gpuopt, or of your own.

    Raises:
        TypeError: `base_optimizer` is no class of optimizers, or one of wrappers around others, or
            has a weight decay of its own.
    """
    if not (isinstance(base_optimizer, type) and issubclass(base_optimizer, Optimizer)):
        raise TypeError(f"base_optimizer must be a class of optimizers, got {base_optimizer!r}")
    if base_optimizer.owner_of_state is not Optimizer.owner_of_state:
        raise TypeError(
            f"{base_optimizer.__name__} wraps another optimizer: extend the class of that one"
        )
    if WEIGHT_DECAY in inspect.signature(base_optimizer).parameters:
        raise TypeError(f"{base_optimizer.__name__} has a weight_decay already")
    by_rule = issubclass(base_optimizer, RuleOptimizer) and (
        hooks_of(base_optimizer) == hooks_of(RuleOptimizer)
    )
    name = f"{base_optimizer.__name__.removesuffix('Optimizer')}WOptimizer"
    bases = (RuleWithWeightDecay if by_rule else HooksWithWeightDecay, base_optimizer)
    return type(name, bases, {"__doc__": f"{base_optimizer.__name__} with decoupled weight decay."})


def _identities(decay_var_list: Iterable[Any] | None) -> Listed:
    if decay_var_list is None:
        return None
    if replica_context().strategy is not None:
        raise ValueError(
            "decay_var_list cannot be given in a replica of a strategy: the list would have the "
            "replica's own copies of the variables alone. Use an optimizer for each list"
        )
    is_one = isinstance(decay_var_list, str) or hasattr(decay_var_list, "dtype")
    if is_one or not isinstance(decay_var_list, Iterable):
        raise TypeError(f"decay_var_list must be a list of variables, got {decay_var_list!r}")
    identities = set()
    for position, each in enumerate(decay_var_list):
        try:
            identities.add(as_variable(each).identity)
        except TypeError as error:
            raise TypeError(f"decay_var_list[{position}]: {error}") from error
    return frozenset(identities)
