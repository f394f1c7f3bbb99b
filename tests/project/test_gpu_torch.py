"""Torch's calls for the stages of a step are counted as its sources say, and as torch runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from bench.gpu_modelled import read
from bench.gpu_stages import ELEMENTS, RESULT, SHAPES, STEPS
from bench.gpu_timing import GPUS
from bench.gpu_torch import ALONE, Call, Pass, calls_for, count

# Bytes an element: `g` is the gradient, `w` the parameter, `m` and `v` its moments.
BYTES = {
    # g, and w m v twice
    "plain": 28,
    "decay": 28,
    "groups": 28,
    # g twice, two times
    "clip_value": 16 + 28,
    # g; g twice
    "clip_norm": 12 + 28,
    "clip_norm, decay": 12 + 28,
    # w, and the average twice
    "averages": 28 + 12,
    "decay, averages": 28 + 12,
    "clip_norm, decay, averages": 12 + 28 + 12,
    # g twice, and once more where it is divided in the update, or before
    "loss_scale": 8 + 28 + 4,
    "loss_scale, clip_norm, decay": 8 + 12 + 28,
    "on_nonfinite": 4 + 28,
    # it is kept; g, and the sum twice; and the step
    "accumulation: the first call": 0,
    "accumulation: a call between": 12,
    "accumulation: the call that updates": 12 + 28,
    "bfloat16": 14,
    "bfloat16, averages": 14 + 6,
    # of 16 bits; g to 32 bits, the step, w from 32 bits
    'masters="float32"': 6 + 28 + 6,
    'masters="float32", clip_norm, decay': 6 + 6 + 28 + 6,
    'masters="float32", loss_scale, clip_norm': 6 + 8 + 12 + 28 + 6,
    'masters="float32", averages': 6 + 28 + 6 + 12,
    'masters="float32", accumulation: a call between': 6,
    'slot_dtype="bfloat16"': 4 + 2 * (4 + 2 + 2),
}
# What waits for the GPU.
WAITING = {name for name, stages in STEPS.items() if "on_nonfinite" in stages}

# Where ours do more: torch keeps the first gradients, and adds those of 16 bits in 16 bits; and
# averages that no update moves.
MORE = {
    "accumulation: the first call",
    'masters="float32", accumulation: the first call',
    'masters="float32", accumulation: a call between',
}


@pytest.mark.parametrize("name", BYTES)
def test_torchs_passes_move_what_they_read_and_write(name: str) -> None:
    calls = calls_for(STEPS[name])
    assert calls is not None
    assert count(calls, SHAPES).num_bytes == ELEMENTS * BYTES[name]


def test_torch_has_calls_for_all_steps_but_those_named() -> None:
    without = {name for name, stages in STEPS.items() if calls_for(stages) is None}
    assert without == {name for name, stages in STEPS.items() if ALONE.keys() & set(stages)}
    assert without < STEPS.keys()
    for name, stages in STEPS.items():
        calls = calls_for(stages) or []
        assert count(calls, SHAPES).waits == (name in WAITING), name


def test_lists_of_tensors_take_a_launch_for_so_many_chunks_or_tensors() -> None:
    four = [(65536 * 560,)] * 4  # 2,240 chunks
    small = [(3,)] * 771
    one = Call("", "", [Pass(8, lists=1)])
    assert count([one], four).launches == 1
    assert count([one], [(65536 * 560 + 1,)] * 4).launches == 2
    assert count([one], small).launches == 2
    assert count([one], small[1:]).launches == 1
    assert count([Call("", "", [Pass(8, lists=4)])], small).launches == 4
    assert count([Call("", "", [Pass(8, lists=0)], others=2)], four).launches == 6
    assert count([Call("", "", [Pass(8, lists=1, share=0.5)] * 2)], small[1:]).launches == 2


def test_a_step_of_ours_launches_and_moves_no_more_than_torchs_calls() -> None:
    result = read(RESULT)
    assert set(result["torch"]) == {n for n, stages in STEPS.items() if calls_for(stages)}
    for name, theirs in result["torch"].items():
        ours = result["steps"][name]
        assert set(ours["modelled_us"]) == set(theirs["modelled_us"]) == set(GPUS)
        if name not in MORE:
            assert ours["num_bytes"] <= theirs["num_bytes"], name
            assert len(ours["launches"]) <= theirs["launches"], name
        if "clip_norm" in STEPS[name]:
            for gpu in GPUS:
                assert ours["modelled_us"][gpu] < theirs["modelled_us"][gpu], name


# ---- Torch's own word: what it calls, on a CPU


SMALL = [(2, 3)] * 4


class Torch:
    """Parameters with gradients, and what a user of torch has beside them."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SMALL]
        self.gradients = [torch.ones(shape) for shape in SMALL]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer = self.adam([self.parameters])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.ones(()))

        class Nothing(torch.optim.SGD):  # type: ignore[misc]
            """Lets a step of the scaler be seen without an optimizer's."""

            _step_supports_amp_scaling = True

            def step(self, closure: Any = None) -> None:
                pass

        self.nothing = Nothing(self.parameters, 0.1)

    def adam(self, groups: Sequence[Sequence[Any]]) -> Any:
        """Makes an optimizer that has its state already."""
        made = self.torch.optim.AdamW([{"params": list(each)} for each in groups], fused=True)
        made.step()
        return made

    def step(self, name: str) -> Callable[[], object]:
        """Returns a step of AdamW by the name of its call."""
        if name.endswith("param_groups"):
            self.optimizer = self.adam([self.parameters[::2], self.parameters[1::2]])
        if name.endswith("unscaling"):
            self.optimizer.grad_scale = self.torch.ones(())
        if name.endswith(("unscaling", "may skip")):
            self.optimizer.found_inf = self.torch.zeros(())
        return self.optimizer.step  # type: ignore[no-any-return]

    def after_unscaling(self, call: Callable[[], object]) -> Callable[[], object]:
        self.scaler.unscale_(self.nothing)
        return call

    def backward(self, are_there: bool) -> Callable[[], object]:
        if not are_there:
            self.nothing.zero_grad(set_to_none=True)
        total = self.torch.stack([(each * each).sum() for each in self.parameters]).sum()
        return total.backward  # type: ignore[no-any-return]

    def prepare(self, name: str) -> Callable[[], object]:
        """Returns what makes a call, when all before it is done."""
        torch, utils = self.torch, self.torch.nn.utils
        parameters, gradients, scaler = self.parameters, self.gradients, self.scaler
        if name.startswith("AdamW"):
            return self.step(name)
        norm, others = torch.ones(()), [each.bfloat16() for each in gradients]
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        every: dict[str, Callable[[], Callable[[], object]]] = {
            "clip_grad_value_": lambda: partial(
                utils.clip_grad_value_, parameters, 1.0, foreach=True
            ),
            "clip_grad_norm_": lambda: partial(
                utils.clip_grad_norm_, parameters, 1.0, foreach=True
            ),
            "get_total_norm": lambda: partial(utils.get_total_norm, gradients, foreach=True),
            "if isfinite": lambda: lambda: bool(torch.isfinite(norm)),
            "GradScaler.unscale_": lambda: partial(scaler.unscale_, self.nothing),
            "GradScaler.step, after": lambda: self.after_unscaling(
                partial(scaler.step, self.nothing)
            ),
            "GradScaler.step": lambda: partial(scaler.step, self.nothing),
            "GradScaler.update": lambda: self.after_unscaling(scaler.update),
            "get_ema": lambda: partial(average, gradients, list(map(torch.detach, parameters)), 0),
            "_foreach_copy_": lambda: partial(torch._foreach_copy_, others, gradients),
            "backward, with": lambda: self.backward(are_there=True),
            "backward, after": lambda: self.backward(are_there=False),
        }
        return next(make() for begin, make in every.items() if name.startswith(begin))


