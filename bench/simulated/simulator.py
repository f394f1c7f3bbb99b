"""Finds GPGPU-Sim, or fetches and builds it: outside the repository, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SOURCE = "https://github.com/accel-sim/gpgpu-sim_distribution"
COMMIT = "667834cf"
_PATCHES = sorted((Path(__file__).parent / "patches").glob("*.diff"))
_WHEELS = [f"nvidia-cuda-{name}-cu11==11.8.89" for name in ("nvrtc", "runtime", "nvcc")]
_TOOLS = ("bison", "flex", "g++", "git", "make", "makedepend")

# The simulator's own configuration of a V100, a quarter of it: 20 of 80 multiprocessors, 8 of 32
# channels of memory, and so a quarter of L2. n elements stand for 4 n on a whole one.
CONFIG = "v100-quarter"
MULTIPROCESSORS = 20
_CHANNELS = 8
_BASE = "configs/tested-cfgs/SM7_QV100/gpgpusim.config"
_CHANGES = {
    "gpgpu_n_clusters": MULTIPROCESSORS,
    "gpgpu_n_mem": _CHANNELS,
    "gpgpu_kernel_launch_latency": 0,
    "enable_ptx_file_line_stats": 0,
    "gpgpu_runtime_stat": 500,
}
# 16 bytes on both edges of the memory's 850 MHz, per cycle of the multiprocessors' 1,132.
DRAM_BYTES_PER_CYCLE = _CHANNELS * 16 * 2 * 850 / 1132


class Simulator(NamedTuple):
    """What is built.

    Attributes:
        root: GPGPU-Sim's source.
        library: Its libcudart.so.
        nvrtc: NVRTC 11.8.
        headers: CUDA's, of the same version.
        cuda: A folder that looks like an installed CUDA.
    """

    root: Path
    library: Path
    nvrtc: Path
    headers: Path
    cuda: Path

    @property
    def environment(self) -> dict[str, str]:
        """What GPGPU-Sim reads of the environment."""
        return {
            "CUDA_INSTALL_PATH": str(self.cuda),
            "PTXAS_CUDA_INSTALL_PATH": str(self.cuda),
            "GPGPUSIM_ROOT": str(self.root),
        }


def default_folder() -> Path:
    """Returns GPUOPT_SIMULATOR, or a folder among the user's caches."""
    given = os.environ.get("GPUOPT_SIMULATOR")
    return Path(given) if given else Path.home() / ".cache" / "gpuopt-simulator"


def find(folder: Path) -> Simulator:
    """Returns what `build` has built in a folder.

    Raises:
        FileNotFoundError: something is missing.
    """
    wheels = folder / "wheels" / "nvidia"
    root = folder / "gpgpu-sim"
    return Simulator(
        root,
        _only(root, "lib/gcc-*/cuda-*/release/libcudart.so"),
        _only(wheels, "cuda_nvrtc/lib/libnvrtc.so.*"),
        _only(wheels, "cuda_runtime/include"),
        _only(folder, "cuda"),
    )


def build(folder: Path, source: str = SOURCE) -> Simulator:
    """Fetches and builds what is not there yet; it takes some minutes.

    Args:
        folder: Where to.
        source: A repository to clone.

    Raises:
        RuntimeError: a tool is missing.
        subprocess.CalledProcessError: a step fails; it has said why.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(
            f"GPGPU-Sim needs {', '.join(missing)} to be built; on Debian: "
            "apt-get install bison flex g++ git make xutils-dev zlib1g-dev"
        )
    folder.mkdir(parents=True, exist_ok=True)
    root, wheels, cuda = folder / "gpgpu-sim", folder / "wheels", folder / "cuda"
    if not root.exists():
        _run("git", "clone", "--quiet", "--no-checkout", source, str(root))
        _run("git", "-C", str(root), "checkout", "--quiet", "--detach", COMMIT)
        _run("git", "-C", str(root), "apply", *map(str, _PATCHES))
    if not wheels.exists():
        _run(sys.executable, "-m", "pip", "install", "--quiet", f"--target={wheels}", *_WHEELS)
    _make_cuda(cuda, wheels / "nvidia")
    environment = {"CUDA_INSTALL_PATH": str(cuda), "PTXAS_CUDA_INSTALL_PATH": str(cuda)}
    command = f"source setup_environment release && make -j{os.cpu_count() or 1}"
    _run("bash", "-c", command, folder=root, environment=environment)
    return find(folder)


def write_config(simulator: Simulator, folder: Path) -> None:
    """Writes the configuration to where the simulator is to run."""
    (folder / "gpgpusim.config").write_text(change((simulator.root / _BASE).read_text(), _CHANGES))


def change(config: str, changes: dict[str, int]) -> str:
    """Returns a configuration with other values for some of its options.

    Raises:
        ValueError: the configuration does not have an option.
    """
    for option, value in changes.items():
        config, count = re.subn(rf"(?m)^-{option}\b.*$", f"-{option} {value}", config)
        if not count:
            raise ValueError(f"the simulator's configuration has no option {option}")
    return config


def _make_cuda(cuda: Path, wheels: Path) -> None:
    """Makes what GPGPU-Sim's makefiles look for: they need headers, and ask nvcc its version."""
    shutil.rmtree(cuda, ignore_errors=True)
    for name in ("cuda_runtime", "cuda_nvcc"):
        shutil.copytree(wheels / name / "include", cuda / "include", dirs_exist_ok=True)
    profiler = "#pragma once\n#include <cuda.h>\ntypedef enum { CU_OUT_CSV = 1 } CUoutput_mode;\n"
    (cuda / "include" / "cudaProfiler.h").write_text(profiler)
    (cuda / "bin").mkdir()
    shutil.copy(wheels / "cuda_nvcc" / "bin" / "ptxas", cuda / "bin" / "ptxas")
    # The last version that GPGPU-Sim knows.
    scripts = {"nvcc": 'echo "Cuda compilation tools, release 11.1, V11.1"', "cuobjdump": "exit 0"}
    for name, line in scripts.items():
        (cuda / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
    for tool in (cuda / "bin").iterdir():
        tool.chmod(0o755)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(
            f"{folder / pattern} is missing: run python -m bench.simulated build"
        )
    return found[0]


def _run(
    *command: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> None:
    subprocess.run(command, cwd=folder, env={**os.environ, **(environment or {})}, check=True)
