"""Packages that gpuopt's extras install, and that steps do not need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def import_for(what: str, module: str, extra: str) -> ModuleType:
    """Imports a module of a package that may not be installed.

    Args:
        what: The features that need it, in the plural.
        module: The module's name.
        extra: The extra of gpuopt, in pyproject.toml, that installs its package.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # the package is there, and misses another one
            raise
        raise ModuleNotFoundError(
            f"{what} need {package}, which is not installed: pip install {package}, or the extra "
            f'"{extra}" of gpuopt',
            name=package,
        ) from None
