#!/usr/bin/env bash
# Tests and times gpuopt on this machine's GPU; --help says how. $PYTHON is the machine's Python.
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "on_gpu.sh needs Python 3.11 or newer, and $python is not: PYTHON names another one" >&2
  exit 1
}
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/on_gpu.py" "$@"
