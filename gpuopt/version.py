"""The version of gpuopt."""

__version__ = "0.1.0"
