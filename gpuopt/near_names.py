"""What to say of a name that gpuopt does not have."""

from __future__ import annotations

from collections.abc import Iterable

_MOST = 3
# Of the end of a name, as in "SGD".
_FEWEST_LETTERS = 3


def describe_missing(name: str, names: Iterable[str]) -> str:
    """Returns the message for a missing attribute, with the public names near it."""
    message = f"module 'gpuopt' has no attribute {name!r}"
    near = [] if name.startswith("_") else find_near(name, names)
    return f"{message}; it has {', '.join(near)}" if near else message


def find_near(name: str, names: Iterable[str]) -> list[str]:
    """Returns up to three names like this one, whatever their case, with or without "Optimizer"."""
    from difflib import get_close_matches

    stem = _stem(name)
    by_stem = {_stem(each): each for each in sorted(names)}
    if stem in by_stem:
        return [by_stem[stem]]
    near = get_close_matches(stem, by_stem, _MOST, cutoff=0.75)
    if not near and len(stem) >= _FEWEST_LETTERS:
        near = [other for other in by_stem if other.endswith(stem)]
    return [by_stem[each] for each in near[:_MOST]]


def _stem(name: str) -> str:
    plain = name.lower().replace("_", "")
    return plain.removesuffix("optimizer").removesuffix("optimiser")
