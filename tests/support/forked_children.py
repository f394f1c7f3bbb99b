"""Children forked at bad moments. Run as a program with the name of a scenario and a folder."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import gpuopt
from gpuopt import backends, environment, locks
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.threads import share_out
from gpuopt.checkpoint import checkpoint_writer
from gpuopt.device import Device
from gpuopt.distributed import ConditionalAccumulator, SyncReplicasOptimizer, ThreadGroup
from gpuopt.variables.gate import between_writes, writing

# Large enough for threads and for compiled rules.
LARGE = 300_000
# A child that does not end by then hangs.
CHILD_DEADLINE_S = 20


class Model:
    """Two variables, what trains them, and what saves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.w = gpuopt.Variable(np.zeros(LARGE, np.float32), name="w")
        self.table = gpuopt.Variable(np.zeros((100, 4), np.float32), name="table")
        self.step = gpuopt.Variable(0, dtype=np.int64, name="step")
        self.adam = gpuopt.AdamOptimizer(0.001, use_locking=True)
        self.saver = gpuopt.Saver([self.w, self.table, self.step], optimizers=[self.adam])
        self.train()
        self.saved = self.saver.save(folder / "first", 0)

    def train(self) -> None:
        rows = gpuopt.IndexedSlices(np.ones((2, 4), np.float32), np.array([1, 5]), (100, 4))
        pairs = [(np.ones(LARGE, np.float32), self.w), (rows, self.table)]
        self.adam.apply_gradients(pairs, self.step)

    def stream(self) -> None:
        self.adam.minimize(lambda: np.sum(self.table * 2.0), self.step, [self.table], 0)

    def everything(self) -> None:
        """What a child must be able to do."""
        prefix = self.folder / f"child-{os.getpid()}"
        self.train()
        self.stream()
        new = gpuopt.Variable(np.zeros(LARGE), name="new")
        gpuopt.MomentumOptimizer(1.0, 0.9).apply_gradients([(np.ones(LARGE), new)])
        assert (new.numpy() == -1).all()
        new += 1
        self.adam.load_state_dict(self.adam.state_dict())
        path = self.saver.save(prefix, 1)
        value = self.w.numpy()
        self.w.assign(np.zeros(LARGE))
        self.saver.restore(path)
        np.testing.assert_array_equal(self.w.numpy(), value)
        assert self.saver.save_async(prefix, 2).result() == f"{prefix}-2.safetensors"
        assert len(gpuopt.global_variables()) > 3


def forked(call: Callable[[], Any], *, exits: bool = False) -> int:
    """Forks a child that makes a call, and returns its process.

    Args:
        call: What the child does; an exception is printed.
        exits: Whether the child ends as a program does, by way of what runs at exit.
    """
    child = os.fork()
    if child != 0:
        return child
    end_child(call, exits=exits)


def end_child(call: Callable[[], Any], *, exits: bool = False) -> NoReturn:
    """Makes a call, and ends this process; an exception is printed."""
    # Says where it hangs, if it does. No timer of faulthandler's: to start one in a child waits for
    # the thread of its parent's timer, as pytest's, which a child does not have.
    faulthandler.enable(sys.__stderr__ or 2)
    try:
        call()
        if exits:
            atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def check_child(child: int) -> None:
    """Waits for a child's end, which must be a good one."""
    ends = time.monotonic() + CHILD_DEADLINE_S
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status}"
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGABRT)
    os.waitpid(child, 0)
    raise AssertionError(f"the child hangs: killed after {CHILD_DEADLINE_S} s")