# Kernels beside the pass, of calls that make one.
BESIDE = {"_foreach_norm": 2}
SINGLE = {
    *("stack", "linalg_vector_norm", "add", "reciprocal", "mul", "clamp", "full", "eq", "ne"),
    *("abs", "_amp_update_scale_"),
}
NOTHING = {"empty_like", "detach", "view", "empty", "lift_fresh", "is_nonzero"}


def passes_and_others(torch: Any, run: Callable[[], object], is_backward: bool) -> Any:
    """Returns how many passes, kernels on single numbers, copies and waits torch makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    passes = others = copies = waits = 0

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal passes, others, copies, waits
            library, _, name = func._schema.name.partition("::")
            if library != "aten":
                pass
            elif is_backward:  # its other kernels are the model's
                passes += name in ("add_", "clone") and args[0].numel() > 1
            elif name.startswith(("_foreach", "_fused", "_amp_foreach")):
                if args[0][0].numel() > 1:
                    passes += 1
                    others += BESIDE.get(name, 0)
                else:
                    others += 1
            elif name == "_to_copy":
                is_same = args[0].dtype == (kwargs or {}).get("dtype", args[0].dtype)
                copies += is_same
                others += not is_same
            elif name == "_local_scalar_dense":
                copies += 1
                waits += 1
            elif name in SINGLE:
                others += 1
            else:
                assert name in NOTHING, name
            return func(*args, **(kwargs or {}))

    with Counting():
        run()
    return passes, others, copies, waits


CALLS = {call.name: call for stages in STEPS.values() for call in calls_for(stages) or []}


@pytest.mark.torch
@pytest.mark.parametrize("name", CALLS)
def test_torch_makes_the_calls_that_are_counted(name: str) -> None:
    torch = pytest.importorskip("torch")
    call, is_backward = CALLS[name], name.startswith("backward")
    found = passes_and_others(torch, Torch(torch).prepare(name), is_backward)
    passes = len(call.passes) * (len(SMALL) if is_backward else 1)
    assert found == (passes, call.others, call.copies, call.waits)
