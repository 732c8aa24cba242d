#!/usr/bin/env bash
# benchmarks/gpu.sh [OPTIONS]                  check and time everything on a GPU, the most telling first (540 s)
# benchmarks/gpu.sh second [OPTIONS]           what that leaves out: 65,536 tokens, racecheck, other plans (200 s)
# benchmarks/gpu.sh check|kernels|training|inference [TOOL FLAGS]    one tool
#
# --prepared FILE     made by benchmarks/prepare_gpu.sh: compiled kernels, Python packages, ptxas. Nothing else is installed
# --output DIR        of the results (default: benchmarks/results/<UTC date and time> in the current folder)
# --time-limit S      for all parts together; each part's own limit shrinks or grows with it
#
# Needs PyTorch and Triton, and no network. INTERDOMAIN_PYTHON names the interpreter (default: .venv's, else python3); a clone
# that is not installed there is imported as it lies. INTERDOMAIN_COMMIT names the commit of a tree without its .git (default: the
# one that was prepared).
# Without a GPU everything runs tiny and says so.
#
# Exit status: 0 no part failed (a part that its limit cut has not failed); 1 a part failed, or the check did; 2 the check could
# not run, or a wrong option
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

# --- What is asked for ---

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

call=first planned=540 limit= prepared=
if [ "${1:-}" = second ]; then
  call=second planned=200
  shift
fi
while [ $# -gt 0 ]; do
  case $1 in
    --output=* | --time-limit=* | --prepared=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    --output) out=${2:-} ;;
    --time-limit) limit=${2:-} ;;
    --prepared) prepared=${2:-} ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "there is no tool or option '$1'; allowed: second, check, kernels, training, inference, --prepared FILE, --output DIR, --time-limit S." ;;
  esac
  shift $(($# > 1 ? 2 : 1))
done
limit=${limit:-$planned}
[ -n "$out" ] || fail "--output must be a folder."
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--time-limit must be whole seconds, at least 1: got '$limit'."
[ -z "$prepared" ] || [ -f "$prepared" ] || fail "--prepared must be a file that benchmarks/prepare_gpu.sh made: got '$prepared'."
for file in log.txt summary.md; do
  [ ! -e "$out/$file" ] || fail "$out/$file exists, and results are never overwritten. Give another --output."
done
began=$(date +%s)
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
[ -z "$prepared" ] || prepared=$(cd "$(dirname "$prepared")" && pwd)/$(basename "$prepared")
cd "$root" || exit 2

# --- Parts ---

summary() {
  printf '# Summary\n\n| part | status | seconds |\n|---|---|---|\n%s' "$parts"
  "$python" -m interdomain.tools._bench.pages "$out"
}

# The log becomes the end of the summary: one file less.
finish() {
  { summary && printf '\n# Log\n\n````\n' && cat "$out/log.txt" && printf '````\n'; } >"$out/summary.md" && rm "$out/log.txt"
}

# part NAME SECONDS COMMAND...
# The limits of all parts add up to the time limit. A part must end when its own and all earlier limits together have passed: what
# an earlier part left unused is its, too, and one that hangs takes nothing from those after it. It is then killed with all
# that it started. What it printed goes to the log.
part() {
  local name=$1 now started lines status seconds last
  allowed=$((allowed + $2))
  shift 2
  code=0
  started=$(date +%s)
  seconds=$((began + allowed * limit / planned - started))
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
    case $code in
      0) status=complete ;;
      124 | 137) status="cut after $seconds s" ;;
      *) status="exit status $code" ;;
    esac
    # Its last line that holds a word; tools end with their result and its place.
    last=$(tail -n "+$((lines + 1))" "$out/log.txt" | grep '[[:alnum:]]\{3\}' | tail -n 1 |
      sed 's/: wrote .*//; s/^[= ]*//; s/|/\//g' | cut -c 1-200)
    status+=${last:+: $last}
    # The check's status 3: an error is beyond its bound, and none by far.
    if [[ $code != 0 && $code != 124 && $code != 137 && $name:$code != check*:3 ]]; then failed=1; fi
  fi
  now=$(date +%s)
  echo "$name: $status"
  parts+="| $name | $status | $((now - started)) |"$'\n'
  summary >"$out/summary.md"
}

# tool NAME SECONDS MODULE [FLAGS]: its results are NAME.json.
tool() { part "$1" "$2" "$python" -m "interdomain.tools.$3" --output "$out" --name "$1" "${@:4}"; }
on_gpu() { if [ "$gpu" = True ]; then part "$@"; fi; }
train() { tool "$1" "$2" bench_training "${@:3}"; }

# Unpack what was prepared, and use it in all that follows.
unpack() {
  bundle=$(mktemp -d)
  tar -xzf "$prepared" -C "$bundle" || fail "$prepared could not be unpacked."
  # Triton's cache names its own files by absolute paths.
  find "$bundle/cache" -name '__grp__*' -exec sed -i "s|@CACHE@|$bundle/cache|g" {} +
  export PYTHONPATH=$bundle/site:$PYTHONPATH TRITON_CACHE_DIR=$bundle/cache
  if [ -f "$bundle/commit" ]; then export INTERDOMAIN_COMMIT=${INTERDOMAIN_COMMIT:-$(cat "$bundle/commit")}; fi
}

