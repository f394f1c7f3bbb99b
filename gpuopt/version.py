"""The version of gpuopt."""

__version__ = "0.9.0"
