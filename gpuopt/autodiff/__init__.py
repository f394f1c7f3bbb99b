"""How `compute_gradients` obtains gradients of a loss."""

import sys
from functools import cache

from gpuopt.autodiff.engine import Engine
from gpuopt.autodiff.lookup import embedding_lookup
from gpuopt.autodiff.registration import is_hips_autograd, register_with_autograd
from gpuopt.autodiff.torch_engine import with_torch
from gpuopt.autodiff.user_gradients import with_gradients
from gpuopt.extras import import_for
from gpuopt.locks import importing

__all__ = ["Engine", "embedding_lookup", "engine_of", "with_gradients", "with_torch"]


def engine_of(loss: object) -> Engine:
    """Returns the engine that a loss was marked for; by default HIPS autograd."""
    marked: Engine | None = getattr(loss, "gradient_engine", None)
    if marked is not None:
        return marked
    return _autograd_engine()()


@cache
def _autograd_engine() -> type[Engine]:
    """Imports the engine at its first use: importing gpuopt stays quick."""
    with importing:
        before = frozenset(sys.modules)
        try:
            _check_autograd()
            from gpuopt.autodiff.autograd_engine import AutogradEngine
        except BaseException:
            # Ctrl-C, too. What is imported already would lack the rest at the next attempt: Python
            # makes a new package, without those of its modules that it does not import again.
            for name in sys.modules.keys() - before:
                if name.partition(".")[0] in ("autograd", "gpuopt"):
                    sys.modules.pop(name, None)
            raise
    return AutogradEngine


def _check_autograd() -> None:
    """Imports HIPS autograd.

    Raises:
        ImportError: there is none, or another package has its name.
    """
    autograd = import_for("gradients of a loss", "autograd", "losses")
    if not is_hips_autograd():
        raise ImportError(
            'the gradients of a loss are computed by HIPS autograd, and "autograd" is '
            f"{autograd.__file__} here: give that another name, or mark the loss by "
            "gpuopt.with_torch",
            name="autograd",
        )


register_with_autograd()
