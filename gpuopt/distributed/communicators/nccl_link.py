"""One rank's end of NCCL: connects, enqueues collectives, and ends those that take too long."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.distributed.communicator import ReduceOp
from gpuopt.distributed.communicators.nccl_library import (
    call_in_group,
    current_stream,
    import_nccl,
    place_of,
    record_event,
)
from gpuopt.errors import DeadlineExceededError, WorkerFailedError
from gpuopt.locks import Condition, Lock, call_if_free, renew_after_fork

_SHORTEST_PAUSE_S = 0.0005
# How long a collective may take when a rank of this process has failed, which may have enqueued it.
_GRACE_S = 3.0
_HOW_TO_ASK = "(NCCL_DEBUG=WARN in the environment has it say more)"

_TYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)


class State(NamedTuple):
    """What the ranks compare before they rely on their links.

    Attributes:
        identity: Of the connection; None if there is none, or it is broken.
        num_calls: How many collectives this rank has enqueued in it.
    """

    identity: bytes | None = None
    num_calls: int = 0


class LinkBrokenError(DeadlineExceededError):
    """The communicator was given up before; the other ranks may know why."""


class _Pending:
    """A collective that may not be done.

    Attributes:
        what: Describes it.
        begin, end: Recorded on its stream before and after it.
        began: When its stream was first seen to have reached it.
    """

    __slots__ = ("began", "begin", "end", "what")

    def __init__(self, what: str, begin: Any) -> None:
        self.what = what
        self.begin = begin
        self.end: Any = None
        self.began: float | None = None


class Link:
    """A rank's NCCL communicator, which is made when it is needed, and anew when it is broken.

    Collectives are enqueued on the GPU's current stream, and the host does not wait for them. A
    watchdog does: if a stream waits in one for longer than the time limit, the communicator is
    aborted, which is all that ends such a wait.

    Attributes:
        state: See `State`.
        why_broken: Why the communicator was given up; None if it was not.
        is_told: Whether the program knows of that.
        num_lost: How many collectives were enqueued before that.
        is_needed: Whether other ranks may wait for what this one has enqueued.
        limit_s: How long a collective may take, in seconds.
    """

    def __init__(self, device: Device, timeout_s: float) -> None:
        """Describes a link that is not connected.

        Raises:
            ImportError: CuPy finds no NCCL.
        """
        self._nccl = import_nccl()
        self.device = device
        self.state = State()
        self.why_broken: str | None = None
        self.is_told = False
        self.num_lost = 0
        self.is_needed = False
        self.limit_s = self._timeout_s = timeout_s
        self._comm: Any = None
        self._pending: deque[_Pending] = deque()
        self._lock = Lock(f"the collectives of {device}")
        # What is being enqueued, and since when. The first collective waits for the other ranks.
        self._calling: tuple[str, float] | None = None
        self._types = {name: getattr(self._nccl, f"NCCL_{name.upper()}") for name in _TYPES}
        self._ops = {op: getattr(self._nccl, f"NCCL_{op.upper()}") for op in ("sum", "min", "max")}
        renew_after_fork(self)

    def after_fork(self) -> None:
        """The GPU, and what runs on it, belong to the parent."""
        # Never freed: that would end the parent's communicator and events, or wait for a lock of
        # CUDA's that a thread of the parent had.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._comm, self._pending)))
        self._comm, self.state = None, State()
        self._pending = deque()
        self._calling = None
        self.why_broken = "this process was forked from the one whose GPU it is"

    def begin_run(self) -> None:
        """Lets collectives take as long as they may."""
        self.is_needed, self.limit_s = True, self._timeout_s

    def end_after_failure(self) -> None:
        """Does not wait for long any more: a rank has failed that collectives may need."""
        self.is_needed, self.limit_s = False, min(self._timeout_s, _GRACE_S)

    def new_identity(self) -> bytes:
        """Returns what the ranks of a new connection have in common; one of them asks for it.

        Raises:
            WorkerFailedError: NCCL fails: it finds no network, say.
        """
        try:
            return self._nccl.get_unique_id()  # type: ignore[no-any-return]
        except Exception as error:  # CuPy has no type for some
            raise WorkerFailedError(
                f"NCCL cannot begin the connection of {self.device} with others: {error} "
                f"{_HOW_TO_ASK}"
            ) from error

    def place(self) -> str:
        """Returns the GPU's address on this host's bus, whatever its number in this process."""
        return place_of(self.device.index)

    def connect(self, size: int, rank: int, identity: bytes) -> None:
        """Makes a communicator, together with all other ranks.

        Args:
            size: How many ranks there are.
            rank: This one.
            identity: From `new_identity` of one of them.

        Raises:
            DeadlineExceededError: a rank does not come in time.
            WorkerFailedError: NCCL fails.
        """
        self._comm = self._connect(size, rank, identity)
        self.state = State(identity)
        self.why_broken, self.is_told = None, False
        backend_for(self.device).refuse_reads(None)

    def _connect(self, size: int, rank: int, identity: bytes) -> Any:
        made: list[Any] = []
        is_made, is_given_up = threading.Event(), threading.Event()
        nccl = self._nccl

        def make() -> None:
            try:
                with backend_for(self.device).enter():
                    # In a group, the wait for the other ranks is in its end, where Python goes on.
                    made.append(
                        call_in_group(nccl, lambda: nccl.NcclCommunicator(size, identity, rank))
                    )
            except Exception as error:
                made.append(error)
            is_made.set()
            if is_given_up.is_set():
                _abort_late(made)

        # In a thread that can be left behind: NCCL waits for ever.
        threading.Thread(target=make, daemon=True).start()
        try:
            if not is_made.wait(self._timeout_s):
                raise DeadlineExceededError(
                    f"NCCL has not connected {self.device}, of rank {rank}, with {size - 1} others "
                    f"within {self._timeout_s:g} s"
                )
            if isinstance(made[0], Exception):
                raise WorkerFailedError(
                    f"NCCL cannot connect {self.device}, of rank {rank}: {made[0]} {_HOW_TO_ASK}"
                ) from made[0]
            return made[0]
        except BaseException:
            is_given_up.set()
            _abort_late(made)
            raise

    def all_reduce(self, source: Any, target: Any, op: ReduceOp) -> None:
        """Reduces contiguous arrays of a type that `can_reduce` allows; both may be the same."""
        self._comm.allReduce(
            source.data.ptr,
            target.data.ptr,
            source.size,
            self._types[source.dtype.name],
            self._ops[op],
            current_stream(),
        )

    def all_gather(self, source: Any, target: Any) -> None:
        """Brings all ranks' contiguous arrays, one after the other, into `target`."""
        type_of_bytes = self._types["uint8"]
        self._comm.allGather(
            source.data.ptr, target.data.ptr, source.nbytes, type_of_bytes, current_stream()
        )

    def broadcast(self, source: Any, target: Any, root: int) -> None:
        """Brings rank `root`'s contiguous `source` into every `target`; both may be the same."""
        type_of_bytes = self._types["uint8"]
        self._comm.broadcast(
            source.data.ptr, target.data.ptr, target.nbytes, type_of_bytes, root, current_stream()
        )

    def can_reduce(self, dtype: Any, op: ReduceOp) -> bool:
        """Says whether NCCL has this reduction.

        Its least and greatest of a number and NaN are the number (fmin and fmax in NCCL's
        src/device/reduce_kernel.h).
        """
        return dtype.name in self._types and (op == "sum" or dtype.kind in "iu")

    def enqueue(self, what: str, collectives: Callable[[], object]) -> None:
        """Enqueues the collectives that a function calls as one, which the watchdog watches.

        Args:
            what: Describes them, for errors.
            collectives: Calls this link's `all_reduce`, `all_gather` and `broadcast`.

        Raises:
            LinkBrokenError: the communicator was given up.
            WorkerFailedError: NCCL fails.
        """
        # No context manager: Ctrl-C at its beginning would leave the lock and NCCL's group to
        # whoever keeps the traceback.
        with self._lock, backend_for(self.device).enter():
            self._raise_broken()
            try:
                pending = _Pending(what, record_event())
                self._calling = what, time.monotonic()
                _watchdog.watch(self)
                call_in_group(self._nccl, collectives)
                pending.end = record_event()
                self.state = State(self.state.identity, self.state.num_calls + 1)
                self._pending.append(pending)
                _watchdog.watch(self)
                # The watchdog may have given it up in the meantime, without the lock.
                self._raise_broken()
            except Exception as error:  # NCCL's; CuPy has no type for some
                was_broken = self.why_broken is not None
                self._give_up(f"{what} was not begun: NCCL fails: {error}")
                kind = LinkBrokenError if was_broken else WorkerFailedError
                raise kind(self.why_broken) from error
            except BaseException as error:
                self._give_up(f"{what} was interrupted by {type(error).__name__}")
                raise
            finally:
                self._calling = None

    def look(self) -> bool:
        """Gives up the communicator if a collective takes too long; the watchdog calls this.

        Returns:
            Whether there is anything left to look at.
        """
        now = time.monotonic()
        calling = self._calling
        if calling is not None and now - calling[1] > self.limit_s:
            # Without the lock, which the thread that waits in NCCL has.
            self._give_up(f"{calling[0]} was not begun on all ranks within {self.limit_s:g} s")
        call_if_free(self._lock, self._look_at_pending)
        return bool(self._pending) or self._calling is not None

    def _look_at_pending(self) -> None:
        try:
            self._drop_done()
            if not self._pending:
                return
            oldest = self._pending[0]
            if oldest.began is None and oldest.begin.done:
                oldest.began = time.monotonic()
            if oldest.began is not None and time.monotonic() - oldest.began > self.limit_s:
                self._give_up(f"{oldest.what} was not done within {self.limit_s:g} s")
            elif self._comm is not None:
                self._comm.check_async_error()
        except Exception as error:  # CUDA's, or NCCL's
            self._give_up(f"{self._pending[0].what} was not done: {error}")

    def drop(self, num_common: int) -> str | None:
        """Ends the connection.

        The host waits for the collectives that other ranks take part in, as long as a GPU may.

        Args:
            num_common: How many collectives all ranks have enqueued.

        Returns:
            Why the link is broken, if collectives were lost.
        """
        num_lost = max(0, self.state.num_calls - num_common)
        while len(self._pending) > num_lost and self.look():
            time.sleep(_SHORTEST_PAUSE_S)
        with self._lock:
            if self._pending:
                self._give_up(
                    f"{self._pending[0].what} was not done: other ranks have ended without it"
                )
            self._abort()
        return self.why_broken

    def close(self) -> None:
        """Waits for the collectives that are under way, which other ranks may need, and ends."""
        while self.is_needed and self.why_broken is None and self.look():
            time.sleep(_watchdog.PAUSE_S)
        ends = time.monotonic() + self.limit_s
        # The watchdog may be asking NCCL. A thread that waits in it ends by the abort alone.
        while not call_if_free(self._lock, self._abort) and time.monotonic() < ends:
            time.sleep(_watchdog.PAUSE_S)
        self._abort()

    def _drop_done(self) -> None:
        while self._pending and self._pending[0].end.done:
            self._pending.popleft()

    def _give_up(self, why: str) -> None:
        if self.why_broken is None:
            self.why_broken, self.num_lost = why, self.state.num_calls
            # First: when the streams go on, they have not got what they were to.
            backend_for(self.device).refuse_reads(why)
        self._pending.clear()
        self._abort()

    def _abort(self) -> None:
        self.state = State()
        # No call in between: a thread that gives it up at the same time must find none.
        comm, self._comm = self._comm, None
        if comm is not None:
            # Not `destroy`, which waits for the other ranks.
            comm.abort()

    def _raise_broken(self) -> None:
        if self.why_broken is not None:
            raise LinkBrokenError(self.why_broken)


def _abort_late(made: list[Any]) -> None:
    """Ends a communicator that nobody waits for any more; its own end would be `destroy`'s."""
    with suppress(IndexError):  # another thread has ended it, or there is none yet
        late = made.pop()
        if not isinstance(late, Exception):
            late.abort()


class _Watchdog:
    """A thread that looks at the links with collectives under way, and sleeps while none has any.

    It ends the program's wait for collectives that do not end.
    """

    PAUSE_S = 0.02

    def __init__(self) -> None:
        self._changed = Condition("the watchdog of collectives")
        self._links: set[Link] = set()
        self._thread: threading.Thread | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """The thread is the parent's."""
        self._links.clear()
        self._thread = None

    def watch(self, link: Link) -> None:
        """Has `link.look` called again and again, until it returns False."""
        if link in self._links:
            return
        with self._changed:
            self._links.add(link)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpuopt", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._links))
            for link in list(self._links):
                # Before the look: what begins after it is watched anew.
                with self._changed:
                    self._links.discard(link)
                if link.look():
                    with self._changed:
                        self._links.add(link)
            time.sleep(self.PAUSE_S)


_watchdog = _Watchdog()
