"""Has autograd know Variables as soon as both are imported, in either order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_logger = logging.getLogger("gpuopt")


def register_with_autograd() -> None:
    """Registers Variables now if autograd is imported, otherwise as soon as it is.

    gpuopt does not import autograd for it, which many programs never use. Another package of that
    name, as users have them, is left alone.
    """
    if "autograd" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AutogradFinder())


def is_hips_autograd() -> bool:
    """Whether the imported package "autograd" is the HIPS library."""
    core, tracer = (sys.modules.get(f"autograd.{name}") for name in ("core", "tracer"))
    return hasattr(core, "VJPNode") and hasattr(tracer, "Box")


def _register() -> None:
    """Registers Variables with HIPS autograd; does nothing to another package of that name.

    It runs inside a user's `import autograd`, which must succeed even where registering does not,
    as with a version that gpuopt does not know.
    """
    if not is_hips_autograd():
        return
    try:
        import_module("gpuopt.autodiff.tracing")
    except Exception:
        _logger.warning("autograd does not know gpuopt's Variables", exc_info=True)


class _AutogradFinder(MetaPathFinder):
    """Finds autograd by the other finders, and has it loaded by an `_AutogradLoader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "autograd":
            return None
        # Python, too, skips finders without find_spec.
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _AutogradLoader(spec.loader, self)
        return spec


class _AutogradLoader(Loader):
    """Loads autograd as its own loader does, and registers Variables then."""

    def __init__(self, loader: Any, finder: _AutogradFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        # For callers of find_spec, which may use the loader's other methods, as get_source.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        # As if this had never been there: others read a module's source by its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
