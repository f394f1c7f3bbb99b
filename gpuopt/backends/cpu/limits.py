"""The sizes that decide how the CPU computes an update."""

from __future__ import annotations

from dataclasses import dataclass

from gpuopt.backends.cpu.threads import num_threads


@dataclass(frozen=True)
class CpuLimits:
    """Sizes, in elements, that decide how the CPU computes an update.

    Attributes:
        small_elements: Smaller variables are updated several at a time: a call costs more than what
            it computes.
        small_compiled_elements: The same for compiled rules, which get all addresses in one call:
            to find a gradient's takes longer than to copy and update so few elements.
        compiled_elements: From this size on, a compiled rule is quicker than numpy's calls, also
            with one thread.
        large_elements: From this size on, a second thread and a rule without temporaries are worth
            preparing; a compiled rule, too, where this is less than `compiled_elements`.
        elements_per_thread: The least number of elements for each thread.
    """

    small_elements: int = 8 * 1024
    small_compiled_elements: int = 512
    large_elements: int = 256 * 1024
    elements_per_thread: int = 128 * 1024
    compiled_elements: int = 64 * 1024

    def compiles(self, size: int) -> bool:
        """Says whether an update of `size` elements is worth a compiled rule."""
        return size >= min(self.compiled_elements, self.large_elements)

    def threads_for(self, size: int) -> int:
        """Returns how many threads share an update of `size` elements.

        Raises:
            ValueError: GPUOPT_THREADS is not a whole number of at least 1.
        """
        return max(1, min(num_threads(), size // self.elements_per_thread))
