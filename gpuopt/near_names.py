"""Error messages for names that gpuopt does not have, with the nearest ones."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 3
# What other libraries call it, as `_stem` has it; for the names that have another one here.
OTHER_LIBRARIES = {
    "adam8bit": ("AdamOptimizer",),
    "averagedmodel": ("ExponentialMovingAverage", "MovingAverageOptimizer"),
    "clipgradnorm": ("clip_by_global_norm",),
    "clipgradvalue": ("clip_by_value",),
    "cosineannealinglr": ("cosine_decay",),
    "cosineannealingwarmrestarts": ("cosine_decay_restarts",),
    "distributeddataparallel": ("MirroredStrategy",),
    "ema": ("ExponentialMovingAverage", "MovingAverageOptimizer"),
    "exponentiallr": ("exponential_decay",),
    "fusedadam": ("AdamOptimizer",),
    "gradscaler": ("LossScaleOptimizer", "DynamicLossScale"),
    "grad": ("value_and_gradients",),
    "linearlr": ("linear_warmup",),
    "momentumsgd": ("MomentumOptimizer",),
    "multisteplr": ("piecewise_constant",),
    "nag": ("MomentumOptimizer",),
    "nesterov": ("MomentumOptimizer",),
    "onecyclelr": ("one_cycle",),
    "parameter": ("Variable",),
    "polynomiallr": ("polynomial_decay",),
    "sgd": ("GradientDescentOptimizer", "MomentumOptimizer", "TorchSGDOptimizer"),
    "sgdw": ("MomentumWOptimizer",),
    "sparseadam": ("LazyAdamOptimizer",),
    "steplr": ("exponential_decay", "piecewise_constant"),
    "tensor": ("Variable",),
    "valueandgrad": ("value_and_gradients",),
}
_MODULES_OF_OTHERS = {
    "train": ("tf.train", "Coming from TensorFlow"),
    "optim": ("torch.optim", "Coming from PyTorch"),
}
# Of the end of a name, as in "SGD".
_FEWEST_LETTERS = 3

_STEP = (
    "minimize(loss), update(params, grads) or apply_gradients([(gradient, variable)]) makes a step"
)
_GROUPS = "groups has the hyperparameters of each group, which can be set"
# What optimizers of torch, Keras and optax have.
_OTHER_MEMBERS = {
    "add_param_group": "groups are given when it is made: groups=[ParameterGroup(...)]",
    "apply": _STEP,
    "init": "slots are made in the first step",
    "iterations": "a variable counts steps: apply_gradients(pairs, global_step=step)",
    "param_groups": _GROUPS,
    "step": _STEP,
    "zero_grad": "gradients are not kept from step to step: there is nothing to clear",
}


def describe_missing_member(optimizer: str, name: str, hyperparameter: str | None) -> str:
    """Returns the message for an attribute that an optimizer lacks, with what it has instead.

    Args:
        optimizer: The name of its class.
        name: Of the attribute.
        hyperparameter: The one that is meant, if one is.
    """
    hint = _OTHER_MEMBERS.get(name, "")
    if hyperparameter is not None:
        hint = f'read and set optimizer.hyperparameters["{hyperparameter}"]'
    return f"{optimizer!r} object has no attribute {name!r}" + (f"; {hint}" if hint else "")


def describe_missing(name: str, names: Iterable[str]) -> str:
    """Returns the message for a missing attribute, with the public names near it."""
    message = f"module 'gpuopt' has no attribute {name!r}"
    if name in _MODULES_OF_OTHERS:
        library, page = _MODULES_OF_OTHERS[name]
        return (
            f"{message}; {library}'s optimizers are here by their names, as gpuopt.AdamOptimizer: "
            f'see "{page}" in the documentation'
        )
    near = [] if name.startswith("_") else find_near(name, names)
    return f"{message}; it has {', '.join(near)}" if near else message


def find_near(name: str, names: Iterable[str]) -> list[str]:
    """Returns up to three names like this one, whatever their case, with or without "Optimizer".

    Or those of what another library calls by this name.
    """
    from difflib import get_close_matches

    stem = _stem(name)
    by_stem = {_stem(each): each for each in sorted(names)}
    if stem in by_stem:
        return [by_stem[stem]]
    if stem in OTHER_LIBRARIES:
        return [each for each in OTHER_LIBRARIES[stem] if each in by_stem.values()]
    near = get_close_matches(stem, by_stem, _MOST, cutoff=0.75)
    if not near and len(stem) >= _FEWEST_LETTERS:
        near = [other for other in by_stem if other.endswith(stem)]
    return [by_stem[each] for each in near[:_MOST]]


def _stem(name: str) -> str:
    plain = name.lower().replace("_", "")
    return plain.removesuffix("optimizer").removesuffix("optimiser")
