#!/usr/bin/env bash
# Runs what needs a GPU, in less than ten minutes: the tests marked `gpu`, some of them under NVIDIA's
# memory and race checkers, and the benchmark.
#
#   bench/on_gpu.sh [options]
#
# The benchmark ends with a table of measured times beside those of a model (docs/performance.md), if
# there is one of this GPU.
#
#   --require-gpu     Fail if there is no GPU. By default, say so and end with status 0.
#   --wheels FOLDER   Folder of wheels for packages that this machine lacks; no network is used.
#   --output FOLDER   Results go to FOLDER/<gpu>/<date>-<commit>.json, logs to FOLDER/logs/; by
#                     default bench/results.
#   --commit NAME     The commit that is measured, where there is no git to ask.
#   --phases LIST     Phases to run, separated by commas: updates (the tests of updates), others (the
#                     other tests), memcheck, racecheck, benchmark; or only setup. By default all.
#
# The machine needs Python 3.11 or newer (python3, or $PYTHON) with pip, CuPy 14 and torch; its
# packages are not changed. compute-sanitizer is searched on the PATH and beside CUDA's compiler. If a
# phase fails, the others still run; the status is then 1.
#
# To fetch the wheels on a machine with a network:
#
#   python3 -m pip download --no-deps --only-binary=:all: --dest FOLDER \
#     autograd ml_dtypes rich safetensors xxhash pytest hypothesis
#
# For another Python or system, add for example: --python-version 3.12 --platform
# manylinux_2_28_x86_64. Name only the missing packages; a run without --wheels lists them.
set -uo pipefail

# Seconds that each phase may take; together below ten minutes.
declare -A limits=(
  [setup]=30 [updates]=140 [others]=50 [memcheck]=45 [racecheck]=45 [benchmark]=240
)
# The rules with the most slots, in a 4-byte and a 2-byte dtype; dense, sparse, all rows.
covering='steps_are_numpys and (float32 or bfloat16) and (Adam or centered) and not Lazy'

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
require_gpu=false
wheels=
output=$root/bench/results
commit=
phases=setup,updates,others,memcheck,racecheck,benchmark

refuse() {
  echo "on_gpu.sh: $1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --require-gpu) require_gpu=true ;;
    --wheels | --output | --commit | --phases)
      (($# > 1)) || refuse "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    --help | -h)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) refuse "unknown option $1; --help lists them" ;;
  esac
  shift
done
IFS=, read -r -a wanted <<<"$phases"
for phase in "${wanted[@]}"; do
  [[ -v limits[$phase] ]] || refuse "unknown phase $phase; known are ${!limits[*]}"
done
[[ -z $wheels || -d $wheels ]] || refuse "there is no folder $wheels"
[[ -z $wheels ]] || wheels=$(realpath "$wheels")
output=$(realpath --canonicalize-missing "$output")
cd "$root" || exit 2

if [[ $phases != setup ]] &&
  ! GPUOPT_CUDA=auto "$PYTHON" -c 'import run, sys; sys.exit(run.cuda_extra() == "cpu")'; then
  if $require_gpu; then
    echo "on_gpu.sh: no GPU with a driver for CUDA 12 or newer is here, and --require-gpu asks for one"
    exit 1
  fi
  echo "on_gpu.sh: no GPU with a driver for CUDA 12 or newer is here: nothing was run"
  exit 0
fi

mkdir -p "$output/logs" || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$root:$root/tests/support PYTHONUNBUFFERED=1 GPUOPT_REQUIRE=gpu
export CUPY_CACHE_DIR=$work/cupy GPUOPT_CACHE_DIR=$work/gpuopt

summary=()
failed=0
# Runs a command with its time limit, logs its output, and adds its outcome to the summary. The first
# signal is SIGINT, after which pytest still prints its own summary.
run_phase() {
  local phase=$1 started=$SECONDS outcome
  shift
  echo "== $phase (at most ${limits[$phase]} s)"
  timeout --signal=INT --kill-after=5 "${limits[$phase]}" "$@" >"$output/logs/$phase.log" 2>&1
  local status=$?
  tail -n 40 "$output/logs/$phase.log"
  case $status in
    0) outcome=passed ;;
    124 | 137) outcome="cut off after ${limits[$phase]} s" ;;
    *) outcome="failed with status $status" ;;
  esac
  [[ $status == 0 ]] || failed=1
  summary+=("$phase: $outcome, $((SECONDS - started)) s")
  return "$status"
}

python=$work/venv/bin/python
environment=("$PYTHON" bench/gpu_environment.py "$work/venv" ${wheels:+"$wheels"})
pytest=("$python" -m pytest -q -W default -p no:cacheprovider -m gpu --tb=short)
updates=(tests/backends/cuda/test_on_gpu.py tests/backends/cuda/test_gpu_driver.py)
# In parallel, because these tests mostly wait for the compiler.
parallel=()
"$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n 4)
sanitizer=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v compute-sanitizer)

if ! run_phase setup "${environment[@]}"; then
  echo "on_gpu.sh: packages are missing, see above; --help says how to bring them" >&2
  wanted=()
else
  "$python" -m gpuopt info
fi
for phase in "${wanted[@]}"; do
  case $phase in
    updates)
      run_phase updates "${pytest[@]}" "${parallel[@]}" --durations=15 "${updates[@]}"
      ;;
    others)
      run_phase others "${pytest[@]}" "${parallel[@]}" --continue-on-collection-errors \
        "${updates[@]/#/--ignore=}" tests
      ;;
    memcheck | racecheck)
      if [[ -z $sanitizer ]]; then
        summary+=("$phase: left out, as compute-sanitizer is not on this machine")
        continue
      fi
      # Without CuPy's pool, each array is an allocation, so the checker knows where arrays end.
      run_phase "$phase" "$sanitizer" --tool "$phase" --error-exitcode 86 --print-limit 20 \
        "${pytest[@]}" -p no_memory_pool -k "$covering" "${updates[0]}"
      ;;
    benchmark)
      run_phase benchmark "$python" -m bench.gpu --require-gpu --output "$output" \
        ${commit:+--commit "$commit"} --seconds $((limits[benchmark] - 60))
      ;;
  esac
done
printf '== %s\n' "${summary[@]}" | tee "$output/logs/summary.txt"
echo "results and logs: $output"
exit "$failed"
