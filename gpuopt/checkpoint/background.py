"""A save that is written in a thread of its own."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from gpuopt.locks import Lock, Waiting, call_if_free

_logger = logging.getLogger("gpuopt")


class SavedPath(Future[str]):
    """The path of a checkpoint that is being written; see `Saver.save_async`.

    Who waits for it takes none of the future's locks, which Ctrl-C may leave locked.
    """

    def __init__(self, save: BackgroundSave) -> None:
        super().__init__()
        self._save = save

    def done(self) -> bool:
        return self._save.outcome is not None

    def result(self, timeout: float | None = None) -> str:
        outcome = self._save.wait(timeout)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = self._save.wait(timeout)
        return outcome if isinstance(outcome, Exception) else None


class BackgroundSave:
    """One write of a checkpoint, by a thread or by whoever needs it first.

    Attributes:
        saved_path: What the caller of `save_async` gets.
        outcome: The file's path, or why it could not be written; None until it is known.
    """

    def __init__(self, purpose: str, write: Callable[[Callable[[], None]], str]) -> None:
        """Keeps what is to be done.

        Args:
            purpose: For errors, as "saving model-1".
            write: Writes the file and returns its path; calls its argument again and again.
        """
        self.saved_path = SavedPath(self)
        self.outcome: str | Exception | None = None
        self._purpose = purpose
        self._write: Callable[[Callable[[], None]], str] | None = write
        self._process = os.getpid()
        self._running = Lock("a save in the background")
        self._last_progress = time.monotonic()

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.outcome is not None or self._process != os.getpid()

    def start(self) -> None:
        """Has a new thread write; Python waits for it at its end."""
        _unfinished.add(self)
        _finish_before_end_of_child()
        try:
            # threading.Thread.start waits for the thread, and Ctrl-C in that wait may stop it.
            _thread.start_new_thread(self.finish, ())
        except RuntimeError:  # the interpreter is shutting down, and starts no more threads
            self.finish()

    def finish(self) -> None:
        """Writes the file, or waits until another thread has; what goes wrong is not raised.

        Raises:
            DeadlineExceededError: nothing has been written for too long.
            RuntimeError: called by a signal handler in the middle of this thread's own write.
        """
        self._refuse_within()
        waiting = Waiting()
        while not self.is_finished and not call_if_free(self._running, self._run):
            waiting.pause(self._describe, self._last_progress)

    def wait(self, timeout_s: float | None) -> str | Exception:
        """Returns the outcome.

        Args:
            timeout_s: How long to wait; by default as long as something is being written.

        Raises:
            TimeoutError: it is not known yet.
            DeadlineExceededError: nothing has been written for too long.
            RuntimeError: this process was forked from the one that writes; or see `finish`.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        waiting = Waiting()
        while self.outcome is None:
            if os.getpid() != self._process:
                raise RuntimeError(
                    f"process {self._process} is {self._purpose}, and this process was forked from "
                    "it meanwhile: wait for the result there"
                )
            self._refuse_within()
            if ends is not None and time.monotonic() >= ends:
                raise TimeoutError(f"still {self._purpose} after {timeout_s:g} s")
            waiting.pause(self._describe, self._last_progress)
        return self.outcome

    def _refuse_within(self) -> None:
        if self._running.is_this_threads:
            raise RuntimeError(
                f"this thread is {self._purpose}, and a signal handler has come in the middle of "
                "it: save, restore, or wait for the result after the handler"
            )

    def _describe(self) -> str:
        return f"a thread that is {self._purpose}"

    def _run(self) -> None:
        if self.outcome is None and self._write is not None:
            try:
                self.outcome = self._write(self._note_progress)
            except Exception as error:
                _logger.error("%s", error)
                self.outcome = error
        self._write = None  # it holds the values
        _unfinished.discard(self)
        # For callbacks, and those who wait for several futures.
        with suppress(InvalidStateError):
            if isinstance(self.outcome, Exception):
                self.saved_path.set_exception(self.outcome)
            elif self.outcome is not None:
                self.saved_path.set_result(self.outcome)

    def _note_progress(self) -> None:
        self._last_progress = time.monotonic()


_unfinished: set[BackgroundSave] = set()
# The process that multiprocessing was told to finish its saves.
_told_process: int | None = None


def _finish_all() -> None:
    for save in list(_unfinished):
        save.finish()


def _finish_before_end_of_child() -> None:
    """Has multiprocessing finish all saves: at the end of its children, atexit is not called."""
    global _told_process
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _told_process != os.getpid():
        util.Finalize(None, _finish_all, exitpriority=0)
        _told_process = os.getpid()


atexit.register(_finish_all)
if hasattr(os, "register_at_fork"):  # a forked child leaves the files to its parent
    os.register_at_fork(after_in_child=_unfinished.clear)
