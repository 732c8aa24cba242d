#!/usr/bin/env bash
# benchmarks/gpu.sh [--output DIR] [--time-limit S]    everything in ten minutes, most telling first (default: 540 s)
# benchmarks/gpu.sh check|kernels|training|inference [TOOL FLAGS]    one tool
# Without --output, results go to benchmarks/results/<UTC date and time> in the current folder.
#
# Needs PyTorch and Triton, and no network: nothing is installed. INTERDOMAIN_PYTHON names the interpreter (default: .venv's,
# else python3); a clone that is not installed there is imported as it lies. INTERDOMAIN_COMMIT names the commit of a tree
# without its .git. Without a GPU everything runs tiny and says so.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

case "${1:-all}" in
  all) tool=bench_gpu; shift $(($# > 0)) ;;
  check) tool=check_kernels; shift ;;
  kernels|training|inference) tool=bench_$1; shift ;;
  -*) tool=bench_gpu ;;
  *) fail "there is no tool '$1'; allowed: all (the default), check, kernels, training, inference." ;;
esac

case " $* " in
  *" --output"*|*" -h "*|*" --help "*) ;;
  *) set -- --output "benchmarks/results/$(date -u +%Y-%m-%d-%H%M%S)" "$@" ;;
esac

python=${INTERDOMAIN_PYTHON:-}
if [ -z "$python" ]; then
  if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=$(command -v python3 || true); fi
fi
[ -n "$python" ] || fail "no Python was found; set INTERDOMAIN_PYTHON to one that has PyTorch."

# origin PACKAGE: the file that it would be imported from.
origin() {
  "$python" -c 'import importlib.util, os, sys; print(os.path.realpath(importlib.util.find_spec(sys.argv[1]).origin))' "$1" 2>/dev/null
}
{ "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && origin torch >/dev/null; } ||
  fail "$python has no PyTorch, or is older than Python 3.11; set INTERDOMAIN_PYTHON to one that has it."

# For interpreters that the clone is not installed in.
export PYTHONPATH=$root/plugin${PYTHONPATH:+:$PYTHONPATH}

# Not by exec, which would leave the links behind. A signal goes on to the benchmarks, which end by themselves.
"$python" -m "interdomain.tools.$tool" "$@" &
trap 'kill "$!" 2>/dev/null' TERM INT
wait "$!"
code=$?
while kill -0 "$!" 2>/dev/null; do wait "$!"; code=$?; done
exit $code
