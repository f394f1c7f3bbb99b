"""Whatever the order of steps, saves and restores: the state is that of the steps that count."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dtypes import DTYPES
from every_optimizer import CONFIGURATIONS, make, own_step
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuopt
from gpuopt import IndexedSlices, Saver, Variable

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.integers(0, 2**31)),
        st.tuples(st.sampled_from(["save", "save_async", "restore", "fresh", "state_dict"])),
    ),
    min_size=1,
    max_size=14,
)


class Model:
    def __init__(self, configuration: Any, variables: list[tuple[tuple[int, ...], Any]]) -> None:
        _, name, arguments = configuration
        rng = np.random.default_rng(1)
        self.named: dict[str, Any] = {
            f"v{i}": Variable(np.asarray(rng.normal(size=shape)).astype(dtype), name=f"v{i}")
            for i, (shape, dtype) in enumerate(variables)
        }
        self.optimizer = make(name, arguments)
        self.step = own_step(self.optimizer)
        if self.step is None:
            self.step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
        self.saver = Saver({**self.named, "global_step": self.step}, optimizers=[self.optimizer])

    def apply(self, seed: int) -> None:
        """A step by gradients that the seed decides: none, dense, or some rows, repeated or not."""
        rng = np.random.default_rng(seed)
        pairs: list[Any] = []
        for variable in self.named.values():
            kind = rng.integers(0, 4)
            rows = variable.shape[0] if variable.ndim else 0
            if kind == 0:
                gradient = None
            elif kind == 1 and rows:
                indices = rng.integers(0, rows, size=rng.integers(0, 6))
                values = rng.normal(size=(indices.size, *variable.shape[1:]))
                gradient = IndexedSlices(values.astype(variable.dtype), indices)
            else:
                gradient = np.asarray(rng.normal(size=variable.shape)).astype(variable.dtype)
            pairs.append((gradient, variable))
        if any(gradient is not None for gradient, _ in pairs):
            self.optimizer.apply_gradients(pairs, global_step=self.step)

    def state(self) -> dict[str, Any]:
        """Everything as bytes, with dtypes."""
        state = self.optimizer.state_dict(self.named)
        values = {name: variable.numpy() for name, variable in self.named.items()}
        values["global_step"] = self.step.numpy()
        for slot, by_variable in state["slots"].items():
            values.update({f"{slot} of {name}": array for name, array in by_variable.items()})
        values.update(state["non_slots"])
        return {name: (a.dtype, a.shape, a.tobytes()) for name, a in values.items()}


@given(
    configuration=st.sampled_from(CONFIGURATIONS),
    variables=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=3),
    program=operations,
)
@settings(max_examples=250 if os.environ.get("GPUOPT_FULL") else 60, deadline=None)
def test_state_is_that_of_a_run_without_checkpoints(
    configuration: Any, variables: Any, program: Any
) -> None:
    model = Model(configuration, variables)
    history: list[int] = []
    saved: tuple[str, list[int]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for number, (operation, *arguments) in enumerate(program):
            path = Path(folder, "model")
            if operation == "apply":
                model.apply(*arguments)
                history.append(*arguments)
            elif operation == "save":
                saved = model.saver.save(path, global_step=number), list(history)
            elif operation == "save_async":
                future = model.saver.save_async(path, global_step=number)
                expected = list(history)
                if number % 2:  # steps may be made before it is written
                    model.apply(number)
                    history.append(number)
                saved = future.result(), expected
            elif operation == "state_dict":
                state = model.optimizer.state_dict(model.named)
                values = {name: variable.numpy() for name, variable in model.named.items()}
                step = model.step.numpy()
                model = Model(configuration, variables)
                model.optimizer.load_state_dict(state, model.named)
                model.step.assign(step)
                for name, value in values.items():
                    model.named[name].assign(value)
            elif saved is not None:
                if operation == "fresh":
                    model = Model(configuration, variables)
                    model.saver.restore(saved[0])
                else:
                    # Slots made since the save have no value in it; but if it has none at all, it
                    # is of before the first slots.
                    names = set(replayed(configuration, variables, saved[1]))
                    made_since = set(model.state()) - names
                    if made_since and names != set(Model(configuration, variables).state()):
                        before = model.state()
                        with pytest.raises(gpuopt.CheckpointError, match="has no"):
                            model.saver.restore(saved[0])
                        assert model.state() == before
                        continue
                    model.saver.restore(saved[0])
                history = list(saved[1])
    assert model.state() == replayed(configuration, variables, history)


def replayed(configuration: Any, variables: Any, history: list[int]) -> dict[str, Any]:
    model = Model(configuration, variables)
    for seed in history:
        model.apply(seed)
    return model.state()
