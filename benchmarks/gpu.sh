#!/usr/bin/env bash
# benchmarks/gpu.sh [--output DIR] [--time-limit S]    everything in ten minutes, most telling first (default: 540 s)
# benchmarks/gpu.sh check|kernels|training|inference [TOOL FLAGS]    one tool
# Without --output, results go to benchmarks/results/<UTC date and time> in the current folder.
#
# Needs PyTorch and Triton, and no network: nothing is installed. INTERDOMAIN_PYTHON names the interpreter (default: .venv's,
# else python3); a clone that is not installed there is imported as it lies. INTERDOMAIN_COMMIT names the commit of a tree
# without its .git. Without a GPU everything runs tiny and says so.
#
# Exit status: 0 every part passed or was skipped; 1 a part failed; 2 the check could not run, or a wrong option
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

python=${INTERDOMAIN_PYTHON:-}
if [ -z "$python" ]; then
  if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=$(command -v python3 || true); fi
fi
[ -n "$python" ] || fail "no Python was found; set INTERDOMAIN_PYTHON to one that has PyTorch."
"$python" -c 'import importlib.util, sys; sys.exit(sys.version_info < (3, 11) or not importlib.util.find_spec("torch"))' ||
  fail "$python has no PyTorch, or is older than Python 3.11; set INTERDOMAIN_PYTHON to one that has it."
export PYTHONPATH=$root/plugin${PYTHONPATH:+:$PYTHONPATH} # for interpreters that the clone is not installed in

out=benchmarks/results/$(date -u +%Y-%m-%d-%H%M%S)
case "${1:-}" in
  check) tool=check_kernels ;;
  kernels | training | inference) tool=bench_$1 ;;
  *) tool= ;;
esac
if [ -n "$tool" ]; then
  shift
  case " $* " in
    *" --output"* | *" -h "* | *" --help "*) ;;
    *) set -- --output "$out" "$@" ;;
  esac
  exec "$python" -m "interdomain.tools.$tool" "$@"
fi

