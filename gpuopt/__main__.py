"""The command line: `gpuopt demo`, `gpuopt bench`, `gpuopt info` and `gpuopt show`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import gpuopt
from gpuopt import environment, show
from gpuopt.backends import backend_for
from gpuopt.backends.cuda.availability import why_no_gpu
from gpuopt.bench import command as bench
from gpuopt.bench.contenders import ContenderError
from gpuopt.bench.results import ResultsError
from gpuopt.bench.workloads import DTYPES
from gpuopt.demo.settings import DEFAULT_NAMES, NAMES
from gpuopt.demo.train import BATCH_SIZE, DEFAULT_STEPS, train
from gpuopt.device import Device
from gpuopt.errors import DeviceUnavailableError
from gpuopt.extras import import_for
from gpuopt.info import describe

_EPILOG = """\
exit status:
  0    all is well
  1    what was asked for cannot be done, or gpuopt is slower than in `bench --compare OLD`
  2    wrong arguments, files or output that cannot be read or written, or nothing of gpuopt's
       that `bench --compare OLD` could compare
  130  Ctrl-C

environment:
  GPUOPT_THREADS    threads that share a large update in host memory
  GPUOPT_COMPILED   0: rules run as numpy's calls, and are not compiled
  GPUOPT_CACHE_DIR  the folder of compiled rules
  CXX               the C++ compiler, with arguments if need be
  XDG_CACHE_HOME    without GPUOPT_CACHE_DIR, compiled rules are in its subfolder gpuopt
  GPUOPT_CHECK      1: each step waits until a GPU has checked the rows of sparse gradients
  CUPY_CACHE_DIR    the folder where CuPy keeps compiled kernels

`gpuopt COMMAND --help` lists a command's arguments."""
# Formats that matplotlib writes without further software.
_PICTURES = (".png", ".svg", ".pdf")


