"""bench_kernels in CPU tiny mode: what it writes, which peers it calls, what it refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch

from interdomain.tools import _bench, _mixers, bench_inference, bench_kernels, check_kernels

from ..common import REPOSITORY, TIMEOUT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")


def results(folder, part):
    contents = json.loads((folder / f"{part}.json").read_text())
    assert contents["label"] == _bench.CPU_LABEL
    return contents


def test_kernel_table(tmp_path):
    few = [
        "--mixers",
        "chunkwise",
        "linear",
        "features-torch",
        "sdpa-flash",
        "sdpa-cudnn",
        "sequential",
        "--rounds",
        "1",
    ]
    assert bench_kernels.main(["--output", str(tmp_path), *few, "--shapes", "1x32x8", "--basis", "8"]) == 0
    (table,) = results(tmp_path, "kernels")["tables"].values()
    rows = {row["mixer"]: row for row in table["rows"]}
    for mixer in ("chunkwise", "linear", "features-torch", "sdpa-flash"):
        row = rows[mixer]
        assert min(row["forward ms"], row["backward ms"]) > 0
        assert row["both ms"] >= max(row["forward ms"], row["backward ms"])
        assert row["of best attention"] == pytest.approx(row["both ms"] / rows["sdpa-flash"]["both ms"])
    for mixer in ("sdpa-cudnn", "sequential"):  # on a GPU only: said, and no obstacle
        assert "both ms" not in rows[mixer]
        assert rows[mixer]["remark"]


FAKES = {
    "flash_attn.py": "def flash_attn_func(q, k, v, *, causal): assert causal; return q * k * v",
    "flash_attn_interface.py": "def flash_attn_func(q, k, v, *, causal): assert causal; return q * k * v, None",
    "fla/__init__.py": "",
    "fla/ops/__init__.py": "",
    "fla/ops/gla.py": "def chunk_gla(*, q, k, v, g): assert g.shape == k.shape; return q * k * v * g, None",
    "fla/ops/simple_gla.py": "def chunk_simple_gla(*, q, k, v, g): return q * k * v * g[..., None], None",
    "fla/ops/gated_delta_rule.py": "def chunk_gated_delta_rule(*, q, k, v, g, beta):\n"
    "    assert g.shape == beta.shape == q.shape[:3]\n"
    "    return q * k * v * (g * beta)[..., None], None",
    "mamba_ssm/__init__.py": "import selective_scan_cuda",  # compiled, and not there
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/ops/triton/ssd_combined.py": "def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size):\n"
    "    return x * (dt * A)[..., None] * (B * C).sum(-1, keepdim=True)",
}


def test_peers_are_called_where_they_are_installed(tmp_path, monkeypatch):
    """Stand-ins for the packages: the wiring, not the packages, is what this can test."""
    for name, source in FAKES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    packages = {package for package, *_ in _mixers.PEERS.values()}
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)
    few = ["--shapes", "1x16x8", "--basis", "8", "--rounds", "1"]
    assert bench_kernels.main(["--output", str(tmp_path / "out"), *few, "--mixers", *_mixers.PEERS]) == 0
    table = results(tmp_path / "out", "kernels")["tables"]["B=1 T=16 H=2 d=8 M=8"]
    assert not any(row.get("remark") for row in table["rows"])
    assert all(row["both ms"] > 0 for row in table["rows"])
    assert [row["mixer"] for row in table["rows"]] == list(_mixers.PEERS)
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        del sys.modules[name]


INTERPRETED = """
import sys
import pytest
sys.path.insert(0, {repository!r})
from tests.scan import triton_interpreter
triton_interpreter.repair(pytest.MonkeyPatch())
from interdomain.scan import triton_plan
from interdomain.tools import bench_kernels
triton_plan._MIN_SEGMENT = 1  # cut time where a GPU would: two chunks are two segments
flags = ["--output", sys.argv[1], "--basis", "16", "--heads", "1", "--rounds", "1", "--shapes", "1x70x16"]
sys.exit(bench_kernels.main(["--once", "all", *flags]) or bench_kernels.main(["--passes", *flags]))
"""


def test_passes_in_the_interpreter(tmp_path):
    """Every pass is launched as on a GPU, the sweeps over segments included."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(repository=str(REPOSITORY)), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = results(tmp_path, "passes")["tables"].values()
    rows = {row["pass"]: row for row in table["rows"]}
    passes = {"contract": 3, "mix_expand": 1, "mix": 0, "mix_backward": 1, "expand": 1}
    passes |= {"adjoint_decay": 2, "adjoint": 0, "decay": 0, "tables": 2, "states": 2, "costates": 1, "chain": 3}
    assert passes == {name: row["times a step"] for name, row in rows.items() if name != "all of a step"}
    assert "launched adjoint_decay, B=1 T=70 H=1 d=16 M=16" in done.stdout
    assert all(
        (row.get("remark") == "no part of this plan") == (not passes[name])
        for name, row in rows.items()
        if name in passes
    )
    total = sum(rows[name]["ms"] * count for name, count in passes.items() if count)
    assert rows["all of a step"]["ms"] == pytest.approx(total)


@pytest.mark.parametrize(
    ("tool", "argv", "said"),
    [
        (bench_kernels, ["--mixers", "chunkwise", "flash4"], ["--mixers flash4: unknown", "sdpa-flash", "fla-gla"]),
        (bench_kernels, ["--shapes", "8x4096"], ["--shapes 8x4096", "BATCHxTOKENSxHEAD_DIM"]),
        (bench_kernels, ["--once", "contract"], ["need a GPU"]),
        (bench_kernels, ["--device", "cuda"], ["--device cuda", "no GPU(s)"]),
        (check_kernels, ["--groups", "magic"], ["--groups magic: unknown", "chunkwise-fp32"]),
        (bench_inference, ["--parts", "speed"], ["--parts speed: unknown", "decode, prompts, sizes"]),
        (bench_inference, ["--prefixes", "8", "-1"], ["--prefixes must be at least 1: got -1"]),
    ],
)
def test_refused_in_one_paragraph(tool, argv, said, tmp_path, capsys):
    assert tool.main(["--output", str(tmp_path / "out"), *argv]) == 2
    message = capsys.readouterr().err
    assert (message.startswith("error: "), message.count("\n")) == (True, 1)
    for words in said:
        assert words in message
    assert not (tmp_path / "out").exists()
