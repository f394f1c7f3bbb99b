"""A save that is written in a thread of its own."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from gpuopt.variables.gate import Waiting

_logger = logging.getLogger("gpuopt")


class SavedPath(Future[str]):
    """The path of a checkpoint that is being written; see `Saver.save_async`."""

    def __init__(self, purpose: str) -> None:
        super().__init__()
        self._purpose = purpose
        self._process = os.getpid()

    def result(self, timeout: float | None = None) -> str:
        self._check_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_process()
        return super().exception(timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {self._process} is {self._purpose}, and this process was forked from it "
                "meanwhile: wait for the result there"
            )


class BackgroundSave:
    """One write of a checkpoint, by a thread or by whoever needs it first.

    Attributes:
        saved_path: What the caller of `save_async` gets.
    """

    def __init__(self, purpose: str, write: Callable[[Callable[[], None]], str]) -> None:
        """Keeps what is to be done.

        Args:
            purpose: For errors, as "saving model-1".
            write: Writes the file and returns its path; calls its argument again and again.
        """
        self.saved_path = SavedPath(purpose)
        self._purpose = purpose
        self._write: Callable[[Callable[[], None]], str] | None = write
        self._process = os.getpid()
        self._running = threading.Lock()
        self._outcome: str | Exception | None = None
        self._last_progress = time.monotonic()

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._outcome is not None or self._process != os.getpid()

    def start(self) -> None:
        """Has a new thread write; Python waits for it at its end."""
        _unfinished.add(self)
        try:
            # threading.Thread.start waits for the thread, and Ctrl-C in that wait may stop it.
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            self._run()

    def finish(self) -> None:
        """Returns when the file is written, or could not be; what went wrong is not raised.

        Raises:
            DeadlineExceededError: nothing has been written for too long.
        """
        waiting = Waiting()
        while not self.is_finished and self._running.locked():
            waiting.pause(lambda: f"a thread that is {self._purpose}", self._last_progress)
        if not self.is_finished:  # the thread has not begun
            self._run()

    def _run(self) -> None:
        with self._running:
            if self._outcome is None and self._write is not None:
                try:
                    self._outcome = self._write(self._note_progress)
                except Exception as error:
                    _logger.error("%s", error)
                    self._outcome = error
            self._write = None  # it holds the values
            _unfinished.discard(self)
        # At the end, for it can hang: Ctrl-C in `result` may leave a lock of the future's shut.
        with suppress(InvalidStateError):
            if isinstance(self._outcome, Exception):
                self.saved_path.set_exception(self._outcome)
            elif self._outcome is not None:
                self.saved_path.set_result(self._outcome)

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()


_unfinished: set[BackgroundSave] = set()


def _finish_all() -> None:
    for save in list(_unfinished):
        save.finish()


atexit.register(_finish_all)
