"""bench_kernels and bench_decode in CPU tiny mode: what they write, what they find, what they refuse."""

import json
import os
import subprocess
import sys

import pytest
import torch

from interdomain.tools import _bench, _mixers, bench_decode, bench_kernels, check_kernels

from ..common import REPOSITORY, TIMEOUT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")


def results(folder, part):
    contents = json.loads((folder / f"{part}.json").read_text())
    page = (folder / f"{part}.md").read_text()
    assert contents["label"] == _bench.CPU_LABEL
    assert _bench.CPU_LABEL in page
    return contents, page


# bench_kernels


def test_kernel_table(tmp_path, capsys):
    few = ["--mixers", "chunkwise", "linear", "sdpa-flash", "sdpa-cudnn", "sequential", "--rounds", "1"]
    assert bench_kernels.main(["--output", str(tmp_path), *few, "--shapes", "1x32x8", "--basis", "8"]) == 0
    contents, page = results(tmp_path, "kernels")
    name, features = contents["tables"]
    assert name == "B=1 T=32 H=2 d=8 M=8"
    assert features == f"input features, {name}"
    assert [row["features"] for row in contents["tables"][features]["rows"]] == [
        *("query, torch", "key, torch", "value, torch")
    ]
    rows = {row["mixer"]: row for row in contents["tables"][name]["rows"]}
    for mixer in ("chunkwise", "linear", "sdpa-flash"):
        row = rows[mixer]
        assert min(row["forward ms"], row["backward ms"], row["copy TB/s"], row["product TFLOP/s"]) > 0
        assert row["both ms"] >= max(row["forward ms"], row["backward ms"])
        assert row["of best attention"] == pytest.approx(row["both ms"] / rows["sdpa-flash"]["both ms"])
        assert row["of floor"] == pytest.approx(
            max(row["byte floor ms"], row["FLOP floor ms"] or 0) / row["both ms"], rel=1e-6
        )
    assert rows["chunkwise"]["byte floor ms"] > rows["chunkwise"]["I/O floor ms"]
    for mixer in ("sdpa-cudnn", "sequential"):  # on a GPU only: said, and no obstacle
        assert "both ms" not in rows[mixer]
        assert rows[mixer]["remark"]
    assert "| chunkwise | " in page
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 timings; complete: wrote ")