def check_error(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    """The call must raise this, at once."""
    began = time.monotonic()
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert text in message, message
    assert time.monotonic() - began < 5


@contextmanager
def in_another_thread(call: Callable[[Callable[[], None]], Any]) -> Iterator[None]:
    """Has another thread call `call(pause)`; the body runs while it is inside `pause()`."""
    inside, go_on = threading.Event(), threading.Event()
    errors = []

    def pause() -> None:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(3 * CHILD_DEADLINE_S)

    def run() -> None:
        try:
            call(pause)
        except BaseException as error:
            errors.append(error)
            inside.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(CHILD_DEADLINE_S)
    try:
        yield
    finally:
        go_on.set()
        thread.join(CHILD_DEADLINE_S)
        assert not thread.is_alive()
        if errors:
            raise errors[0]


@contextmanager
def paused_writes(pause: Callable[[], None]) -> Iterator[None]:
    """Has a save pause when its bytes are written, before the file gets its name."""
    write = checkpoint_writer._write_tensors

    def pausing(*arguments: Any) -> Any:
        checksums = write(*arguments)
        pause()
        return checksums

    checkpoint_writer._write_tensors = pausing
    try:
        yield
    finally:
        checkpoint_writer._write_tensors = write


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def partial_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".partial"))


# Scenarios.


def in_save_async(model: Model) -> None:
    def save(pause: Callable[[], None]) -> None:
        with paused_writes(pause):
            futures.append(model.saver.save_async(model.folder / "m", 1))
            path = futures[0].result()
        gpuopt.Saver([model.w, model.table, model.step]).restore(path)

    def child() -> None:
        check_error(futures[0].result, RuntimeError, "was forked from it")
        model.saver.save(model.folder / "m", 2)  # of one prefix: what is abandoned goes
        assert not (model.folder / "m-1.safetensors").exists()  # the parent's to make
        gpuopt.Saver([model.w]).save(model.folder / "m", 3)
        model.everything()

    futures: list[Any] = []
    with in_another_thread(save):
        while not futures:  # the file may be there before its future
            time.sleep(0.001)
        before = partial_files(model.folder)
        assert len(before) == 1
        check_child(forked(child, exits=True))
        assert partial_files(model.folder) == before
    assert partial_files(model.folder) == []


def in_a_step(model: Model) -> None:
    def step(pause: Callable[[], None]) -> None:
        def constraint(value: Any) -> Any:
            pause()
            return value

        slow = gpuopt.Variable(np.zeros(3), name="slow", constraint=constraint)
        model.adam.apply_gradients([(np.ones(3), slow), (np.ones(LARGE, np.float32), model.w)])

    with in_another_thread(step):
        check_child(forked(model.everything))


def with_every_lock_held(model: Model) -> None:
    accumulator = ConditionalAccumulator(np.float32, (3,))

    def hold(pause: Callable[[], None]) -> None:
        every = [shared for shared in list(locks._shared) if isinstance(shared, locks.Lock)]
        assert len(every) > 10
        with ExitStack() as stack:
            stack.enter_context(writing())
            stack.enter_context(locks.importing)
            for lock in every:
                stack.enter_context(lock)
            pause()

    def child() -> None:
        model.everything()
        check_error(
            lambda: accumulator.apply_grad(np.ones(3, np.float32)), gpuopt.CancelledError, "forked"
        )

    locks._LONGEST_IMPORT_S = 0.05  # a fork waits for an import, but not for ever
    with in_another_thread(hold):
        check_child(forked(child))
    accumulator.apply_grad(np.ones(3, np.float32))


def in_its_own_step(model: Model) -> None:
    children = []

    def fork(value: Any) -> Any:
        if not children:
            children.append(os.fork())
        return value

    slow = gpuopt.Variable(np.zeros(3), name="slow", constraint=fork)
    gradients = np.ones(3), np.ones(LARGE, np.float32)
    before = int(model.step)
    model.adam.apply_gradients(zip(gradients, (slow, model.w), strict=True), model.step)
    assert int(model.step) == before + 1
    if children[0] == 0:
        end_child(model.everything)
    check_child(children[0])


