"""The sizes at which updates in host memory change their ways."""

from __future__ import annotations

from dataclasses import dataclass

from gpuopt.backends.cpu.threads import num_threads


@dataclass(frozen=True)
class CpuLimits:
    """Sizes, in elements, at which the CPU changes how it updates.

    Attributes:
        small_elements: Smaller variables are updated several at a time: a call costs more than what
            it computes.
        large_elements: From here on, a second thread and a rule without temporaries are worth
            preparing.
        elements_per_thread: What each thread has at least.
    """

    small_elements: int = 8 * 1024
    large_elements: int = 256 * 1024
    elements_per_thread: int = 128 * 1024

    def threads_for(self, size: int) -> int:
        """Returns how many threads share an update of `size` elements.

        Raises:
            ValueError: GPUOPT_THREADS is not a whole number of at least 1.
        """
        return max(1, min(num_threads(), size // self.elements_per_thread))
