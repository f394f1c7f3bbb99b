"""How `compute_gradients` obtains gradients of a loss."""

from gpuopt.autodiff.user_gradients import UserGradients, with_gradients

__all__ = ["UserGradients", "with_gradients"]
