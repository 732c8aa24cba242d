"""One start of four ranks for all tests of this folder, a small prepared corpus, and Megatron-LM's parser."""

import ast
import contextlib
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
from ..titan.driver import digest
from ..titan.runs import Runs
from . import ranks

GOOD = "--spec interdomain.megatron.spec interdomain --model.size 125M --transformer-impl local"
STOCK = get_gpt_layer_local_spec()
# Of Megatron-LM's parser, which is in no package: the arguments that tests give. test_upstream compares them with a checkout's.
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
DEFAULTS = {
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "softmax-type": "vanilla",
    "rotary-base": 10000,
    "rotary-percent": 1.0,
    "num-query-groups": 1,
    "seed": 1234,
    "min-lr": 0.0,
    "glu-linear-offset": 0.0,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "init-method-std": 0.02,
    "ckpt-format": "torch_dist",
    "transformer-impl": "transformer_engine",
    "optimizer": "adam",
    "pipeline-model-parallel-size": 1,
    "tensor-model-parallel-size": 1,
    "align-grad-reduce": True,
    "context-parallel-size": 1,
    "cp-comm-type": ["p2p"],
    "attention-backend": AttnBackend.auto,
    "cuda-graph-impl": "none",
    "mamba-state-dim": 128,
    "mamba-head-dim": 64,
    "mamba-num-groups": 8,
    "linear-conv-kernel-dim": 4,
    "linear-key-head-dim": 128,
    "linear-value-head-dim": 128,
    "linear-num-key-heads": 16,
    "linear-num-value-heads": 32,
}
NAMES = {
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "apply-layernorm-1p": "layernorm_zero_centered_gamma",
}


def _value(text):
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def add_megatron_arguments(parser):
    def name_of(flag):
        return NAMES.get(flag, flag.replace("-", "_"))

    for flag in SWITCHES.split():
        parser.add_argument(f"--{flag}", dest=name_of(flag), action="store_true")
    parser.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    for flag, default in (dict.fromkeys(OPTIONS.split()) | DEFAULTS).items():
        parser.add_argument(f"--{flag}", dest=name_of(flag), type=_value, default=default)
    parser.add_argument("--spec", nargs="*")
    return parser


@pytest.fixture
def parse(monkeypatch):
    """parse(line): (the arguments as `run` reads them, megatron.training.training); both of Megatron-LM are stand-ins."""
    arguments, training = (
        ModuleType(f"megatron.training.{name}") for name in ("arguments", "training")
    )
    arguments.add_megatron_arguments = add_megatron_arguments
    training.OptimizerParamScheduler = OptimizerParamScheduler
    training.finalize_model_grads = None
    training.get_megatron_optimizer_config = lambda args: (
        "config",
        {"vectors": {"wd_mult": 0.0}, "head": {"max_lr": 1}},
    )
    for module in (ModuleType("megatron.training"), arguments, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(spec, "interdomain", layer_spec("interdomain"))
    patches.install()

    def parse(line):
        return arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(
            line.split()
        ), training

    return parse


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"Document {i}. " + "abc def ghi jkl " * (i + 1))
    options = ["--vocab-size", "300", "--validation-fraction", "0.2"]
    assert (
        prepare_data.main(["--input", str(texts), "--output", str(folder / "corpus"), *options])
        == 0
    )
    return folder / "corpus"


@pytest.fixture(scope="session")
def titan(tmp_path_factory, corpus):
    """A run of TorchTitan's trainer, of the model, batches and learning rates that ranks.py calls "torchtitan": what it saw."""
    runs = Runs(tmp_path_factory.mktemp("titan"), {"text": corpus}, forks())
    runs.add(
        "1 ten",
        probes=["gradients"],
        training__steps=ranks.STEPS,
        lr_scheduler__total_steps=ranks.STEPS,
        model__vocab_size=ranks.VOCAB,
        model__n_layers=4,
    )
    seen = runs.seen("1 ten")
    runs.end()
    start = ranks.plain_model("torchtitan").named_parameters()
    assert {name: digest(p) for name, p in start} == seen["initial"]
    batches = torch.cat([ranks.tokens_of(step, corpus) for step in range(ranks.STEPS)])
    assert [digest(row) for row in batches] == [
        sample for step in seen["samples"].values() for sample in step
    ]
    return seen


@pytest.fixture(scope="session")
def computed(tmp_path_factory, corpus):
    """(the folder, what each rank has seen)."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.compute(folder, corpus)
    return folder, [
        torch.load(folder / f"seen {rank}.pt", weights_only=False) for rank in range(ranks.RANKS)
    ]
