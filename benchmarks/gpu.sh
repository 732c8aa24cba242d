#!/usr/bin/env bash
# benchmarks/gpu.sh                       everything in ten minutes: check, kernels, decode, inference, training
# benchmarks/gpu.sh kernels [TOOL FLAGS]  one part: check, kernels, decode, inference, training; also passes and tune
# benchmarks/gpu.sh all --out DIR         results go to DIR (default: benchmarks/results/<UTC date and time>)
#
# Needs PyTorch and Triton, and no network: nothing is installed. INTERDOMAIN_PYTHON names the interpreter (default: .venv's,
# else python3); a clone that is not installed there is imported as it lies. INTERDOMAIN_COMMIT names the commit of a tree
# without its .git. INTERDOMAIN_SECONDS changes the ten minutes. Without a GPU everything runs tiny and says so.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
parts=(check kernels decode inference training)

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

part=all
if [ $# -gt 0 ] && [[ $1 != -* ]]; then part=$1; shift; fi
case $part in
  all | check | kernels | decode | inference | training | passes | tune) ;;
  *) fail "there is no part '$part'; allowed: all, ${parts[*]}, passes, tune." ;;
esac
out=
flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --out) [ $# -gt 1 ] || fail "--out needs a folder."; out=$2; shift 2 ;;
    --out=*) out=${1#--out=}; shift ;;
    *) flags+=("$1"); shift ;;
  esac
done
[ "$part" != all ] || [ ${#flags[@]} -eq 0 ] || fail "'${flags[*]}': flags are for one part, such as: benchmarks/gpu.sh kernels --rounds 50"
out=${out:-$root/benchmarks/results/$(date -u +%Y-%m-%d-%H%M%S)}
[[ $out == /* ]] || out=$PWD/$out

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
cd "$root" || exit 2

# The clone under its import name, for interpreters that it is not installed in: links after pyproject.toml's package-dir.
if [ "$(origin interdomain)" != "$(cd plugin && pwd -P)/__init__.py" ]; then
  links=$(mktemp -d)
  trap 'rm -rf "$links"' EXIT
  "$python" - "$root" "$links" <<'PY' || fail "the clone could not be linked under its import name."
import pathlib
import sys
import tomllib

root, links = map(pathlib.Path, sys.argv[1:])
folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
for package, folder in sorted(folders.items()):  # interdomain before interdomain.scan
    place = links.joinpath(*package.split("."))
    if "." in package:
        place.symlink_to(root / folder)
        continue
    place.mkdir()
    for entry in (root / folder).iterdir():
        (place / entry.name).symlink_to(entry)
PY
  export PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH}
fi

began=$SECONDS
total=${INTERDOMAIN_SECONDS:-590}
summary=()
worst=0

# run PART SECONDS [FLAGS]: the tool ends by itself before its time; if it does not, it is ended, and its rows are on the disk.
run() {
  local name=$1 seconds=$2 tool code
  shift 2
  case $name in
    check) tool=check_kernels ;;
    passes | tune) tool=bench_kernels; set -- "--$name" "$@" ;;
    *) tool=bench_$name ;;
  esac
  if [ "$seconds" -lt 25 ]; then
    printf '\nno time is left for %s\n' "$name" >&2
    summary+=("$name: not run")
    return
  fi
  printf '\n'
  timeout -k 45 "$seconds" "$python" -m "interdomain.tools.$tool" --out "$out" --time-limit $((seconds - 15)) "$@"
  code=$?
  # A mistake in the call, said by the tool; what only a later one of several parts says is none, and the others go on.
  if [ $code -eq 2 ] && { [ "$part" != all ] || [ "$name" = check ]; }; then exit 2; fi
  summary+=("$name: $("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["status"])' "$out/$name.json" 2>/dev/null || echo "exit status $code")")
  [ $code -eq 0 ] || worst=1
  if [ "$name" = check ] && [ $code -ne 0 ]; then
    printf '\n%s\n' '!!! THE CORRECTNESS CHECK DID NOT PASS. What follows is measured all the same and marked. Do not use it. !!!' >&2
  fi
}

left() { echo $((total - (SECONDS - began))); }
at_most() { local rest; rest=$(left); echo $((rest < $1 ? rest : $1)); }

if [ "$part" = all ]; then
  run check "$(at_most 150)"
  run kernels "$(at_most 130)"
  run decode "$(at_most 40)"
  run inference "$(at_most 120)" --quick
  run training "$(left)" --case-limit 150
else
  run "$part" "$(left)" ${flags[@]+"${flags[@]}"}
fi
printf '\nwrote %s in %d s (%s)\n' "$out" $((SECONDS - began)) "$(IFS=,; echo "${summary[*]}" | sed 's/,/, /g')"
exit $worst