def in_its_own_save(model: Model) -> None:
    children: list[int] = []

    def fork() -> None:
        if not children:
            children.append(os.fork())

    def save() -> str:
        with paused_writes(fork):
            return model.saver.save(model.folder / "m", 1)

    parent = os.getpid()
    try:
        path = save()
    except RuntimeError as error:
        if os.getpid() != parent and "is left to it" in str(error):
            end_child(model.everything)
        raise
    assert os.getpid() == parent
    check_child(children[0])
    model.saver.restore(path)
    assert partial_files(model.folder) == []


def in_a_compile(model: Model) -> None:
    """A child that ends removes nothing of the compiler's; one that lives on does not stop it."""
    compiler, begun, go_on = (model.folder / name for name in ("compiler", "begun", "go_on"))
    compiler.write_text(
        f'#!/bin/sh\ntouch {begun}\nwhile [ ! -e {go_on} ]; do sleep 0.01; done\nexec g++ "$@"\n'
    )
    compiler.chmod(0o700)
    os.environ["CXX"] = str(compiler)
    os.environ["GPUOPT_CACHE_DIR"] = str(model.folder / "cache")
    os.environ["GPUOPT_COMPILED"] = "1"
    environment.forget()
    errors: list[BaseException] = []
    v = gpuopt.Variable(np.zeros(LARGE, np.float32), name="v")

    def step() -> None:
        try:
            rule = gpuopt.RMSPropOptimizer(0.1)
            rule.apply_gradients([(np.ones(LARGE, np.float32), v)])
        except BaseException as error:
            errors.append(error)

    def child() -> None:
        os.environ["GPUOPT_COMPILED"] = "0"
        environment.forget()
        model.everything()

    forking = threading.Event()
    living: list[int] = []
    starting = os.posix_spawn

    def spawn(*arguments: Any, **options: Any) -> int:
        # The worst moment: whatever connects the two is there.
        living.append(forked(lambda: time.sleep(60)))
        forking.set()
        return starting(*arguments, **options)

    thread = threading.Thread(target=step)
    os.posix_spawn = spawn
    thread.start()
    try:
        assert forking.wait(CHILD_DEADLINE_S)
        while not begun.exists():
            time.sleep(0.005)
        os.posix_spawn = starting
        check_child(forked(child, exits=True))
        go_on.touch()
        thread.join(2 * CHILD_DEADLINE_S)
        assert not thread.is_alive(), "the compile hangs"
        assert errors == []
        assert list((model.folder / "cache").glob("*.so")), "nothing was compiled"
    finally:
        for process in living:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def in_a_shared_update(model: Model) -> None:
    parent = os.getpid()
    children: list[int] = []
    waiting = threading.Event()
    helping = threading.Event()

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            if not children:
                assert helping.wait(CHILD_DEADLINE_S)
                children.append(os.fork())
                waiting.set()
        else:
            helping.set()
            assert waiting.wait(CHILD_DEADLINE_S)

    try:
        share_out(work, range(10), 3)
    except RuntimeError as error:
        if os.getpid() != parent and "in the middle of an update" in str(error):
            end_child(model.everything)
        raise
    assert os.getpid() == parent
    check_child(children[0])


def in_replicas(model: Model) -> None:
    """Workers, ranks and those who wait for an accumulator are threads of the parent."""
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    v = gpuopt.Variable(np.zeros(3), name="v")
    coordinator = sync.start(model.step, 0, token_policy="per_step")
    pairs = [(np.ones(3), v)]
    accumulator = ConditionalAccumulator(np.float64, (3,))
    group = ThreadGroup(2)

    def child() -> None:
        check_error(lambda: sync.worker(1), gpuopt.WorkerFailedError, "belong to process")
        coordinator.close()
        assert accumulator.apply_grad(np.ones(3))
        assert (accumulator.take_grad(1) == 1).all()
        again = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)

        def train(worker: Any) -> None:
            worker.apply_gradients(pairs, model.step)

        again.run(train, model.step, token_policy="per_step")
        sync.run(train, model.step, token_policy="per_step")
        assert (v.numpy() == -2).all()
        assert group.run(lambda rank: rank.all_reduce(np.ones(2)).sum()) == [4, 4]
        model.everything()

    def contribute() -> None:
        with sync.worker(0) as worker:
            worker.apply_gradients(pairs, model.step)

    threads = [
        threading.Thread(target=contribute),
        threading.Thread(target=lambda: accumulator.take_grad(2)),
    ]
    for thread in threads:
        thread.start()
    while coordinator.num_waiting() < 1 or not accumulator._turns:
        time.sleep(0.005)
    check_child(forked(child))
    with sync.worker(1) as worker:
        worker.apply_gradients(pairs, model.step)
    for _ in range(2):
        accumulator.apply_grad(np.ones(3))
    for thread in threads:
        thread.join(CHILD_DEADLINE_S)
        assert not thread.is_alive()


