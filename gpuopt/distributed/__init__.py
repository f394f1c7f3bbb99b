"""Training on several workers, towers or devices of one process."""

from gpuopt.distributed.accumulators import ConditionalAccumulator, SparseConditionalAccumulator

__all__ = ["ConditionalAccumulator", "SparseConditionalAccumulator"]
