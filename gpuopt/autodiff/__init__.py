"""How `compute_gradients` obtains gradients of a loss."""

from gpuopt.autodiff.engine import Engine
from gpuopt.autodiff.lookup import embedding_lookup
from gpuopt.autodiff.torch_engine import with_torch
from gpuopt.autodiff.user_gradients import with_gradients
from gpuopt.locks import importing

__all__ = ["Engine", "embedding_lookup", "engine_of", "with_gradients", "with_torch"]


def engine_of(loss: object) -> Engine:
    """Returns the engine that a loss was marked for; by default HIPS autograd."""
    marked: Engine | None = getattr(loss, "gradient_engine", None)
    if marked is not None:
        return marked
    # Imported at the first use: importing gpuopt stays quick.
    with importing:
        from gpuopt.autodiff.autograd_engine import AutogradEngine

    return AutogradEngine()