def in_a_rank(model: Model) -> None:
    """A rank that forks has left the others: the child's calls fail at once."""
    parent = os.getpid()
    children = []

    def fails(communicator: Any) -> None:
        check_error(communicator.barrier, gpuopt.WorkerFailedError, "threads of process")
        model.everything()

    def rank(communicator: Any) -> Any:
        if communicator.rank == 0:
            children.append(os.fork())
            if os.getpid() != parent:
                end_child(lambda: fails(communicator))
        return communicator.all_reduce(np.ones(2)).sum()

    assert ThreadGroup(2).run(rank) == [4, 4]
    check_child(children[0])


def checkpoints_of_the_parent(model: Model) -> None:
    """A child's `max_to_keep` removes nothing of its parent's."""
    saver = gpuopt.Saver([model.w], max_to_keep=2)
    of_parent = [saver.save(model.folder / "m", step) for step in (1, 2)]

    def child() -> None:
        for step in range(4):
            saver.save(model.folder / "c", step)
        assert len(saver.last_checkpoints) == 2

    check_child(forked(child))
    assert all(Path(path).exists() for path in of_parent)
    assert saver.last_checkpoints == of_parent


def with_a_gpu_in_use(model: Model) -> None:
    gpu = Device("gpu", 0)

    def child() -> None:
        check_error(
            lambda: gpuopt.Variable(np.zeros(3), device="gpu:0"),
            gpuopt.DeviceUnavailableError,
            "spawn",
        )
        model.everything()

    with backends.using(gpu, CpuBackend()):
        check_child(forked(child))
        backends.backend_for(gpu)


def by_multiprocessing(model: Model) -> None:
    context = multiprocessing.get_context("fork")

    def step(pause: Callable[[], None]) -> None:
        with between_writes("testing"), model.adam.state.lock, model.w.identity.lock:
            pause()

    with in_another_thread(step):
        process = context.Process(target=model.everything)
        process.start()
        process.join(CHILD_DEADLINE_S)
        code = process.exitcode
        process.kill()
        assert code == 0, "the child hangs" if code is None else code


def at_the_end_of_a_child_of_multiprocessing(model: Model) -> None:
    """It calls nothing that is registered with atexit, and waits for its saves nevertheless."""

    def child() -> None:
        checkpoint_writer._write_tensors = slow
        model.saver.save_async(model.folder / "last", 1)

    def slow(*arguments: Any) -> Any:
        time.sleep(0.3)
        return write(*arguments)

    write = checkpoint_writer._write_tensors
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(CHILD_DEADLINE_S)
    assert process.exitcode == 0
    model.saver.restore(model.folder / "last-1.safetensors")
    assert partial_files(model.folder) == []


