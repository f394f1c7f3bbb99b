"""Times the host's part of steps on GPUs, on the stub driver.

    .venv/bin/python -m bench.gpu_host

Real CuPy runs on the tests' driver, which leaves kernels out. So this measures what the host does
in a step, without what a real driver adds for each launch; and nothing of what a GPU does.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bench.harness import ROOT, make_parser, report, write_results
from bench.launches import Step, time_on_host
from bench.targets import Target
from gpuopt.bench.machine import describe_commit
from gpuopt.bench.models import list_gpt2_shapes, shrink
from gpuopt.bench.workloads import Workload

# Narrower than they are, because their number counts here, and memory is short.
_GPT2 = shrink(list_gpt2_shapes(), divisor=12)
_TABLE, _ROWS = (1_000_000, 4), 65_536


class _Timed(NamedTuple):
    """A step to time.

    Attributes:
        step: The step.
        target_us: The most microseconds that it should take, where commit 29a79d3 took `then_us`.
            On another machine, the same ratio to that commit will do.
        then_us: See `target_us`; None for what that commit had not.
    """

    step: Step
    target_us: int
    then_us: int | None


STEPS = {
    "dense_adam_1_tensor": _Timed(Step(shapes=[(1000,)]), 40, 73),
    "dense_adam_gpt2": _Timed(Step(shapes=_GPT2), 60, 103),
    # The host's part hides behind the GPU's: a step of GPT-2's full shapes moves 3.5 GB.
    "dense_adam_gpt2_40_groups": _Timed(Step(["many_groups"], _GPT2), 250, None),
    "dense_adam_gpt2_three_sets": _Timed(Step(shapes=_GPT2, num_sets=3), 150, 216),
    "dense_adam_10000x64": _Timed(Step(shapes=[(64,)] * 10_000), 1500, 2900),
    "sparse_adagrad_64k_rows": _Timed(Step(["adagrad"], [_TABLE], rows=_ROWS), 120, 402),
    "all_features": _Timed(
        Step(
            ["lazy", "clip_norm", "averages", "groups", "growing_scale"],
            [(1000, 8)],
            rows=3,
            dense_shapes=[(64,)],
        ),
        700,
        None,
    ),
    "sparse_adagrad_26_tables": _Timed(Step(["adagrad"], [_TABLE] * 26, rows=_ROWS), 600, 9400),
}


def main() -> None:
    parser = make_parser("bench.gpu_host", __doc__, rounds=5)
    parser.add_argument("--against", metavar="CHECKOUT", help="another gpuopt, run in turn")
    options = parser.parse_args()
    checkouts = {"gpuopt": ROOT}
    if options.against:
        checkouts["against"] = Path(options.against).resolve()
    runs = {}
    for name, (step, target_us, then_us) in STEPS.items():
        timed = checkouts if then_us is not None else {"gpuopt": ROOT}
        samples: dict[str, list[float]] = {each: [] for each in timed}
        for _ in range(options.rounds):
            for each, checkout in timed.items():
                samples[each].append(time_on_host(step, checkout))
        targets = [Target(name, "median_ms", at_most=target_us / 1e3)]
        if "against" in samples and then_us is not None:
            targets.append(Target(name, "ratio", "against", at_most=round(target_us / then_us, 3)))
        against = f", against {describe_commit(checkouts['against'])}" if options.against else ""
        workload = Workload(f"the host's part of {name}, without a driver's{against}", {})
        runs[name] = report(name, workload, samples, targets)
    if not options.no_results:
        path = write_results(runs, "stub driver", device="stub driver")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
