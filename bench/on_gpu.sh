#!/usr/bin/env bash
# Tests and times gpuopt on this machine's GPU; --help says how. $PYTHON is the machine's Python.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/on_gpu.py" "$@"
