"""gpuopt's environment variables, read once, before anything is updated."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """The values of the variables.

    Attributes:
        threads: The number of threads of a large update in host memory; None if gpuopt chooses.
        compiled: Whether rules may be compiled.
        compiler: The command of the C++ compiler with its arguments; () if gpuopt looks for one.
        search_path: The folders in which commands are searched for.
        cache_folder: The folder of compiled rules; "" if gpuopt chooses.
        users_cache_folder: The folder of all programs' caches; "" for the one in the home folder.
        checks_at_once: Whether each step waits until a GPU has checked sparse gradients' rows.
    """

    threads: int | None
    compiled: bool
    compiler: tuple[str, ...]
    search_path: str
    cache_folder: str
    users_cache_folder: str
    checks_at_once: bool


def settings() -> Settings:
    """Returns the values that the variables had at the first call.

    An optimizer's constructor calls this, so that no step finds a malformed variable.

    Raises:
        ValueError: one of them is malformed.
    """
    global _found
    if _found is None:
        values = (parse(name, os.environ.get(name, "")) for name, parse in _VARIABLES.items())
        _found = Settings(*values)
    return _found


def forget() -> None:
    """Makes the next call of `settings` read the variables again: this program changed them."""
    global _found
    _found = None


def names() -> list[str]:
    """Lists the variables except PATH, which is for all programs."""
    return [name for name in _VARIABLES if name != "PATH"]


def describe() -> list[tuple[str, str]]:
    """Returns each variable except PATH, with its value or the reason why it is malformed."""
    rows = []
    for name in names():
        parse = _VARIABLES[name]
        text = os.environ.get(name)
        try:
            parse(name, text or "")
        except ValueError as error:
            rows.append((name, str(error)))
        else:
            rows.append((name, "not set" if text is None else repr(text)))
    return rows


def _threads(name: str, text: str) -> int | None:
    if not text:
        return None
    try:
        number = int(text) if text.isascii() and text.isdecimal() else 0
    except ValueError:  # Python converts no thousands of digits
        number = 0
    if number < 1:
        raise ValueError(f"{name}={text!r} is not a whole number of at least 1")
    return number


def _switch(name: str, text: str, default: bool) -> bool:
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}={text!r} is neither 0 nor 1")
    return default if not text else text == "1"


def _command(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(
            f"{name}={text!r} is not a C++ compiler, with arguments if need be: {error}"
        ) from None


def _text(name: str, text: str) -> str:
    return text


def _path(name: str, text: str) -> str:
    return text or os.defpath


# In the order of `Settings`.
_VARIABLES: dict[str, Callable[[str, str], Any]] = {
    "GPUOPT_THREADS": _threads,
    "GPUOPT_COMPILED": lambda name, text: _switch(name, text, default=True),
    "CXX": _command,
    "PATH": _path,
    "GPUOPT_CACHE_DIR": _text,
    "XDG_CACHE_HOME": _text,
    "GPUOPT_CHECK": lambda name, text: _switch(name, text, default=False),
}
_found: Settings | None = None