# As shells say that a signal has ended a process: 128 more than its number.
_INTERRUPTED = 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """Refuses wrong arguments in one line, and says so where help cannot be written.

    argparse itself prints the usage before the line, and ignores errors of stdout.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            sys.stdout.write(message)
        else:
            super()._print_message(message, file)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults as they are typed, but not that an option is off or has none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {shlex.join(action.default).replace('%', '%%')})"
        return super()._get_help_string(action)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    if sys.stdout is None:  # as after `gpuopt info >&-`
        print("gpuopt: standard output is closed", file=sys.stderr)
        return 2
    try:
        try:
            return _run(arguments)
        finally:  # also where argparse ends the process, after --help
            sys.stdout.flush()
    except OSError as error:
        if "mpi4py.MPI" in sys.modules and not isinstance(error, BrokenPipeError):
            raise
        # The interpreter flushes stdout again at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the pipe's reader has stopped, as in `... | head`
            return 1
        print(f"gpuopt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if "mpi4py.MPI" in sys.modules:  # whose job ends by the exception
            raise
        return _INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = _make_parser()
    options, others = parser.parse_known_args(arguments)
    if options.command == "show":
        return _run_show(options, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.command == "info":
        for subject, answer in describe():
            print(f"{subject:<16} {answer}")
        return 0
    try:
        environment.settings()
    except ValueError as error:
        parser.error(str(error))
    try:
        if options.command is not None:
            import_for(f"gpuopt {options.command}'s tables", "rich", "command")
        if options.command == "demo":
            import_for("gradients of a loss", "autograd", "losses")
    except ModuleNotFoundError as error:
        parser.error(str(error))
    if options.command == "demo":
        if options.ranks != "workers" and (options.replicas_to_aggregate or 1) > options.workers:
            parser.error("--replicas-to-aggregate must not be more than --workers")
        return _run_demo(options)
    if options.command == "bench":
        if (reason := bench.why_refused(options)) is not None:
            parser.error(reason)
        return _run_bench(options)
    parser.error("a command is missing: bench, demo, info or show; --help says more")


def _run_show(options: argparse.Namespace, words: Sequence[str]) -> int:
    try:
        print(show.text_of(options.optimizer, options.dtype, words))
    except show.ShowError as error:
        print(f"gpuopt show: {error}", file=sys.stderr)
        return 2
    return 0


def _run_bench(options: argparse.Namespace) -> int:
    try:
        return bench.run(options, options.device)
    except (ContenderError, ResultsError) as error:
        print(f"gpuopt bench: {error}", file=sys.stderr)
        return 2


def _run_demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    from gpuopt.demo.parallel import Ranks, choose_device
    from gpuopt.demo.report import print_table, print_workers, save_curves, show_progress
    from gpuopt.distributed import MPIGroup
    from gpuopt.distributed.communicators.launcher import place_in_job

    group = ranks = None
    device, workers = options.device, options.workers
    if options.ranks:
        try:
            group = MPIGroup()
        except (ImportError, RuntimeError) as error:
            print(f"gpuopt demo: {error}", file=sys.stderr)
            return 1
    else:
        place = place_in_job()
        if place.rank == 0 and place.size > 1:
            print(
                f"gpuopt demo: each of {place.size} processes trains by itself, and prints its "
                "own table; with --ranks they train together",
                file=sys.stderr,
                flush=True,
            )
    is_first = group is None or group.rank == 0
    if group is not None and options.ranks == "replicas":
        ranks = Ranks(group, device)
    elif group is not None:
        device, workers = choose_device(group, device), group.size - 1
        if workers < (options.replicas_to_aggregate or 1):
            if is_first:
                print(
                    f"gpuopt demo: {group.size} processes are a chief and {workers} workers; there "
                    f"must be {options.replicas_to_aggregate or 1} workers or more",
                    file=sys.stderr,
                )
            return 2
    console = Console(quiet=not is_first)
    names = NAMES if "all" in options.optimizer else options.optimizer
    results = []
    for name in names:
        with show_progress(console, name, options.steps) as on_step:
            results.append(
                train(
                    name,
                    device=device,
                    dtype=np.dtype(DTYPES[options.dtype]),
                    steps=options.steps,
                    seed=options.seed,
                    autodiff=options.autodiff,
                    workers=workers,
                    replicas_to_aggregate=options.replicas_to_aggregate,
                    towers=options.towers,
                    ranks=ranks,
                    group=None if ranks else group,
                    on_step=on_step,
                )
            )
    if not is_first:
        return 0
    print_table(console, results)
    for result in results:
        if result.workers:
            print_workers(console, result)
    try:
        drawn = save_curves(results, options.output)
    except OSError as error:
        print(f"gpuopt demo: the curves were not saved: {error}", file=sys.stderr)
        return 1
    if drawn:
        print(f"loss and accuracy curves: {options.output}")
    else:
        print("for a picture of the curves: pip install matplotlib")
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gpuopt",
        description="TensorFlow 1's optimizers for CuPy and numpy arrays.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gpuopt {gpuopt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands.add_parser(
        "info",
        help="list devices and libraries, and say why a GPU is not usable",
        description="Lists this machine's devices and libraries, whether rules are compiled, and "
        "for each GPU that is not usable, the reason and what to do.",
    )
    demo = commands.add_parser(
        "demo",
        help="train a classifier of handwritten digits",
        description="Trains a classifier of handwritten digits, whose images are in the package, "
        "by each optimizer that is named; prints a table of times and accuracies, and draws curves "
        "where matplotlib is installed.",
        formatter_class=_Help,
    )
    demo.add_argument(
        "--optimizer",
        type=_parse_optimizer,
        nargs="+",
        default=DEFAULT_NAMES,
        metavar="NAME",
        help=f"some of {', '.join(NAMES)}, or all",
    )
    _add_device(demo)
    demo.add_argument(
        "--steps", type=_parse_positive, default=DEFAULT_STEPS, help="batches to train on"
    )
    demo.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    demo.add_argument("--seed", type=_parse_seed, default=0, help="seed for weights and batches")
    demo.add_argument(
        "--autodiff",
        action="store_true",
        help="differentiate the loss instead of using gradients written by hand",
    )
    parallel = demo.add_mutually_exclusive_group()
    parallel.add_argument(
        "--workers",
        type=_parse_positive,
        default=1,
        help="threads that compute gradients for the same steps",
    )
    parallel.add_argument(
        "--towers", type=_parse_towers, default=1, help="parts that each batch is split into"
    )
    parallel.add_argument(
        "--ranks",
        nargs="?",
        choices=("replicas", "workers"),
        const="replicas",
        help="train with all processes that mpiexec has started, on GPUs each on one of its own: "
        "as replicas of one step (over NCCL if it is there), which is the default, or as workers "
        "with the first one as chief",
    )
    demo.add_argument(
        "--replicas-to-aggregate",
        type=_parse_positive,
        metavar="NUMBER",
        help="how many workers' gradients make a step; by default, all",
    )
    demo.add_argument(
        "--output", type=_parse_picture, default="digits-curves.png", help="file for the curves"
    )
    benchmark = commands.add_parser(
        "bench",
        help="time gpuopt beside what is installed of torch, optax and Thinc",
        description="Times steps of real models' sizes by gpuopt, by what is installed of torch, "
        "optax and Thinc, and by plain array code, in turns; prints medians, bandwidth and memory.",
        formatter_class=_Help,
    )
    bench.add_arguments(benchmark)
    _add_device(benchmark)
    show.add_arguments(
        commands.add_parser(
            "show",
            help="print the C++ of an optimizer's step",
            description="Prints the stages of an optimizer's step, how each array is stored, and "
            "the C++ that is generated for the step. It needs no GPU.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
    )
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=_parse_device,
        default="auto",
        help='"cpu", "gpu:<index>", or "auto", which is gpu:0 if there is a GPU',
    )


def _parse_optimizer(text: str) -> str:
    wanted = text.lower().removesuffix("optimizer")
    for name in (*NAMES, "all"):
        if name.lower() == wanted:
            return name
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(NAMES)}, all")


def _parse_device(text: str) -> Device:
    if text == "auto":
        text = "cpu" if why_no_gpu() else "gpu"
    try:
        device = Device.parse(text)
        backend_for(device)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except DeviceUnavailableError as error:
        reason = why_no_gpu() or error
        raise argparse.ArgumentTypeError(f"{device} is not usable: {reason}") from error
    return device


def _parse_positive(text: str) -> int:
    return _parse_whole_number(text, at_least=1)


def _parse_towers(text: str) -> int:
    towers = _parse_positive(text)
    if BATCH_SIZE % towers:
        raise argparse.ArgumentTypeError(f"{towers} towers cannot share {BATCH_SIZE} images evenly")
    return towers


def _parse_seed(text: str) -> int:
    return _parse_whole_number(text, at_least=0)


def _parse_picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return path


def _parse_whole_number(text: str, at_least: int) -> int:
    if not text.isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {at_least}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
