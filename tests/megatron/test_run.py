"""Upstream's training script with our layer: its arguments, what is refused before it starts, and the script itself."""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from types import ModuleType, SimpleNamespace

import pytest
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from interdomain.megatron import layer_spec, run, spec, train
from interdomain.model import CONDITIONS, build_config

from ..common import TIMEOUT

GOOD = "--spec interdomain.megatron.spec interdomain --model.size 125M"


@pytest.fixture
def parse(monkeypatch, corpus):
    """Megatron's parser as `run` changes it, in front of stand-ins for megatron.training."""

    def add_megatron_arguments(parser):
        for name in ("num-layers", "hidden-size", "seq-length"):
            parser.add_argument(f"--{name}", type=int)
        for name in ("bf16", "fp16", "use-distributed-optimizer", "dist-ckpt-optim-fully-reshardable"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
        for name in ("save", "load"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--spec", nargs="*")
        parser.add_argument("--position-embedding-type", default="learned_absolute")
        for name, default in (("rotary-base", 10000), ("seed", 1234), ("lr", 3e-3), ("min-lr", 0.0)):
            parser.add_argument(f"--{name}", type=type(default), default=default)
        return parser

    arguments, training = (ModuleType(f"megatron.training.{name}") for name in ("arguments", "training"))
    arguments.add_megatron_arguments = add_megatron_arguments
    training.get_megatron_optimizer_config = lambda args: ("config", {"standard": 1})
    for module in (ModuleType("megatron.training"), arguments, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(spec, "interdomain", layer_spec("interdomain"))
    run.install()

    def parse(line):
        args = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(line.split())
        return args, training.get_megatron_optimizer_config(args)

    return parse


def test_settings_reach_the_layer(parse, corpus):
    line = f"{GOOD} --data.corpus {corpus} --mixer.rope False --mixer.n_basis 32 --ssm-lr 5e-4 --num-layers 6 --seed 7"
    args, (config, groups) = parse(line)
    assert (args.hidden_size, args.num_layers, args.seq_length, args.position_embedding_type) == (768, 6, 4096, "none")
    assert (args.train_data_path, args.tokenizer_type) == ([f"{corpus}/train-00000"], "NullTokenizer")
    params = spec.interdomain.submodules.self_attention.params
    assert params["mixers"] == build_config("125M", "interdomain-norope", n_basis=32).mixers
    assert (params["seed"], params["max_seq_len"]) == (7, 4096)
    assert (config, groups["standard"]) == ("config", 1)
    (ours,) = (value for key, value in groups.items() if key != "standard")
    assert ours == {"wd_mult": 0.0, "max_lr": 5e-4, "min_lr": 0.0, "lr_mult": pytest.approx(1 / 6)}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "start it with torchrun"),
        ("--tensor-parallel 3", "= 3 does not divide the 4 rank(s)"),
        ("--micro-batch 3 --global-batch 8", "must be a multiple of 12: 4 data-parallel rank(s) x --micro-batch 3"),
        ("--load nowhere", "--load nowhere holds no checkpoint of Megatron-Core"),
    ],
)
def test_the_own_program_refuses_before_it_starts(flags, words, corpus, monkeypatch):
    if flags:
        monkeypatch.setenv("WORLD_SIZE", "4")
    batch = "" if "batch" in flags else "--micro-batch 2 --global-batch 8"
    with pytest.raises(SystemExit, match=re.escape(words)):
        train.main(f"--data.corpus {corpus} {batch} {flags}".split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model.size 125M", "name the layer: --spec interdomain.megatron.spec"),
        (f"{GOOD} --spec interdomain.nowhere x", "No module named 'interdomain.nowhere'"),
        (f"{GOOD} --spec interdomain.megatron.spec s5", "has no layer 's5'"),
        ("--spec interdomain.megatron.spec interdomain", "this mixer rotates queries and keys itself. Set none."),
        (
            "--spec interdomain.megatron.spec interdomain --position-embedding-type none",
            "set --untie-embeddings-and-output-weights",
        ),
        (f"{GOOD} --bf16", "Set --use-distributed-optimizer."),
        (f"{GOOD} --use-distributed-optimizer --save x", "Set --dist-ckpt-optim-fully-reshardable."),
        (f"{GOOD} --mixer.n_basis 0", "mixer.n_basis must be at least 1: got 0."),
        (f"{GOOD} --mixer.readout imaginary", "invalid choice: 'imaginary'"),
        (f"{GOOD} --mixer.rope perhaps", "'perhaps' is neither True nor False"),
        (f"{GOOD} --data.corpus nowhere", "nowhere is not a prepared corpus"),
    ],
)
def test_refused_at_the_start(line, words, parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_corpus_with_answers_is_refused(parse, capsys, tmp_path):
    """Megatron's data sets would train on every token."""
    marks = {"example_tokens": 256, "per_example": 32}
    manifest = {"format": "interdomain-corpus", "format_version": 1, "vocab_size": 514, "answers": marks, "splits": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit):
        parse(f"{GOOD} --data.corpus {tmp_path}")
    assert "is a corpus whose loss is that of its answers" in capsys.readouterr().err


def test_specs():
    """Every condition after --spec; a setting of the mixer that no model has is refused as everywhere."""
    for condition in CONDITIONS:
        assert (
            vars(spec)[condition].submodules.self_attention.params["mixers"] == build_config("125M", condition).mixers
        )
    with pytest.raises(ValueError, match="unknown mixer setting"):
        layer_spec(n_kv_heads=2)


@pytest.mark.parametrize(
    "settings",
    [
        *(dict(glu_linear_offset=1.0), dict(activation_func_clamp_value=0.1), dict(activation_func=quick_gelu)),
        *(dict(normalization="LayerNorm"), dict(add_bias_linear=True), dict(ffn_hidden_size=512)),
        *(dict(gated_linear_unit=False), dict(layernorm_zero_centered_gamma=True), dict(mtp_num_layers=1)),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_model_that_could_not_be_converted_is_refused_when_it_is_built(settings):
    config = spec.transformer_config(build_config("debug"))
    for name, value in settings.items():
        setattr(config, name, value)
    attention, ranks = (
        layer_spec("interdomain").submodules.self_attention,
        SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} = .* No folder could be made"):
        attention.module(config, 1, ranks, **attention.params)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "raise ImportError('not here')",
            "needs megatron-core, the extra `megatron`: pip install 'interdomain[megatron]'",
        ),
        ("__version__ = '0.15.3'", "runs with megatron-core 0.16 to 0.19; found 0.15.3."),
    ],
)
def test_without_megatron_core_or_with_another(source, words, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    (core / "__init__.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import interdomain.megatron"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.e2e
@pytest.mark.slow_group("plugin/interdomain/megatron/", "plugin/interdomain/model/", "kernels/", "tests/megatron/")
def test_the_own_program_trains_saves_and_goes_on_in_another_layout(corpus, tmp_path):
    """Two ranks over gloo, as docs/megatron.md starts them; the second start has a pipeline."""

    def start(*layout):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        given = f"--data.corpus {corpus} --save {tmp_path}/run --save-interval 4 --micro-batch 2 --global-batch 8"
        program = ["-m", "interdomain.megatron.train", *given.split(), "--log-interval", "1", *layout]
        done = subprocess.run([*torchrun, *program], capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stdout + done.stderr
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)}

    first = start("--tensor-parallel", "2", "--steps", "4")
    second = start("--pipeline-parallel", "2", "--steps", "8")
    assert (list(first), list(second)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert second[8] < first[1] - 0.2
