"""The exceptions a caller of gpuopt may want to catch by name.

    GpuoptError
    ├── CheckpointError (also a ValueError)
    └── DeviceUnavailableError (also a RuntimeError)

Everything else is a built-in type: ValueError for a wrong shape or value, TypeError for a wrong
type or dtype, IndexError for a row outside a variable, RuntimeError for a wrong call.
"""


class GpuoptError(Exception):
    """Base of gpuopt's own exceptions."""


class CheckpointError(GpuoptError, ValueError):
    """A checkpoint is damaged, or holds something else than what is to be restored."""


class DeviceUnavailableError(GpuoptError, RuntimeError):
    """A device was asked for that this process cannot use; the message says why."""
