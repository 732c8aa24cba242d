"""Megatron-LM's own pretrain_gpt.py with the layer, where a checkout is at hand.

    INTERDOMAIN_MEGATRON_LM=/path/to/Megatron-LM ./launch.sh test tests/megatron/test_upstream.py

Of the same version as megatron-core, whose compiled megatron/core/datasets/helpers_cpp*.so is copied into it.
"""

import os
import pickle
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from interdomain.tools import convert

from ..common import REPOSITORY, TIMEOUT
from . import ranks
from .conftest import add_megatron_arguments

CHECKOUT = os.environ.get("INTERDOMAIN_MEGATRON_LM")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not CHECKOUT, reason="INTERDOMAIN_MEGATRON_LM names no checkout"),
]
ARGUMENTS = """--spec interdomain.megatron.spec interdomain --model.size debug --seq-length 64 --transformer-impl local
--micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 1e-5 --lr-warmup-iters 2 --lr-decay-style cosine
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --eval-iters 1 --eval-interval 3 --log-interval 1
--ckpt-format torch_dist --save-interval 3 --data-cache-path cache
--distributed-backend gloo --use-cpu-initialization --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion --no-create-attention-mask-in-dataloader
--num-workers 0"""

# Megatron-LM 0.19 wants Python 3.12. Every process of a run reads this, those that write checkpoints too.
SITE = "import typing, typing_extensions; typing.override = typing_extensions.override"
PARSER = """
import argparse, pickle, sys
from tests.megatron import upstream
upstream.install()
from megatron.training.arguments import add_megatron_arguments
actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
with open(sys.argv[1], "wb") as f:
    pickle.dump({flag: (a.dest, a.default, a.nargs == 0) for a in actions for flag in a.option_strings}, f)
"""
# Of one version alone, or only with another package.
SOMETIMES = {"--use-mup", "--use-legacy-models", "--hybrid-layer-pattern", "--kitchen-config-file"}
SOMETIMES |= {
    "--use-transformer-engine-op-fuser",
    "--fused-residual-rmsnorm",
    "--use-grouped-gemm-for-dense-mlp",
}
SOMETIMES |= {
    "--use-te-activation-func",
    "--flash-attention-version",
    "--mamba-training-ssm-states-dtype",
}
SOMETIMES |= {"--mtp-hybrid-override-pattern", "--step-batch-size-schedule", "--align-grad-reduce"}


def environment(folder):
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(
        [str(folder), CHECKOUT, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    )
    return os.environ | {
        "PYTHONPATH": path,
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def test_its_parser_has_the_arguments_of_other_tests(tmp_path):
    command = [sys.executable, "-c", PARSER, str(tmp_path / "arguments")]
    subprocess.run(command, env=environment(tmp_path), check=True, timeout=TIMEOUT)
    there = pickle.loads((tmp_path / "arguments").read_bytes())
    for action in add_megatron_arguments(ArgumentParser(add_help=False))._actions:
        (flag,) = action.option_strings
        if flag in there or flag not in SOMETIMES:
            assert there[flag] == (action.dest, action.default, action.nargs == 0), flag


def train(folder, corpus, *arguments, **settings):
    """The losses that it logs, by step."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    name = "pretrain_hybrid.py" if HYBRID in arguments else "pretrain_gpt.py"
    script = [Path(__file__).with_name("upstream.py"), f"{CHECKOUT}/{name}", *ARGUMENTS.split()]
    command = [*torchrun, *script, "--data.corpus", corpus, *arguments]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment(folder) | settings,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r" iteration +(\d+)/.*lm loss: ([\d.E+-]+)", done.stdout + done.stderr)
    return {int(step): float(loss) for step, loss in found}


def minor_version():
    return int(
        re.search(r"MINOR = (\d+)", Path(f"{CHECKOUT}/megatron/core/package_info.py").read_text())[
            1
        ]
    )


HYBRID = "interdomain.megatron.hybrid"
MODELS = {
    "GPTModel": ("", "", ""),
    "HybridModel": (f"--spec {HYBRID} interdomain --hybrid-layer-pattern", "G-*-G-M-", "G-*-|G-M-"),
}


@pytest.mark.parametrize("model", MODELS)
def test_it_trains_saves_reshards_and_converts(model, corpus, tmp_path):
    spec, pattern, stages = MODELS[model]
    if model == "HybridModel" and minor_version() < 18:
        pytest.skip("there is no HybridModel before 0.18")
    half = "--bf16 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    options = f"{half} --train-iters 6 --save run --load run".split()
    tensor = (
        f"--tensor-model-parallel-size 2 --sequence-parallel --exit-interval 3 {spec} {pattern}"
    )
    first = train(tmp_path, corpus, *options, *tensor.split())
    second = train(
        tmp_path, corpus, *options, *f"--pipeline-model-parallel-size 2 {spec} {stages}".split()
    )
    assert (list(first), list(second)) == ([1, 2, 3], [4, 5, 6])
    assert second[6] < first[1] - 0.2
    arguments = [tmp_path / "run", "--tokenizer", corpus, "--output", tmp_path / "folder"]
    assert convert.main([str(x) for x in arguments]) == 0


STAGES = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "data": "",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context": "--context-parallel-size 2",
    "virtual stages": f"{STAGES} --num-virtual-stages-per-pipeline-rank 2",
    "hybrid": f"--spec {HYBRID} interdomain --hybrid-layer-pattern G-G-G-G- --context-parallel-size 2",
    "hybrid, virtual stages": f"--spec {HYBRID} interdomain --hybrid-layer-pattern G-|G-|G-|G- {STAGES}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_go_as_torchtitan_s(layout, corpus, titan, tmp_path):
    """From the same start, with the same batches and settings."""
    hybrid = layout.startswith("hybrid")
    if minor_version() < 18 and (hybrid or layout == "virtual stages"):
        pytest.skip(
            "no HybridModel, and over gloo the losses of 0.16's pipelines vary between runs"
        )
    ranks.write_start(tmp_path / "start", "torchtitan", hybrid)
    windows = torch.cat([ranks.tokens_of(step, corpus) for step in range(ranks.STEPS)])
    torch.save(windows, tmp_path / "windows.pt")
    options = f"--train-iters {ranks.STEPS} --make-vocab-size-divisible-by 8 --load start {LAYOUTS[layout]}".split()
    losses = train(tmp_path, corpus, *options, WINDOWS=str(tmp_path / "windows.pt"))
    wanted = {step: seen["loss"] for step, seen in titan["log"].items()}
    wanted[2] = (wanted[1] + wanted[2]) / 2  # upstream logs the mean of the first two there
    assert losses == pytest.approx(wanted, abs=1e-5)


def test_documents_apart_over_context_parallel_ranks(corpus, tmp_path):
    if minor_version() < 19:
        pytest.skip("--dataloader-inter-document-masking is of 0.19")
    ranks.write_start(tmp_path / "start", "torchtitan")
    options = ["--train-iters", "3", "--make-vocab-size-divisible-by", "8", "--load", "start"]
    flowing = train(tmp_path, corpus, *options)
    options.append("--dataloader-inter-document-masking")
    apart = train(tmp_path, corpus, *options)
    assert apart[1] != pytest.approx(flowing[1], abs=1e-4)
    pieces = train(tmp_path, corpus, *options, "--context-parallel-size", "2")
    assert pieces == pytest.approx(apart, rel=1e-6)
