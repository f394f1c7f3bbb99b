"""The exceptions a caller of gpuopt may want to catch by name.

    GpuoptError
    ├── CancelledError (also a RuntimeError)
    ├── CheckpointError (also a ValueError)
    ├── DeadlineExceededError (also a TimeoutError)
    ├── DeviceUnavailableError (also a RuntimeError)
    └── WorkerFailedError (also a RuntimeError)

Everything else is a built-in type: ValueError for a wrong shape or value, TypeError for a wrong
type or dtype, IndexError for a row outside a variable, RuntimeError for a wrong call.
"""


class GpuoptError(Exception):
    """Base of gpuopt's own exceptions."""


class CheckpointError(GpuoptError, ValueError):
    """A checkpoint is damaged, or holds something else than what is to be restored."""


class DeviceUnavailableError(GpuoptError, RuntimeError):
    """A device was asked for that this process cannot use; the message says why."""


class CancelledError(GpuoptError, RuntimeError):
    """What this thread waited for was closed, or every other worker has finished."""


class DeadlineExceededError(GpuoptError, TimeoutError):
    """What this thread waited for did not come in time; the message says who is missing."""


class WorkerFailedError(GpuoptError, RuntimeError):
    """Another worker failed, and without it no step can be finished; its error is the cause."""
