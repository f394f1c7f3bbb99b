"""The version of gpuopt."""

__version__ = "1.0.0"
