#!/usr/bin/env bash
# benchmarks/prepare_gpu.sh [OPTIONS] FILE.tar.gz
# Make what `benchmarks/gpu.sh --prepared FILE.tar.gz` unpacks on a machine with a GPU and without a network: compiled kernels, the
# Python packages that training and the peers need, and a newer ptxas. Minutes of that machine's time become minutes of this one's.
#
# --capability X.Y    of the GPU (default: 9.0, an H100, H200 or GH200)
# --triton X.Y.Z      the version on that machine (default: 3.6.0, which PyTorch 2.11 brings)
# --python X.Y        the version there (default: 3.12)
#
# Needs a network with a package index, and this clone's environment (./launch.sh test --version makes it; INTERDOMAIN_PYTHON names
# another one). It takes about ten minutes on two cores, and no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() { printf 'error: %s\n' "$1" >&2; exit 2; }

capability=9.0 triton=3.6.0 version=3.12 file=
while [ $# -gt 0 ]; do
  case $1 in
    --capability=* | --triton=* | --python=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
    --capability) capability=${2:-} && shift ;;
    --triton) triton=${2:-} && shift ;;
    --python) version=${2:-} && shift ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) fail "there is no option '$1'; allowed: --capability X.Y, --triton X.Y.Z, --python X.Y." ;;
    *) file=$1 ;;
  esac
  shift
done
[[ $file == *.tar.gz ]] || fail "name the file to make, such as gpu.tar.gz: got '$file'."
[[ $capability =~ ^[0-9]+\.[0-9]$ ]] || fail "--capability must be X.Y: got '$capability'."
python=${INTERDOMAIN_PYTHON:-$root/.venv/bin/python}
"$python" -c 'import torch' 2>/dev/null || fail "$python has no PyTorch. Run ./launch.sh test --version, or set INTERDOMAIN_PYTHON."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bundle=$work/bundle
mkdir -p "$bundle/site" "$bundle/cache"
"$python" -c 'from interdomain.environment import commit; print(commit())' >"$bundle/commit"
pip=("$python" -m pip --disable-pip-version-check --quiet)
elsewhere=(--no-deps --only-binary=:all: --python-version "$version" --implementation cp)
for glibc in 28 27 17; do elsewhere+=(--platform "manylinux_2_${glibc}_x86_64"); done
elsewhere+=(--platform manylinux2014_x86_64)

echo "Python packages for Python $version ..."
# TorchTitan and what it imports beyond PyTorch's usual company; flash-linear-attention as a peer.
"${pip[@]}" install "${elsewhere[@]}" --no-compile --target "$bundle/site" -c "$root/constraints.txt" \
  torchtitan torchdata tyro docstring_parser typeguard datasets dill multiprocess \
  flash-linear-attention==0.6.0 fla-core==0.6.0

echo "ptxas ..."
"${pip[@]}" download "${elsewhere[@]}" -d "$work" nvidia-cuda-nvcc
"$python" - "$work" "$bundle/ptxas" <<'PYTHON'
import glob, pathlib, sys, zipfile

(wheel,) = glob.glob(f"{sys.argv[1]}/nvidia_cuda_nvcc-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith("/bin/ptxas"))
    pathlib.Path(sys.argv[2]).write_bytes(archive.read(name))
PYTHON
chmod +x "$bundle/ptxas"

echo "Triton $triton for this machine ..."
"${pip[@]}" install --no-deps --target "$work/triton" "triton==$triton"
# Triton's key of a cached kernel hashes its own compiled library, which differs by the version of Python. The same version of
# Triton makes the same kernels everywhere, so the key is made of the version alone. Python imports this file when it starts.
cat >"$bundle/site/sitecustomize.py" <<'PYTHON'
import contextlib

with contextlib.suppress(ImportError):
    import triton
    from triton.runtime import cache

    cache.triton_key = lambda: f"triton {triton.__version__}"
PYTHON

# compile CACHE: prints the counts of kernels compiled and read, its progress goes to a log.
compile() {
  PYTHONPATH=$work/triton:$bundle/site:$root/plugin TRITON_STORE_BINARY_ONLY=1 \
    "$python" -m interdomain.tools.compile_kernels --cache "$1" --capability "$capability" 2>"$work/log.txt" ||
    { tail -n 20 "$work/log.txt" >&2; fail "the kernels could not be compiled."; }
}

echo "kernels for compute capability $capability (several minutes) ..."
compile "$bundle/cache"
# Triton's cache names its own files by absolute paths; gpu.sh puts those of its machine in.
find "$bundle/cache" -name '__grp__*' -exec sed -i "s|$bundle/cache|@CACHE@|g" {} +

tar -czf "$file" -C "$bundle" .
echo "a second process, on the unpacked cache in another place:"
mkdir "$work/unpacked"
tar -xzf "$file" -C "$work/unpacked" ./cache
find "$work/unpacked/cache" -name '__grp__*' -exec sed -i "s|@CACHE@|$work/unpacked/cache|g" {} +
again=$(compile "$work/unpacked/cache")
echo "$again"
[[ $again == "0 kernels compiled"* ]] || fail "the cache was not found again: Triton $triton keys it by something else, too."

printf '\n%-28s%10s\n' "in $(basename "$file")" unpacked
for part in cache site ptxas; do printf '%-28s%10s\n' "$part" "$(du -sh --apparent-size "$bundle/$part" | cut -f 1)"; done
printf '%-28s%10s\n' "the file itself" "$(du -h --apparent-size "$file" | cut -f 1)"
cat <<TEXT

On the machine with the GPU, in a clone of the same commit:
    benchmarks/gpu.sh --prepared $(basename "$file")
    benchmarks/gpu.sh second --prepared $(basename "$file")
TEXT
