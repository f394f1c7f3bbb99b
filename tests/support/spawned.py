"""A process that begins anew, for what is sent to it by pickle."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def one_process() -> ProcessPoolExecutor:
    """Makes a process; who waits for it hears of its end, as where it cannot unpickle something."""
    return ProcessPoolExecutor(1, get_context("spawn"))
