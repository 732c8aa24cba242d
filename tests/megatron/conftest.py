"""Fixtures: one start of four ranks, a small prepared corpus, and Megatron-LM's parser."""

import ast
import sys
from argparse import ArgumentParser
from types import ModuleType

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend

from interdomain.megatron import layer_spec, patches, spec
from interdomain.tools import prepare_data

from ..ranks import forks
from ..titan.runs import Runs
from . import ranks

GOOD = "--spec interdomain.megatron.spec interdomain --model.size 125M --transformer-impl local"
STOCK = get_gpt_layer_local_spec()
# Megatron-LM's parser is in no package. These are the arguments that tests give, and that the
# package reads; test_upstream.py compares them with a checkout's.
SWITCHES = """bf16 fp16 use-distributed-optimizer dist-ckpt-optim-fully-reshardable untie-embeddings-and-output-weights swiglu
squared-relu quick-geglu openai-gelu apply-layernorm-1p use-rotary-position-embeddings use-rope-scaling rotary-interleaved
multi-latent-attention qk-layernorm qk-l2-norm qk-clip apply-query-key-layer-scaling attention-output-gate add-qkv-bias
apply-residual-connection-post-layernorm fp32-residual-connection init-method-xavier-uniform reset-attention-mask
reset-position-ids hybrid-context-parallel group-query-attention use-mup use-legacy-models
use-transformer-engine-op-fuser use-torch-fsdp2 use-megatron-fsdp log-max-attention-logit sft apply-wd-to-qk-layernorm
fused-residual-rmsnorm use-grouped-gemm-for-dense-mlp use-te-activation-func eod-mask-loss overlap-grad-reduce
use-flash-attn fine-grained-activation-offloading"""
OPTIONS = """num-layers hidden-size ffn-hidden-size seq-length save load lr mtp-num-layers num-experts no-rope-freq window-size
activation-func-clamp-value rotary-seq-len-interpolation-factor experimental-attention-variant fp8-format fp4-format
te-precision-config-file kitchen-config-file heterogeneous-layers-config-path
heterogeneous-layers-config-encoded-json linear-attention-freq mamba-num-heads
hybrid-layer-pattern hybrid-override-pattern global-batch-size no-weight-decay-cond-type flash-attention-version
mamba-training-ssm-states-dtype hierarchical-context-parallel-sizes mtp-hybrid-override-pattern step-batch-size-schedule
rampup-batch-size window-attn-skip-freq mrope-section num-attention-heads kv-channels"""
DEFAULTS = """
position-embedding-type learned_absolute
normalization LayerNorm
softmax-type vanilla
rotary-base 10000
rotary-percent 1.0
num-query-groups 1
seed 1234
min-lr 0.0
glu-linear-offset 0.0
hidden-dropout 0.1
attention-dropout 0.1
init-method-std 0.02
ckpt-format torch_dist
transformer-impl transformer_engine
optimizer adam
pipeline-model-parallel-size 1
tensor-model-parallel-size 1
align-grad-reduce True
context-parallel-size 1
cp-comm-type ['p2p']
cuda-graph-impl none
mamba-state-dim 128
mamba-head-dim 64
mamba-num-groups 8
linear-conv-kernel-dim 4
linear-key-head-dim 128
linear-value-head-dim 128
linear-num-key-heads 16
linear-num-value-heads 32
"""
NAMES = {
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "apply-layernorm-1p": "layernorm_zero_centered_gamma",
}


def literal(text):
    """Returns a number, a list or a boolean if the text is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def add_megatron_arguments(parser):
    for flag in SWITCHES.split():
        name = NAMES.get(flag, flag.replace("-", "_"))
        parser.add_argument(f"--{flag}", dest=name, action="store_true")
    parser.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    defaults = dict.fromkeys(OPTIONS.split()) | {"attention-backend": AttnBackend.auto}
    for line in DEFAULTS.strip().splitlines():
        flag, value = line.split()
        defaults[flag] = literal(value)
    for flag, default in defaults.items():
        name = NAMES.get(flag, flag.replace("-", "_"))
        parser.add_argument(f"--{flag}", dest=name, type=literal, default=default)
    parser.add_argument("--spec", nargs="*")
    return parser


def get_megatron_optimizer_config(args):
    return "config", {"vectors": {"wd_mult": 0.0}, "head": {"max_lr": 1}}


@pytest.fixture
def training(monkeypatch):
    """A stand-in for Megatron-LM's module megatron.training.training, with our patches."""
    arguments = ModuleType("megatron.training.arguments")
    arguments.add_megatron_arguments = add_megatron_arguments
    training = ModuleType("megatron.training.training")
    training.OptimizerParamScheduler = OptimizerParamScheduler
    training.finalize_model_grads = None
    training.get_megatron_optimizer_config = get_megatron_optimizer_config
    for module in (ModuleType("megatron.training"), arguments, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(spec, "interdomain", layer_spec("interdomain"))
    patches.install()
    return training


@pytest.fixture
def parse(training):
    """parse(line) -> the arguments as `run` reads them."""

    def parse(line):
        parser = ArgumentParser(allow_abbrev=False)
        arguments = sys.modules["megatron.training.arguments"]
        return arguments.add_megatron_arguments(parser).parse_args(line.split())

    return parse


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    for i in range(40):
        text = f"Document {i}. " + "abc def ghi jkl " * (i + 1)
        (folder / "texts" / f"{i}.txt").write_text(text)
    line = f"--input {folder}/texts --vocab-size 300 --validation-fraction 0.2"
    assert prepare_data.main(f"{line} --output {folder}/corpus".split()) == 0
    return folder / "corpus"


@pytest.fixture(scope="session")
def titan(tmp_path_factory, corpus):
    """What TorchTitan's trainer saw, with the model and the batches of the leg "torchtitan"."""
    runs = Runs(tmp_path_factory.mktemp("titan"), {"text": corpus}, forks())
    runs.add(
        "1 ten",
        probes=["gradients"],
        training__steps=ranks.STEPS,
        lr_scheduler__total_steps=ranks.STEPS,
        model__vocab_size=ranks.VOCAB,
        model__n_layers=4,
        optimizer__eps=1e-8,  # Megatron's default
    )
    seen = runs.seen("1 ten")
    runs.end()
    return seen


@pytest.fixture(scope="session")
def computed(tmp_path_factory, corpus):
    """(The folder of the ranks, what each rank has seen)."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.compute(folder, corpus)
    files = [folder / f"seen {rank}.pt" for rank in range(ranks.RANKS)]
    return folder, [torch.load(file, weights_only=False) for file in files]
