"""Random programs: what they do next is drawn from a seed and the operation's number alone.

So a program can be repeated, as a whole or with fewer of its operations.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fuzzing import saves, steps, threads
from fuzzing.saves import Files
from fuzzing.settings import how_to_repeat
from fuzzing.world import World, working_folder
from gpuopt import backends
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device

# How often each is drawn, and the operation.
OPERATIONS: list[tuple[float, Callable[..., str]]] = [
    (12, steps.step),
    (10, steps.step_again),
    (6, steps.nested_step),
    (5, steps.refused),
    (2, steps.row_refused_by_a_gpu),
    (3, steps.rate_that_raises),
    (2, steps.constraint_that_raises),
    (1.5, steps.gradient_changed_in_place),
    (2, steps.minimize),
    (2, steps.minimize_with_gradients),
    (4, steps.assign),
    (4, steps.make_again),
    (8, saves.save),
    (2, saves.step_while_saving),
    (2, saves.finish_saves),
    (1, saves.change_folder),
    (5, saves.restore),
    (3, saves.state_dict),
    (3, saves.load_state_dict),
    (4, threads.threads),
    (1, threads.written_while_saved),
    (0.8, threads.listed_while_made),
    (1, threads.fork),
]


class Program:
    """One random program.

    Attributes:
        log: What it has done so far.
        numbers: Of the operations that it has done.
    """

    def __init__(self, seed: int, folder: Path, devices: Sequence[str]) -> None:
        self.seed = seed
        self.log: list[str] = []
        self.numbers: list[int] = []
        self.world = World(folder, tuple(devices), np.random.default_rng([seed]))
        self.files = Files(self.world)
        is_on_host = len(devices) == 1  # CUDA does not outlive a fork
        self._operations = [each for each in OPERATIONS if is_on_host or each[1] != threads.fork]

    def run(self, number: int) -> None:
        """Does operation `number`, and compares everything with the model."""
        world = self.world
        world.rng = np.random.default_rng([self.seed, number])
        weights = np.array([weight for weight, _ in self._operations])
        chosen = world.rng.choice(len(weights), p=weights / weights.sum())
        operation = self._operations[chosen][1]
        self.numbers.append(number)
        self.log.append(f"{operation.__name__} was not finished")
        world.doing = ""
        if operation.__module__ == steps.__name__:
            if operation is steps.make_again:
                memory = world.choose(world.memories)
                self.files.drop(memory)
                self.log[-1] = steps.make_again(world, memory)
            else:
                self.log[-1] = operation(world)
        else:
            self.log[-1] = operation(world, self.files)
        world.check()
        self.files.check()


def run(seed: int, numbers: Iterable[int], devices: Sequence[str]) -> None:
    """Runs a program in an empty folder; what it raises says how to repeat it.

    Args:
        seed: Decides what the program works on, and what each operation does.
        numbers: Which operations.
        devices: Where arrays may be.
    """
    gc.collect()  # frees the names of an earlier program's variables
    rng = np.random.default_rng([seed, 2**31])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        stack.enter_context(working_folder(folder))
        if rng.random() < 0.5:  # everything is large, and shared by threads
            limits = CpuLimits(small_elements=1, large_elements=0, elements_per_thread=1)
            stack.enter_context(backends.using(Device.cpu, CpuBackend(limits)))
        program = Program(seed, folder, devices)
        try:
            for number in numbers:
                program.run(number)
            program.files.finish_all()
            program.files.check()
        except BaseException as error:
            program.log[-1] += program.world.doing
            for saver in program.files.savers:
                if saver.pending is not None:
                    saver.pending[0].exception(60)
            lines = zip(program.numbers, program.log, strict=True)
            log = [f"{number}: {text}" for number, text in lines]
            error.add_note(how_to_repeat("test_programs.py", seed, program.numbers, log))
            raise
