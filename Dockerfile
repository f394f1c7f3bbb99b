# syntax=docker/dockerfile:1
# Demo and a short benchmark:
#   docker build -t gpuopt . && docker run --rm --gpus all gpuopt
# The demo alone; the whole benchmark, or the tests, which take the options of `gpuopt bench` and pytest:
#   docker build --target demo|bench|test -t gpuopt:NAME . && docker run --rm --gpus all gpuopt:NAME
# The sdist and the wheel of a release, into a folder:
#   docker build --target dist --output dist .
# EXTRA is the extras of pyproject.toml that are installed beside losses, checkpoints and command:
#   --build-arg EXTRA=plots               without a GPU: leaves out the 2 GB of CUDA's wheels
#   --build-arg EXTRA=cuda13,plots,bench  with torch and optax, for the benchmark to compare with
# constraints.txt has the version of each package. A change of source builds the last layers alone: no
# step that asks a package index is repeated.
ARG BASE=python:3.12-slim-bookworm@sha256:0f5b26b9518d002b6173fd61daad821fa340635ebfec5bba471013f9ca114579

FROM ${BASE} AS dependencies
ARG EXTRA=cuda12,plots
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/venv/bin:${PATH}
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/venv \
 && pip install --upgrade --constraint constraints.txt pip
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -c "import os, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*p['dependencies'], *sum((e[x] for x in ['losses', 'checkpoints', 'command', *filter(None, os.environ['EXTRA'].split(','))]), []), sep='\n')" > /tmp/requirements.txt \
 && pip install --constraint constraints.txt --requirement /tmp/requirements.txt

FROM ${BASE} AS package
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/build/bin:${PATH}
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/build \
 && pip install --upgrade --constraint constraints.txt pip hatchling
COPY . .
# The addresses that hatch_build.py writes into the package.
ARG REPOSITORY_URL=
ARG DOCUMENTATION_URL=
RUN python3 -m hatchling build --directory /dist

FROM package AS checked
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt twine \
 && twine check --strict /dist/*

FROM scratch AS dist
COPY --from=checked /dist /

FROM ${BASE} AS runtime
# What the container toolkit reads, and images of NVIDIA's set; libcuda comes from the host.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/venv/bin:${PATH} \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    CUPY_CACHE_DIR=/var/cache/gpuopt/cupy
# Rules for the CPU are compiled where they run. Debian keeps one version of a release's g++.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 gpuopt \
 && install --directory --mode 1777 /var/cache/gpuopt
COPY --from=dependencies /opt/venv /opt/venv
WORKDIR /home/gpuopt

FROM runtime AS test
WORKDIR /home/gpuopt/src
COPY pyproject.toml constraints.txt ./
# Tests write beside the sources, as pytest's cache does.
RUN --mount=type=cache,target=/root/.cache/pip \
    chown 10001 . \
 && pip install --constraint constraints.txt --group test
COPY --chown=10001 . .
RUN pip install --no-cache-dir --no-deps --no-index --no-build-isolation --editable .
USER 10001
# As run.py has them: the threads of numpy's library would wait for the cores of other processes.
ENV OPENBLAS_NUM_THREADS=1 \
    OMP_NUM_THREADS=1
ENTRYPOINT ["python3", "-m", "pytest", "-m", "not nvrtc", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
CMD []

FROM runtime AS demo
COPY --from=package /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl
USER 10001
CMD ["gpuopt", "demo"]

FROM demo AS bench
ENTRYPOINT ["gpuopt", "bench"]
CMD []

FROM demo
CMD ["sh", "-c", "gpuopt demo && exec gpuopt bench resnet-50 1000-tensors --seconds 5"]