FAKES = {
    "flash_attn.py": "def flash_attn_func(q, k, v, *, causal): assert causal; return q * k * v",
    "flash_attn_interface.py": "def flash_attn_func(q, k, v, *, causal): assert causal; return q * k * v, None",
    "flash_attn-2.9.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.9.1\n",
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
    contents, _ = results(tmp_path / "out", "kernels")
    table = contents["tables"]["B=1 T=16 H=2 d=8 M=8"]
    assert not any(row.get("remark") for row in table["rows"])
    assert all(row["both ms"] > 0 for row in table["rows"])
    assert [row["by"] for row in table["rows"]] == [
        *("flash_attn_interface", "flash-attn 2.9.1", "fla", "fla", "mamba_ssm", "fla")
    ]
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        del sys.modules[name]


def test_targets_compare_with_the_best():
    def row(ms, floor=None):
        return {"both ms": ms, "byte floor ms": floor}

    at = {T: bench_kernels.parse_shape(f"1x{T}x64", 32, 64) for T in (4096, 16_384)}
    tables = {
        at[4096]: {
            "chunkwise": row(1.0, 0.7),
            "chunkwise-kept": row(0.8),
            "sdpa-flash": row(2.0),
            "sdpa-cudnn": row(4.0),
            "fla-gla": row(5.0),
        },
        at[16_384]: {"chunkwise": row(1.0, 0.5), "sdpa-flash": {"remark": "no"}, "sdpa-cudnn": row(10.0)},
    }
    found = {}
    for row in bench_kernels.targets(tables):
        found[f"{row['target'].split(',')[0]} {row['bound']}"] = row["measured"], row["met"]
    assert found["chunkwise-kept over sdpa-flash at most 0.3"] == (0.4, False)  # the faster of ours
    assert found["chunkwise over sdpa-cudnn at most 0.12"] == (0.1, True)
    assert found["chunkwise-kept over fla-gla at most 0.6"] == (0.16, True)
    assert found["chunkwise-kept over fla-gated-delta at most 0.6"] == (None, None)
    assert [row["met"] for row in bench_kernels.targets(tables) if "byte floor" in row["target"]] == [True, False]


INTERPRETED = """
import sys
import pytest
sys.path.insert(0, {repository!r})
from tests.scan import triton_interpreter
triton_interpreter.repair(pytest.MonkeyPatch())
from interdomain.scan import triton_plan
from interdomain.tools import _passes, bench_kernels
triton_plan._MIN_SEGMENT = 1  # cut time where a GPU would: two chunks are two segments
_passes.TILES = {{name: tiles[:1] for name, tiles in _passes.TILES.items()}}
_passes.CHUNKS = (16,)
flags = ["--output", sys.argv[1], "--basis", "16", "--heads", "1", "--rounds", "1", "--shapes", "1x70x16"]
sys.exit(
    bench_kernels.main(["--once", "all", *flags])
    or bench_kernels.main(["--passes", *flags])
    or bench_kernels.main(["--tune", *flags])
)
"""


def test_passes_and_tiles_in_the_interpreter(tmp_path):
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
    contents, _ = results(tmp_path, "passes")
    (table,) = contents["tables"].values()
    rows = {row["pass"]: row for row in table["rows"]}
    passes = {"contract": 3, "mix_expand": 1, "mix": 0, "mix_backward": 1, "expand": 1}
    passes |= {"adjoint_decay": 2, "adjoint": 0, "decay": 0}
    assert passes.items() <= {name: row.get("times a step") for name, row in rows.items()}.items()
    assert {"tables", "all of a step"} <= rows.keys()
    assert {"states", "costates", "chain"} <= rows.keys()
    assert "launched adjoint_decay, B=1 T=70 H=1 d=16 M=16" in done.stdout
    assert all(row.get("ms") for row in rows.values()), rows
    total = sum(row["ms"] * row["times a step"] for name, row in rows.items() if name != "all of a step")
    assert rows["all of a step"]["ms"] == pytest.approx(total)
    contents, _ = results(tmp_path, "tune")
    assert len(contents["tables"]) == 7
    assert all(row["of shipped"] for table in contents["tables"].values() for row in table["rows"] if row["ms"])
    for table in contents["tables"].values():
        assert [row["shipped"] for row in table["rows"] if row["ms"]].count(True) == 1


def test_passes_without_a_gpu_are_skipped_and_say_so(tmp_path, capsys):
    assert bench_kernels.main(["--passes", "--output", str(tmp_path)]) == 0
    contents, page = results(tmp_path, "passes")
    assert contents["status"] == "skipped"
    assert "need a GPU" in page
    capsys.readouterr()


# bench_decode


def test_decode_table(tmp_path):
    few = ["--batches", "1", "2", "--caches", "8", "16", "--rounds", "1"]
    assert bench_decode.main(["--output", str(tmp_path), *few]) == 0
    contents, page = results(tmp_path, "decode")
    assert list(contents["tables"]) == ["B=1 H=2 d=16 M=16", "B=2 H=2 d=16 M=16"]
    for table in contents["tables"].values():
        rows = {row["step"]: row for row in table["rows"]}
        assert list(rows) == [
            *(
                "interdomain, in place",
                "interdomain, plain PyTorch",
                "softmax, cache 8, flash",
                "softmax, cache 16, flash",
            )
        ]
        ours = rows["interdomain, in place"]
        for row in rows.values():
            assert row["us"] > 0
            assert row["over fused"] == pytest.approx(row["us"] / ours["us"])
            bandwidth = contents["ceilings"]["bandwidth"]
            assert row["of copy bandwidth"] == pytest.approx(row["MB"] / row["us"] * 1e12 / bandwidth)
    assert "| interdomain, in place | no |" in page


def test_decode_keeps_the_fastest_attention():
    rows = [
        {"step": "interdomain, fused in place", "graph": False, "us": 2.0},
        {"step": "interdomain, fused in place", "graph": True, "us": 1.0},
        {"step": "interdomain, plain PyTorch", "graph": False, "us": 8.0},
        {"step": "softmax, cache 8, flash", "graph": False, "us": 6.0},
        {"step": "softmax, cache 8, flash", "graph": True, "remark": "not captured"},
        {"step": "softmax, cache 8, cudnn", "graph": False, "us": 4.0},
        {"step": "softmax, cache 8, cudnn", "graph": True, "us": 3.0},
        {"step": "softmax, cache 9, math", "graph": False, "remark": "out of memory"},
    ]
    kept = [(row["step"], row["graph"], row["over fused"]) for row in bench_decode.compared(rows)]
    assert kept == [
        ("interdomain, fused in place", False, 1.0),
        ("interdomain, fused in place", True, 1.0),
        ("interdomain, plain PyTorch", False, 4.0),
        ("softmax, cache 8, cudnn", False, 2.0),
        ("softmax, cache 8, cudnn", True, 3.0),
        ("softmax, cache 9, math", False, None),
    ]
    # Without a time of the fused step nothing is compared with another's.
    rows[:2] = [{"step": "interdomain, fused in place", "graph": False, "remark": "RuntimeError"}]
    assert {row["over fused"] for row in bench_decode.compared(rows)} == {None}


# Refusals


@pytest.mark.parametrize(
    ("tool", "argv", "said"),
    [
        (bench_kernels, ["--mixers", "chunkwise", "flash4"], ["--mixers flash4: unknown", "sdpa-flash", "fla-gla"]),
        (bench_kernels, ["--shapes", "8x4096"], ["--shapes 8x4096", "BATCHxTOKENSxHEAD_DIM"]),
        (bench_kernels, ["--once", "contract"], ["The passes are Triton and need a GPU"]),
        (bench_kernels, ["--rounds", "0"], ["--rounds must be at least 1: got 0"]),
        (bench_kernels, ["--device", "cuda"], ["--device cuda", "no GPU(s)"]),
        (bench_kernels, ["--time-limit", "-1"], ["--time-limit", "-1"]),
        (bench_decode, ["--batches", "0"], ["--batches must be at least 1: got 0"]),
        (check_kernels, ["--groups", "magic"], ["--groups magic: unknown", "chunkwise-fp32"]),
        (check_kernels, ["--workers", "0"], ["--workers must be at least 1: got 0"]),
    ],
)
def test_refused_in_one_paragraph(tool, argv, said, tmp_path, capsys):
    assert tool.main(["--output", str(tmp_path / "out"), *argv]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    for words in said:
        assert words in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", [bench_kernels, bench_decode, check_kernels])
def test_where_nothing_can_be_written(tool, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert tool.main(["--output", str(tmp_path / "file" / "results")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "file" in message


def test_existing_results_stay(tmp_path, capsys):
    (tmp_path / "check.json").write_text("mine")
    assert check_kernels.main(["--output", str(tmp_path), "--groups", "reference"]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (tmp_path / "check.json").read_text() == "mine"
