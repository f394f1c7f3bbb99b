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
        compiled_steps: After so many updates of the same fewer elements, these are compiled as
            well: until then, to compile would have taken longer than it saves.
        compiled_elements: From this size on, a compiled rule is quicker than numpy's calls, also
            with one thread; at most `large_elements`.
        large_elements: From this size on, a second thread and a rule without temporaries are worth
            preparing.
        elements_per_thread: The least number of elements for each thread.
    """

    small_elements: int = 8 * 1024
    small_compiled_elements: int = 512
    large_elements: int = 256 * 1024
    elements_per_thread: int = 128 * 1024
    compiled_elements: int = 64 * 1024
    compiled_steps: int = 1000

    def __post_init__(self) -> None:
        least = min(self.compiled_elements, self.large_elements)
        object.__setattr__(self, "compiled_elements", least)

    def threads_for(self, size: int) -> int:
        """Returns how many threads share an update of `size` elements.

        Raises:
            ValueError: GPUOPT_THREADS is not a whole number of at least 1.
        """
        return max(1, min(num_threads(), size // self.elements_per_thread))
