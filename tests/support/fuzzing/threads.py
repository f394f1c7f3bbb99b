"""Operations with several threads or processes."""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from safetensors.numpy import load_file

import gpuopt
from fuzzing import steps
from fuzzing.saves import BALLAST, Files, load_state_dict, make_saver, state_dict
from fuzzing.world import World, put
from gpuopt.optimizer import living_optimizers

CHILD_LIMIT_S = 30.0
# Elements: other threads have time to come in between.
WATCHED = 200_000


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads come in between at every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def in_background(work: Callable[[], None]) -> Iterator[None]:
    """Repeats some work in another thread as long as the body runs; raises its error."""
    end = threading.Event()
    has_begun = threading.Event()

    def repeat() -> None:
        while not end.is_set():
            work()
            has_begun.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(repeat)
        try:
            while not has_begun.wait(0.01) and not done.done():
                pass
            yield
        finally:
            end.set()
            done.result(60)


def threads(world: World, files: Files) -> str:
    """Threads that each step arrays of their own, some of them with one optimizer together."""
    places = world.apart(6)
    groups = [places[start::3] for start in range(3) if places[start::3]]
    common = [trainer for trainer in world.trainers if not trainer.model.other_names]
    shared = world.choose(common) if common and world.happens(0.5) else None
    calls = []
    for number, group in enumerate(groups):
        trainer = shared or world.trainers[number]
        gradients = [steps.GRADIENTS[0][1](world, place, []) for place in group]
        pairs = [
            (gradient.real, place.given(world.rng))
            for gradient, place in zip(gradients, group, strict=True)
        ]
        calls.append(steps.Call(trainer, group, gradients, pairs))
    times = int(world.rng.integers(1, 5))

    def run(call: steps.Call) -> None:
        for _ in range(times):
            steps.apply_for_real(world, call, counts=False)

    with switching_often(), ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(run, call) for call in calls]:
            done.result(60)
    for call in calls:
        for _ in range(times):
            steps.apply_in_model(world, call, counts=False)
    return f"{times} x in threads: {'; '.join(map(str, calls))}"


def written_while_saved(world: World, files: Files) -> str:
    """Each file holds one moment between steps and other writes of other threads."""
    device = world.choose(world.devices)
    size = WATCHED if device == "cpu" else WATCHED // 100  # emulated kernels are slow
    zeros = np.zeros(size, np.float32)
    stepped = [gpuopt.Variable(zeros, name=f"s{n}", device=device) for n in range(2)]
    assigned = [gpuopt.Variable(zeros, name=f"a{n}", device=device) for n in range(3)]
    optimizer = gpuopt.GradientDescentOptimizer(1.0, name="watched")
    gradient = put(zeros - 1, device)
    values = [put(zeros + number, device) for number in range(2)]
    counts = itertools.count()

    def step() -> None:
        optimizer.apply_gradients([(gradient, variable) for variable in stepped])

    def assign() -> None:
        number = next(counts) % 2
        assigned[0].assign(values[number])
        assigned[1].assign_add(gradient)
        assigned[2][...] = number

    saver = gpuopt.Saver([*stepped, *assigned], max_to_keep=1)
    with in_background(step), in_background(assign):
        for number in range(3):
            saved = load_file(saver.save(world.folder / "watched", number))
            for name, value in saved.items():
                assert (value == value[0]).all(), f"{name} is of several moments"
            assert saved["s0"][0] == saved["s1"][0], "one step is there in part"
    return "saves while other threads step and assign"


def listed_while_made(world: World, files: Files) -> str:
    """Variables, slots and optimizers are listed while another thread makes and drops some."""
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5, name="listed")
    gradient = np.zeros(2, np.float32)
    # Long lists leave others time to come in between.
    long_list = [gpuopt.Variable(0.0, name="listed") for _ in range(150)]
    others = [gpuopt.GradientDescentOptimizer(1.0, name="listed") for _ in range(150)]
    trainers = {id(trainer.real) for trainer in world.trainers}

    def make() -> None:
        some = [gpuopt.Variable(np.zeros(2, np.float32), name="listed") for _ in range(8)]
        optimizer.apply_gradients([(gradient, variable) for variable in some])
        for _ in range(50):
            gpuopt.GradientDescentOptimizer(1.0, name="listed")

    ours = {id(place.variable) for place in world.places if place.variable is not None}
    with switching_often(), in_background(make):
        for _ in range(30):
            assert ours <= {id(variable) for variable in gpuopt.global_variables()}
            assert ours <= {id(variable) for variable in gpuopt.trainable_variables()}
            assert trainers <= {id(each) for each in living_optimizers()}
            optimizer.variables()
            optimizer.state_dict()
    del long_list, others
    return "lists while another thread makes variables"


def fork(world: World, files: Files) -> str:
    """A child goes on with what the parent has, whatever the parent's threads are doing."""
    background = "a background save"
    busy = world.choose(["a step", "a save", background, background, "a finished save"])
    variable = gpuopt.Variable(np.zeros(BALLAST, np.float32), name="busy")
    optimizer = gpuopt.AdamOptimizer(0.5, name="busy")
    saver = gpuopt.Saver({"busy": variable}, optimizers=[optimizer], max_to_keep=0)
    gradient = np.ones(BALLAST, np.float32)
    path = world.folder / "busy"

    def work() -> None:
        if busy == "a step":
            optimizer.apply_gradients([(gradient, variable)])
        elif busy == "a save":
            saver.save(path)
        else:
            time.sleep(0.001)

    is_background = busy in (background, "a finished save")
    future = saver.save_async(path) if is_background else None
    if future is not None and busy != background:
        future.result(60)

    def child() -> list[str]:
        if future is not None:
            was_done = future.done()
            saver.save_async(world.folder / "child").result(20)
            assert future.done() == was_done, "a child has made its parent's save"
        return _child(world, files)

    with in_background(work):
        done = in_child(child)
    if future is not None:
        future.result(60)
    return f"fork while another thread does {busy}; the child: {done}"


def _child(world: World, files: Files) -> list[str]:
    """Some operations, in a process that ends then; returns their texts."""
    for saver in files.savers:
        saver.pending = None  # the parent's
    texts = [steps.step(world)]
    world.check()
    files.folders = [world.folder / f"child-{os.getpid()}"]
    files.folders[0].mkdir()
    files.content.clear()
    # Others would remove the parent's files.
    known = [saver for saver in files.savers if not saver.most]
    for saver in (*known, make_saver(world, files, 0)):
        before = files.snapshot(saver.places)
        path = saver.real.save(files.folders[0] / "m", 1)
        texts.append(steps.step(world))
        world.check()
        assert saver.real.save_async(files.folders[0] / "m", 2).result(20)
        values = load_file(path)
        for label, value in before.values.items():
            np.testing.assert_array_equal(values[label], value)
    for operation in (state_dict, load_state_dict):
        texts.append(operation(world, files))
        world.check()
    return texts


def in_child(work: Callable[[], list[str]]) -> str:
    """Runs some work in a forked child, and returns what it says; raises what it raised."""
    answer, says = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            text = "; ".join(work())
            status = 0
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(says, text.encode()[:60_000])
            os._exit(status)
    os.close(says)
    text = b""
    deadline = time.monotonic() + CHILD_LIMIT_S
    while True:
        ready, _, _ = select.select([answer], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
        piece = os.read(answer, 65536)
        if not piece:
            break
        text += piece
    os.close(answer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the child ended with {status}: {text.decode()}"
    return text.decode()