limit=540
while [ $# -gt 0 ]; do
  case $1 in
    --output=* | --time-limit=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    --output) out=${2:-} ;;
    --time-limit) limit=${2:-} ;;
    -h | --help) sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "there is no tool or option '$1'; allowed: check, kernels, training, inference, --output DIR, --time-limit S." ;;
  esac
  shift $(($# > 1 ? 2 : 1))
done
[ -n "$out" ] || fail "--output must be a folder."
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--time-limit must be whole seconds, at least 1: got '$limit'."
for file in log.txt summary.md; do
  [ ! -e "$out/$file" ] || fail "$out/$file exists, and results are never overwritten. Give another --output."
done
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2

summary() {
  printf '# Summary\n\n| part | status | seconds |\n|---|---|---|\n%s' "$parts"
  "$python" -m interdomain.tools._bench.pages "$out"
}

# The log becomes the end of the summary: one file less.
finish() {
  { summary && printf '\n# Log\n\n````\n' && cat "$out/log.txt" && printf '````\n'; } >"$out/summary.md" && rm "$out/log.txt"
}

# part NAME SECONDS COMMAND...: at the end of its seconds a part is killed, with all that it started. Its output goes to the log.
part() {
  local name=$1 seconds=$(($2 < ends - SECONDS ? $2 : ends - SECONDS)) began=$SECONDS lines status
  shift 2
  code=0
  if ((seconds < 1)); then
    status="not run: no time left"
  elif ! command -v "$1" >/dev/null; then
    status="skipped: $1 is not installed"
  else
    echo "$name, at most $seconds s ..."
    printf '\n== %s ==\n' "$name" >>"$out/log.txt"
    lines=$(wc -l <"$out/log.txt")
    timeout -k 5 "$seconds" "$@" </dev/null >>"$out/log.txt" 2>&1 &
    wait "$!" || code=$?
    status="exit status $code"
    if ((code == 0)); then status=complete; elif ((SECONDS - began >= seconds)); then status="cut after $seconds s"; fi
    # Its last line that holds a word; tools end with their verdict and the place of their results.
    status+=": $(tail -n "+$((lines + 1))" "$out/log.txt" | grep '[[:alnum:]]\{3\}' | tail -n 1 |
      sed 's/: wrote .*//; s/^[= ]*//; s/|/\//g' | cut -c 1-200)"
    if [ "$code" -ne 0 ] && [[ $name:$code != check*:3 ]]; then failed=1; fi # 3: beyond a bound, none by far
  fi
  echo "$name: $status"
  parts+="| $name | $status | $((SECONDS - began)) |"$'\n'
  summary >"$out/summary.md"
}

tool() { part "$1" "$2" "$python" -m "interdomain.tools.$3" --output "$out" "${@:4}"; }
on_gpu() { if [ "$gpu" = True ]; then part "$@"; fi; }

# The first ptxas that is not the one in use: that of the wheel nvidia-cuda-nvcc, or of a CUDA toolkit.
other_ptxas() {
  wheels='import glob, sys; print(*(p for f in sys.path for p in glob.glob(f + "/nvidia/*/bin/ptxas")), sep="\n")'
  { "$python" -c "$wheels"; command -v ptxas; } | grep -vFx "${TRITON_PTXAS_PATH:-}" | head -n 1
}

export PYTHONUNBUFFERED=1
for folder in /usr/local/cuda*/bin; do PATH+=:$folder; done
gpu=$("$python" -c 'import torch; print(torch.cuda.is_available())')
ends=$((SECONDS + limit)) failed=0 parts=
trap 'trap - TERM INT; kill "$!" 2>/dev/null; wait; finish; exit 143' TERM INT

trained=()
if [ "$gpu" = True ]; then
  trained=(--sizes 350M --seq-len 4096 65536 --tokens 32768 --trace --case-limit 75
    --cases softmax:compile:selective interdomain:compile:selective)
fi
once=("$python" -m interdomain.tools.bench_kernels --device cuda --once --mixers)
profiled=(--clock-control none --kernel-name 'regex:^(contract|mix|expand|adjoint|forward|backward)_kernel$'
  --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis
  --section Occupancy --section LaunchStats --section WarpStateStats
  --metrics dram__bytes_read.sum,dram__bytes_write.sum "${once[@]}" chunkwise features --shapes 8x4096x32x64)
# Small: a ragged one, and one that is cut into segments.
sanitized=(--error-exitcode 9 "${once[@]}" chunkwise linear layer --shapes 1x130x2x64 1x1030x2x64)
# Only files that have such a test: others may need what this machine lacks. The check has run.
tests="grep -rl mark.gpu --include='test_*.py' tests | xargs -r '$python' -m pytest -q -m gpu --tb=short \
  --deselect tests/scan/test_triton_gpu.py::test_check_kernels"

on_gpu machine 10 nvidia-smi -q -d CLOCK,POWER,TEMPERATURE,PERFORMANCE
tool check 120 check_kernels
if [ "$code" -eq 2 ]; then # there is no GPU that can be used, for one: the tool has said so
  cat "$out/log.txt" >&2
  exit 2
fi
if [ "$code" -eq 1 ] && ptxas=$(other_ptxas) && [ -n "$ptxas" ]; then
  cat "$out/check.json" >>"$out/log.txt" && rm "$out/check.json" # of the second check from here on
  export TRITON_PTXAS_PATH=$ptxas TRITON_PTXAS_BLACKWELL_PATH=$ptxas
  tool "check with another ptxas, $("$ptxas" --version | tail -n 1)" 120 check_kernels
  if [ "$code" -eq 1 ]; then unset TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH; fi # else all that follows uses it
fi
tool kernels 100 bench_kernels
tool training 150 bench_training "${trained[@]}"
on_gpu profile 60 ncu "${profiled[@]}"
on_gpu memcheck 70 compute-sanitizer --tool memcheck "${sanitized[@]}"
on_gpu racecheck 70 compute-sanitizer --tool racecheck "${sanitized[@]}"
if "$python" -c 'import pytest' 2>/dev/null; then
  on_gpu tests 40 bash -c "$tests"
else
  parts+="| tests | skipped: pytest is not installed | 0 |"$'\n'
fi
tool inference 150 bench_inference --quick
finish
printf '\nwrote %s\n' "$out"
exit "$failed"
