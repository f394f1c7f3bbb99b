# syntax=docker/dockerfile:1
# Demo:   docker build -t gpuopt . && docker run --rm --gpus all gpuopt
# Tests:  docker build --target test -t gpuopt:test . && docker run --rm --gpus all gpuopt:test
# Without a GPU: --build-arg EXTRA=plots leaves out the 2 GB of CUDA wheels.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG EXTRA=cuda12,plots
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
WORKDIR /src
# The dependencies alone, so that a change of source does not fetch CUDA again.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -c "import os, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*p['dependencies'], *sum((e[x] for x in os.environ['EXTRA'].split(',') if x), []), sep='\n')" > /tmp/requirements.txt \
 && pip install -r /tmp/requirements.txt
COPY README.md LICENSE ./
COPY gpuopt gpuopt
COPY kernels kernels
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps .

FROM ${BASE} AS runtime
# What the container toolkit reads, and images of NVIDIA's set; libcuda comes from the host.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    CUPY_CACHE_DIR=/var/cache/gpuopt/cupy
RUN useradd --create-home --uid 10001 gpuopt \
 && install --directory --mode 1777 /var/cache/gpuopt
COPY --from=build /opt/venv /opt/venv
USER 10001
WORKDIR /home/gpuopt

FROM runtime AS test
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /home/gpuopt/src
COPY --chown=10001 . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['test'], sep='\n')" > /tmp/requirements.txt \
 && pip install -r /tmp/requirements.txt
USER 10001
CMD ["pytest", "-p", "no:cacheprovider"]

FROM runtime
CMD ["gpuopt", "demo"]
