"""Megatron-LM's own training scripts with the layer, if there is a checkout.

    INTERDOMAIN_MEGATRON_LM=/path/to/Megatron-LM ./launch.sh test tests/megatron/test_upstream.py

The checkout has the version of the installed megatron-core, and a copy of its compiled
megatron/core/datasets/helpers_cpp*.so.
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
--train-iters 10 --ckpt-format torch_dist --load start --save run --save-interval 10 --data-cache-path cache
--distributed-backend gloo --use-cpu-initialization --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion --no-create-attention-mask-in-dataloader
--num-workers 0"""

# Megatron-LM 0.19 wants Python 3.12. Every process of a run reads this, also a checkpoint's writer.
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
# Arguments of only some versions, or only with another package.
SOMETIMES = """--use-mup --use-legacy-models --hybrid-layer-pattern --kitchen-config-file
--use-transformer-engine-op-fuser --fused-residual-rmsnorm --use-grouped-gemm-for-dense-mlp
--use-te-activation-func --flash-attention-version --mamba-training-ssm-states-dtype
--mtp-hybrid-override-pattern --step-batch-size-schedule --align-grad-reduce"""


def environment(folder):
    (folder / "sitecustomize.py").write_text(SITE)
    path = [str(folder), str(REPOSITORY), CHECKOUT, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def test_its_parser_has_the_arguments_of_other_tests(tmp_path):
    command = [sys.executable, "-c", PARSER, str(tmp_path / "arguments")]
    subprocess.run(command, env=environment(tmp_path), check=True, timeout=TIMEOUT)
    upstream = pickle.loads((tmp_path / "arguments").read_bytes())
    for action in add_megatron_arguments(ArgumentParser(add_help=False))._actions:
        (flag,) = action.option_strings
        if flag in upstream or flag not in SOMETIMES.split():
            assert upstream[flag] == (action.dest, action.default, action.nargs == 0), flag


def train(folder, corpus, line, **settings):
    """Trains on two ranks, and returns the losses that Megatron-LM logs, by step."""
    name = "pretrain_hybrid.py" if HYBRID in line else "pretrain_gpt.py"
    upstream = Path(__file__).with_name("upstream.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(upstream), f"{CHECKOUT}/{name}", *ARGUMENTS.split()]
    command += ["--data.corpus", str(corpus), *line.split()]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(folder) | settings,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    losses = {}
    for step, loss in re.findall(r" iteration +(\d+)/.*lm loss: ([\d.E+-]+)", log):
        losses[int(step)] = float(loss)
    return losses


def minor_version():
    text = Path(f"{CHECKOUT}/megatron/core/package_info.py").read_text()
    return int(re.search(r"MINOR = (\d+)", text)[1])


HYBRID = "interdomain.megatron.hybrid"
HYBRID_SPEC = f"--spec {HYBRID} interdomain --hybrid-layer-pattern"
STAGES = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "data": "",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context": "--context-parallel-size 2",
    "virtual stages": f"{STAGES} --num-virtual-stages-per-pipeline-rank 2",
    "hybrid": f"{HYBRID_SPEC} G-G-G-G- --context-parallel-size 2",
    "hybrid, virtual stages": f"{HYBRID_SPEC} G-|G-|G-|G- {STAGES}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_go_as_torchtitan_s(layout, corpus, titan, tmp_path):
    """From the same start and batches, with the same settings, losses are the same. The checkpoint can be converted."""
    hybrid = layout.startswith("hybrid")
    if minor_version() < 18 and (hybrid or layout == "virtual stages"):
        pytest.skip(
            "no HybridModel, and over gloo the losses of 0.16's pipelines vary between runs"
        )
    ranks.write_start(tmp_path / "start", "torchtitan", hybrid)
    windows = torch.cat([ranks.tokens_of(step, corpus) for step in range(ranks.STEPS)])
    torch.save(windows, tmp_path / "windows.pt")
    # After --data.corpus, which sets a size of its own.
    line = f"--make-vocab-size-divisible-by 8 {LAYOUTS[layout]}"
    losses = train(tmp_path, corpus, line, WINDOWS=str(tmp_path / "windows.pt"))
    wanted = {step: seen["loss"] for step, seen in titan["log"].items()}
    # Megatron-LM logs the mean of the first two losses at step 2.
    wanted[2] = (wanted[1] + wanted[2]) / 2
    assert losses == pytest.approx(wanted, abs=1e-5)
    line = f"{tmp_path}/run --tokenizer {corpus} --output {tmp_path}/exported"
    assert convert.main(line.split()) == 0
