"""The exceptions that a caller of gpuopt may want to catch by name.

    GpuoptError
    ├── CancelledError (also a RuntimeError)
    ├── CheckpointError (also a ValueError)
    ├── DeadlineExceededError (also a TimeoutError)
    ├── DeviceUnavailableError (also a RuntimeError)
    └── WorkerFailedError (also a RuntimeError)

There is one warning, SeveralProcessesWarning (a UserWarning).

All other errors are built-in types: ValueError for a wrong shape or value, TypeError for a wrong
type or dtype, IndexError for a row outside a variable, RuntimeError for a wrong call.
"""

__all__ = [
    "CancelledError",
    "CheckpointError",
    "DeadlineExceededError",
    "DeviceUnavailableError",
    "GpuoptError",
    "SeveralProcessesWarning",
    "WorkerFailedError",
]


class GpuoptError(Exception):
    """Base of gpuopt's own exceptions."""


class CheckpointError(GpuoptError, ValueError):
    """A checkpoint is damaged, or its tensors are not those that are to be restored."""


class DeviceUnavailableError(GpuoptError, RuntimeError):
    """This process cannot use a device that it asked for; the message says why."""


class CancelledError(GpuoptError, RuntimeError):
    """A coordinator, accumulator or communicator was closed while this thread waited for it.

    Also raised if every other worker has finished, so that nothing is left to wait for.
    """


class DeadlineExceededError(GpuoptError, TimeoutError):
    """A worker, gradient or token did not arrive in time; the message names what is missing."""


class WorkerFailedError(GpuoptError, RuntimeError):
    """Another worker failed, and no step can be completed without it; its error is the cause."""


class SeveralProcessesWarning(UserWarning):
    """A launcher has started several processes, and each trains a model of its own."""
