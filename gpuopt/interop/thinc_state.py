"""The state of a Thinc optimizer as bytes, with names that hold in other processes, too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gpuopt.backends import new_storage, to_device
from gpuopt.device import Device, device_of
from gpuopt.extras import import_for
from gpuopt.interop.thinc_updates import Array, Key
from gpuopt.variables.undo import Undo, all_or_nothing

_FORMAT = "gpuopt: a Thinc optimizer, 1"
# The entry that is no array of the optimizer's: JSON.
_ABOUT = "about"
# The optimizer's dictionaries of arrays.
_KINDS = ("mom1", "mom2", "averages")
# JSON that is nested very deeply is a RecursionError.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def save_state(optimizer: Any, num_steps: int, models: Sequence[Any]) -> bytes:
    """Returns the state of an optimizer with Thinc's attributes; see `Optimizer.to_bytes`.

    Raises:
        ValueError: it has updated a parameter of another model.
    """
    counts = {key: count for key, count in optimizer.nr_update.items() if count}
    names = {key: name for name, key in _names(models, counts).items()}
    for key in counts:
        if key not in names:
            raise ValueError(
                f"the optimizer has updated parameter {key}, which none of the given models has"
            )
    about = {
        "format": _FORMAT,
        "num_steps": num_steps,
        "counts": {names[key]: count for key, count in counts.items()},
        "last_score": getattr(optimizer, "last_score", None),
    }
    arrays = {
        f"{kind}/{names[key]}": to_device(array, Device.cpu)
        for kind in _KINDS
        for key, array in (getattr(optimizer, kind) or {}).items()
        if key in counts
    }
    described = np.frombuffer(json.dumps(about).encode(), np.uint8)
    saved: bytes = _safetensors().save({**arrays, _ABOUT: described})
    return saved


def load_state(optimizer: Any, data: bytes, models: Sequence[Any], num_steps: int) -> int:
    """Gives an optimizer a saved state; see `Optimizer.from_bytes`.

    Returns:
        How often the schedules of the state had been stepped.

    Raises:
        ValueError: the state is damaged, does not fit the models, or is behind the schedules.
            Nothing has been changed.
    """
    arrays, about = _read(data)
    counts = about["counts"]
    if about["num_steps"] < num_steps:
        raise ValueError(
            f"the schedules are at step {num_steps}, and the state is of step "
            f"{about['num_steps']}: give the state to a new optimizer"
        )
    keys = _names(models, _shims_keys(models, counts))
    of_models = _weights(models)
    found: dict[str, dict[Key, Array]] = {kind: {} for kind in _KINDS}
    for name, array in arrays.items():
        kind, _, of_parameter = name.partition("/")
        if kind not in found or of_parameter not in counts:
            raise ValueError(f'the state is damaged: what is "{name}"?')
        if of_parameter not in keys:
            raise ValueError(f'the models have no parameter "{of_parameter}", the state has one')
        key = keys[of_parameter]
        weights = of_models.get(key)
        if weights is None:
            found[kind][key] = array
            continue
        shape = weights.shape if kind == "averages" else (weights.size,)
        if array.shape != shape or array.dtype != weights.dtype:
            raise ValueError(
                f'"{name}" of the state is {array.shape} {array.dtype}; it must be {shape} '
                f"{weights.dtype}"
            )
        found[kind][key] = new_storage(array, device_of(weights), array.dtype)
    if unknown := [name for name in counts if name not in keys]:
        raise ValueError(f'the models have no parameter "{unknown[0]}", the state has one')

    def take(undo: Undo) -> None:
        for kind, of_kind in found.items():
            if getattr(optimizer, kind) is not None:
                undo.replace_items(getattr(optimizer, kind), of_kind)
        by_key = {keys[name]: count for name, count in counts.items()}
        undo.replace_items(optimizer.nr_update, by_key)
        if about["last_score"] is not None:
            undo.set(optimizer, "_last_score", tuple(about["last_score"]))

    all_or_nothing(take)
    return about["num_steps"]  # type: ignore[no-any-return]


def _read(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a state's arrays, and what it says of them; raises ValueError if it is damaged."""
    load = _safetensors().load
    from safetensors import SafetensorError

    try:
        arrays = load(data)
        about = json.loads(arrays.pop(_ABOUT).tobytes())
        if about["format"] != _FORMAT:
            raise ValueError(f"its format is {about['format']!r}, not {_FORMAT!r}")
        numbers = [about["num_steps"], *about["counts"].values()]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("it counts by something else than whole numbers")
        score = about["last_score"]
        if score is not None and [type(each) in (int, float) for each in score] != [True, True]:
            raise ValueError("its last score is not a step and a number")
    except (SafetensorError, *_DAMAGED) as error:
        raise ValueError(f"no state of a Thinc optimizer, or damaged: {error}") from None
    return arrays, about


def _safetensors() -> ModuleType:
    return import_for("the bytes of an optimizer", "safetensors.numpy", "thinc")


def _nodes(models: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the nodes of models, and where each is; a pipeline stands for its models."""
    flat: list[Any] = []
    for each in models:
        if hasattr(each, "pipeline"):
            owned = (getattr(pipe, "model", None) for _, pipe in each.pipeline)
            flat += [model for model in owned if hasattr(model, "walk")]
        elif hasattr(each, "walk"):
            flat.append(each)
        else:
            raise TypeError(f"models must be Thinc's models or spaCy's pipelines, got {each!r}")
    for number, model in enumerate(flat):
        for place, node in enumerate(model.walk()):
            yield f"{number}/{place}", node


def _names(models: Sequence[Any], updated: Iterable[Key]) -> dict[str, Key]:
    """Returns the parameters of models by name; of shims, those that were updated."""
    names: dict[str, Key] = {}
    shims: dict[Key, str] = {}
    for where, node in _nodes(models):
        names.update({f"{where}/{name}": (node.id, name) for name in node.param_names})
        for place, shim in enumerate(node.shims):
            for key in updated:
                if key[0] == shim.id:
                    shims[key] = f"{where}/shim {place}/{key[1]}"
    own = set(names.values())
    names.update({name: key for key, name in shims.items() if key not in own})
    return names


def _shims_keys(models: Sequence[Any], counts: Mapping[str, int]) -> list[Key]:
    """Returns the keys of those parameters of a state that are in shims."""
    return [
        (shim.id, name.removeprefix(prefix))
        for where, node in _nodes(models)
        for place, shim in enumerate(node.shims)
        for prefix in [f"{where}/shim {place}/"]
        for name in counts
        if name.startswith(prefix)
    ]


def _weights(models: Sequence[Any]) -> dict[Key, Array]:
    return {
        (node.id, name): node.get_param(name)
        for _, node in _nodes(models)
        for name in node.param_names
        if node.has_param(name)
    }
