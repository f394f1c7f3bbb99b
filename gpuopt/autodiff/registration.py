"""Has autograd know Variables as soon as both are imported, in either order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_autograd() -> None:
    """Registers Variables now if autograd is imported, otherwise as soon as it is.

    gpuopt does not import autograd for it, which many programs never use.
    """
    if "autograd" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AutogradFinder())


def _register() -> None:
    import_module("gpuopt.autodiff.tracing")


class _AutogradFinder(MetaPathFinder):
    """Finds autograd by the other finders, and has it loaded by an `_AutogradLoader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "autograd":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _AutogradLoader(spec.loader, self)
        return spec


class _AutogradLoader(Loader):
    """Loads autograd as its own loader does, and registers Variables then."""

    def __init__(self, loader: Loader, finder: _AutogradFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # As if this had never been there: others read a module's source by its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
