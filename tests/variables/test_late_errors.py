"""Errors that GPUs find late are asked for while threads make new sources of them."""

from __future__ import annotations

from other_thread import repeated

from gpuopt.device import Device
from gpuopt.variables.late_errors import raise_late_errors, register


class Source:
    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        pass


def test_sources_are_asked_while_other_threads_register_some() -> None:
    kept = [Source() for _ in range(300)]
    for source in kept:
        register(source)
    made: list[Source] = []

    def make() -> None:
        made.append(Source())
        register(made[-1])
        if len(made) > 200:
            made.clear()

    with repeated(make, alternate=True):
        for _ in range(300):
            raise_late_errors(Device("gpu"))