# The ptxas to try after a failed check: 13.1 or later, prepared or of the package nvidia-cuda-nvcc. 13.0, which CUDA's toolkits
# may bring, is known to be wrong.
other_ptxas() {
  local candidate version packages
  packages='import glob, sys; print(*(p for f in sys.path for p in glob.glob(f + "/nvidia/*/bin/ptxas")), sep="\n")'
  for candidate in "${bundle:-}/ptxas" $("$python" -c "$packages"); do
    version=$("$candidate" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    if [ -n "$version" ] && [ "$(printf '%s\n13.1\n' "$version" | sort -V | head -n 1)" = 13.1 ]; then
      echo "$candidate"
      return
    fi
  done
}

export PYTHONUNBUFFERED=1
for folder in /usr/local/cuda*/bin; do PATH+=:$folder; done
gpu=$("$python" -c 'import torch; print(torch.cuda.is_available())')
failed=0 allowed=0 parts=
trap 'trap - TERM INT; kill "$!" 2>/dev/null; wait; finish; exit 143' TERM INT
if [ -n "$prepared" ]; then unpack; fi

# The shapes of the tables, and a training step as its speed is measured: a warm-up, then steps between two logs.
main_shapes=(--shapes 8x4096x32x64 2x16384x32x64 1x32768x32x64)
once=("$python" -m interdomain.tools.bench_kernels --device cuda --once --mixers)
ncu=(ncu --clock-control none --kernel-name 'regex:^(contract|mix|expand|adjoint|forward|backward)_kernel$'
  --section SpeedOfLight --section ComputeWorkloadAnalysis --section MemoryWorkloadAnalysis
  --section Occupancy --section LaunchStats --section WarpStateStats
  --metrics dram__bytes_read.sum,dram__bytes_write.sum "${once[@]}")
# Small: a ragged one, and one that is cut into segments.
sanitized=(--error-exitcode 9 "${once[@]}" chunkwise linear layer --shapes 1x130x2x64 1x1030x2x64)
kernels=() decode=() eager=() compiled=() long=() peers=() variants=()
if [ "$gpu" = True ]; then
  kernels=("${main_shapes[@]}" --mixers chunkwise chunkwise-kept sdpa-cudnn sdpa-flash features layer)
  decode=(--quick)
  eager=(--sizes 125M --seq-len 4096 --tokens 32768 --steps 20 --case-limit 27 --cases softmax:eager:none interdomain:eager:none)
  compiled=(--sizes 350M --seq-len 4096 --tokens 32768 --steps 20 --case-limit 60
    --cases softmax:compile:selective interdomain:compile:selective)
  long=(--sizes 350M --seq-len 65536 --tokens 65536 --steps 15 --case-limit 60
    --cases interdomain:compile:selective softmax:compile:selective)
  peers=("${main_shapes[@]}" --untuned --mixers fla-gated-delta fla-simple-gla fla-gla)
  variants=(--shapes 8x4096x32x64 --mixers chunkwise chunkwise-not-fused chunkwise-8-warps chunkwise-1-stage
    chunkwise-3-stages chunkwise-not-held chunkwise-decay-2048)
fi

# --- The second call ---

if [ "$call" = second ]; then
  train training-65536 90 "${long[@]}"
  on_gpu racecheck 45 compute-sanitizer --tool racecheck "${sanitized[@]}"
  on_gpu variants 65 "$python" -m interdomain.tools.bench_kernels --output "$out" --name variants "${variants[@]}"
  finish
  printf '\nwrote %s\n' "$out"
  exit "$failed"
fi

# --- The first call: the limits add up to 540 s ---

tool machine 20 _bench.machine
tool check 80 check_kernels
if [ "$code" -eq 2 ]; then # there is no GPU that can be used, for one: the tool has said so
  cat "$out/log.txt" >&2
  exit 2
fi
if [ "$code" -eq 1 ] && ptxas=$(other_ptxas) && [ -n "$ptxas" ]; then
  cat "$out/check.json" >>"$out/log.txt" && rm "$out/check.json" # of the second check from here on
  export TRITON_PTXAS_PATH=$ptxas TRITON_PTXAS_BLACKWELL_PATH=$ptxas
  # Its time is taken from the last parts: a failed check comes before everything else.
  part "check with another ptxas, $("$ptxas" --version | tail -n 1)" 80 \
    "$python" -m interdomain.tools.check_kernels --output "$out" --name check
  if [ "$code" -eq 1 ]; then unset TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH; fi # else all that follows uses it
fi
tool kernels 75 bench_kernels "${kernels[@]}"
tool decode 65 bench_inference "${decode[@]}"
train training-125M 55 "${eager[@]}"
on_gpu flash-linear-attention 50 "$python" -m interdomain.tools.bench_kernels --output "$out" --name peers "${peers[@]}"
if [ "$gpu" = True ]; then train training-350M 105 "${compiled[@]}"; fi
on_gpu "profile of the scan" 30 "${ncu[@]}" chunkwise --shapes 8x4096x32x64
on_gpu "profile of the features" 20 "${ncu[@]}" features --shapes 8x4096x32x64
on_gpu memcheck 40 compute-sanitizer --tool memcheck "${sanitized[@]}"
finish
printf '\nwrote %s\n' "$out"
exit "$failed"