def at_random_moments(model: Model) -> None:
    """Of another thread that makes, lists, saves and drops variables and slots."""
    optimizer = gpuopt.AdamOptimizer(0.1)
    average = gpuopt.ExponentialMovingAverage(0.5)
    saver = gpuopt.Saver(max_to_keep=1)
    before = set(names_of_variables())

    def work() -> None:
        new = gpuopt.Variable(np.zeros(3), name="new")
        optimizer.apply_gradients([(np.ones(3), new)])
        optimizer.minimize(lambda: np.sum(new * 2.0), None, [new], 0)
        average.apply([new])
        optimizer.variables()
        gpuopt.global_variables()
        optimizer.load_state_dict(optimizer.state_dict())
        saver.restore(saver.save(model.folder / "all", 1))
        assert saver.save_async(model.folder / "all", 2).result()

    def child() -> None:
        prefix = model.folder / "child"
        # What the other thread has made stays, as its frames do. What is made here goes.
        made = set(names_of_variables())
        own = gpuopt.Variable(np.zeros(3), name="own")
        optimizer.apply_gradients([(np.ones(3), own)])
        average.apply([own])
        del own
        assert set(names_of_variables()) - before - made <= {"beta1_power", "beta2_power"}
        optimizer.load_state_dict(optimizer.state_dict())
        value = model.w.numpy()
        path = saver.save(prefix, 1)
        model.w.assign(np.zeros(LARGE))
        saver.restore(path)
        np.testing.assert_array_equal(model.w.numpy(), value)
        saver.restore(saver.save_async(prefix, 2).result())
        model.train()
        model.stream()
        group = ThreadGroup(2, 5)
        assert group.run(lambda rank: rank.all_reduce(np.ones(2)).sum()) == [4, 4]

    locks._LONGEST_IMPORT_S = 0.05  # the other thread may be stopped in the middle of an import
    work()
    total = run_stopping(work, lambda: None, range(0))
    wanted = 400 if os.environ.get("GPUOPT_FULL") else 12
    start = random.randrange(2**32)
    print("seed", start)
    moments = sorted(random.Random(start).sample(range(total), min(wanted, total)))
    run_stopping(work, lambda: check_child(forked(child)), moments)


def names_of_variables() -> list[str]:
    return [variable.name for variable in gpuopt.global_variables()]


def run_stopping(work: Callable[[], None], do: Callable[[], None], moments: Sequence[int]) -> int:
    """Runs `work` in another thread, which stops at some moments while `do` is called.

    A moment is a line of code, or the beginning or end of a call. The thread's own threads go on.

    Returns:
        How many moments there were.
    """
    stopped, go_on, has_ended = threading.Event(), threading.Event(), threading.Event()
    number = 0
    left = set(moments)
    errors: list[BaseException] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal number
        if frame.f_globals.get("__name__") == "threading":
            return None
        if number in left:
            stopped.set()
            assert go_on.wait(3 * CHILD_DEADLINE_S)
            go_on.clear()
        number += 1
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            sys.settrace(None)
            has_ended.set()
            stopped.set()

    thread = threading.Thread(target=run)
    thread.start()
    for _ in moments:
        if has_ended.is_set():
            break
        assert stopped.wait(CHILD_DEADLINE_S)
        stopped.clear()
        # There may be fewer moments than in another run: waits look again and again.
        if not has_ended.is_set():
            try:
                do()
            except BaseException:
                print(
                    "at moment",
                    number,
                    "".join(traceback.format_stack(sys._current_frames()[thread.ident])),
                )
                left.clear()
                raise
            finally:
                go_on.set()
    thread.join(CHILD_DEADLINE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return number


SCENARIOS: dict[str, Callable[[Model], None]] = {
    scenario.__name__: scenario
    for scenario in (
        in_save_async,
        in_a_step,
        with_every_lock_held,
        in_its_own_step,
        in_its_own_save,
        in_a_compile,
        in_a_shared_update,
        in_replicas,
        in_a_rank,
        checkpoints_of_the_parent,
        with_a_gpu_in_use,
        by_multiprocessing,
        at_the_end_of_a_child_of_multiprocessing,
        at_random_moments,
    )
}

if __name__ == "__main__":
    # Of Python, that a child has none of its parent's threads.
    warnings.simplefilter("ignore", DeprecationWarning)
    SCENARIOS[sys.argv[1]](Model(Path(sys.argv[2])))
