"""Contrib's optimizers of workers over the processes of a job."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import workers
from mpi_job import run_job

from gpuopt.distributed import ThreadGroup

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", params=[2, 4])
def traces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[object]]]:
    """What each rank of a job has got by training, by the kind of optimizer."""
    folder = tmp_path_factory.mktemp("workers")
    job = run_job(request.param, workers.__file__, folder)
    assert job.status == 0, job
    files = {kind: sorted(folder.glob(f"{kind}.*.json")) for kind in workers.KINDS}
    return {kind: [json.loads(Path(f).read_text()) for f in files[kind]] for kind in files}


@pytest.mark.parametrize("kind", workers.KINDS)
def test_processes_get_the_naive_models_values_and_the_bits_of_threads(
    kind: str, traces: dict[str, list[list[object]]]
) -> None:
    size = len(traces[kind])
    workers.assert_close(traces[kind], workers.Model(kind, size).run())
    in_threads = ThreadGroup(size, 20.0).run(partial(workers.trace, kind))
    assert traces[kind] == json.loads(json.dumps(in_threads))
