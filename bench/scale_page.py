"""The tables of docs/scale.md, from the model and from what `bench.ranks` has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ROOT
from bench.page import make_table, replace_between
from bench.scale import (
    RANKS,
    Network,
    Stragglers,
    best_backups,
    chief_s,
    on_one_host_s,
    ring_s,
    shares_s,
    tree_s,
    wait_s,
)

PAGE = ROOT / "docs" / "scale.md"
MEASURED = RESULTS / "scale.json"
COMMAND = ".venv/bin/python -m bench.scale"

_SIZES_MB = (1, 16)
_MODELS_MB = (1, 100)


def write(results: Path | None = None) -> None:
    """Writes the page's tables.

    Args:
        results: A file of `bench.ranks`, from which the measured numbers are taken from now on.
    """
    if results is not None:
        MEASURED.write_text(json.dumps(_select(results), indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(f"written: {PAGE.relative_to(ROOT)}")


def with_tables(page: str) -> str:
    """Returns the text of docs/scale.md with the present tables."""
    measured = json.loads(MEASURED.read_text())
    tables = [_held_against(measured), _reductions(measured), _steps()]
    return replace_between(page, COMMAND, "\n".join(tables))


def _select(results: Path) -> dict[str, Any]:
    """Takes times out of a file of `bench.ranks`.

    Of each, the tenth percentile: other programs, and ranks that share a core, disturb it least.
    """
    found = json.loads(results.read_text())
    times = {
        name: workload["contenders"]["gpuopt"]["p10_ms"]
        for name, workload in found["workloads"].items()
        if name.startswith(("ranks_exchange_", "ranks_all_reduce_"))
    }
    return {
        "file": str(results.relative_to(RESULTS)),
        "cores": found["machine"]["cores"],
        "p10_ms": times,
    }


def _held_against(measured: Mapping[str, Any]) -> str:
    found, cores = measured["p10_ms"], measured["cores"]
    rows = []
    for mpi in ("openmpi", "mpich"):
        message_s = found[f"ranks_exchange_of_2_over_{mpi}"] / 1e3
        for megabytes in _SIZES_MB:
            num_bytes = megabytes * 2**20
            times = [found[f"ranks_all_reduce_{megabytes}mb_of_{n}_over_{mpi}"] for n in (2, 3, 4)]
            # The speed of memory that two ranks' time says, without the messages.
            for_bytes = times[0] / 1e3 - on_one_host_s(2, num_bytes, message_s, 1e99, cores)
            speed = num_bytes * on_one_host_s(2, 1, 0, 1, cores) / for_bytes
            for ranks, took in zip((2, 3, 4), times, strict=True):
                modelled = 1e3 * on_one_host_s(ranks, num_bytes, message_s, speed, cores)
                shown = [f"{took:.2f}", "(fitted)" if ranks == 2 else f"{modelled:.2f}"]
                rows.append([mpi, f"{megabytes} MB", ranks, *shown])
    headers = " and ".join(
        f"{1e3 * found[f'ranks_exchange_of_2_over_{mpi}']:.0f} us over {mpi}"
        for mpi in ("openmpi", "mpich")
    )
    text = (
        f"## Held against a host of {cores} cores\n\n"
        f"Tenth percentiles of `bench/results/{measured['file']}`.\n"
        f"An exchange of headers between two ranks took {headers}.\n\n"
    )
    return text + make_table(["MPI", "arrays", "ranks", "measured, ms", "modelled, ms"], rows)


def _reductions(measured: Mapping[str, Any]) -> str:
    network = Network()
    message_s = measured["p10_ms"]["ranks_exchange_of_2_over_mpich"] / 1e3
    rows = []
    for ranks in RANKS:
        row: list[object] = [f"{ranks:,}"]
        for megabytes in _MODELS_MB:
            num_bytes = megabytes * 1e6
            row += [
                _ms(ring_s(ranks, num_bytes, network)),
                _ms(tree_s(ranks, num_bytes, network)),
                _ms(shares_s(ranks, num_bytes, network, message_s)),
            ]
        rows.append(row)
    headings = ["ranks"]
    for megabytes in _MODELS_MB:
        headings += [f"{megabytes} MB: ring", "tree", "`MPICommunicator`"]
    return "## One reduction, modelled, in ms\n\n" + make_table(headings, rows)


def _steps() -> str:
    network, stragglers = Network(), Stragglers()
    rows = []
    for ranks in RANKS:
        row: list[object] = [f"{ranks:,}", _ms(wait_s(ranks, ranks, stragglers))]
        for megabytes in _MODELS_MB:
            num_bytes = megabytes * 1e6

            def by_ring(number: int, num_bytes: float = num_bytes) -> float:
                return ring_s(number, num_bytes, network)

            def by_chief(number: int, num_bytes: float = num_bytes) -> float:
                return chief_s(number, num_bytes, network)

            plain = ranks / (wait_s(ranks, ranks, stragglers) + by_ring(ranks))
            for reduce_s in (by_chief, by_ring):
                backups, rate = best_backups(ranks, stragglers, reduce_s)
                row.append(f"{rate / plain:.2f} ({backups})")
        rows.append(row)
    headings = ["ranks", "all have computed after, ms"]
    for megabytes in _MODELS_MB:
        headings += [f"{megabytes} MB: one chief", "as a ring"]
    return "## Backup workers, modelled\n\n" + make_table(headings, rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"
