"""TorchTitan 0.3.0: its own trainer on every axis, a configuration of the user's own, and our trainer by its entry."""

import multiprocessing
import os
import subprocess
import sys

import pytest
from torch.distributed import fsdp

from interdomain.checkpoint.step_folder import milestones
from interdomain.removed import NO_ZERO_BUBBLE

from ..ranks import environment
from .runs import Runs, assert_same_run, continue_from, read_runs
from .test_spec import TOKENS, export, own_data, toml_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# A folder with TorchTitan 0.3.0. `./launch.sh test` makes it and sets the variable.
TITAN03 = "INTERDOMAIN_TITAN03"
GIVEN = read_runs("titan_0_3")
OWN = "--module tests.titan.own_config --config tiny --parallelism.pipeline_parallel_microbatch_size 4"


@pytest.fixture(scope="module")
def new(runs, tmp_path_factory):
    """Runs under TorchTitan 0.3.0, which a process that has imported 0.2.2 cannot import."""
    if not os.environ.get(TITAN03):
        pytest.skip(f"{TITAN03} names no folder with TorchTitan 0.3.0")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("TorchTitan 0.3.0 needs a newer PyTorch")
    folder = tmp_path_factory.mktemp("titan03")
    own_data(folder)
    context = multiprocessing.get_context("spawn")
    new = Runs(folder, runs.corpora, context, [os.environ[TITAN03]])
    for name, settings in GIVEN.items():
        new.add(name, **settings)
        if settings.get("stock"):
            new.jobs[name]["args"] = entry_arguments(new, name)
    new.jobs["1 seed"]["args"].append("--checkpoint.create_seed_checkpoint")
    for axis in ("context", "tensor", "pipeline"):
        name = f"2 own {axis}"
        new.add(name, training__steps=3, stock=True)
        flags = f"{OWN} --parallelism.{axis}_parallel_degree 2 --dump_folder"
        new.jobs[name]["args"] = [*flags.split(), str(folder / name)]
    # Replaces a component that the model does not have: TorchTitan warns.
    override = ["--override.imports", "torchtitan.overrides.fused_swiglu.fused_swiglu"]
    new.jobs["2 own tensor"]["args"] += override
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNS_OF_TITAN03", str(folder))  # a path of a flag may name a variable
        patch.setenv("OWN_DATA", str(folder))
        yield new
        new.end()


def entry_arguments(new, name):
    """Returns arguments of TorchTitan 0.3.0's entry: a TOML file, and flags of the length, data and layers."""
    settings = dict(new.settings[name])
    n_layers = settings.pop("model__n_layers", 2)
    steps = settings.pop("training__steps")
    settings |= {"job__dump_folder": "elsewhere", "model__n_layers": 1}
    file = toml_of(new.folder / f"{name}.toml", **settings, **TOKENS)
    module = "interdomain.titan"
    if name == "2 entered":
        module = "interdomain.titan.trainer"
    corpus = new.corpora[new.jobs[name]["corpus"]]
    flags = f"""
        --module {module} --training.steps {steps} --lr_scheduler.warmup_steps 2
        --model.n_layers {n_layers} --data.corpus {corpus}
    """
    # The run's name has spaces.
    paths = ["--config", str(file), "--dump_folder", f"$RUNS_OF_TITAN03/{name}"]
    return flags.split() + paths


@pytest.mark.parametrize("name", [name for name in GIVEN if name not in ("1 seed", "2 continued")])
def test_torchtitan_0_3_trains_the_same(runs, new, name):
    """Our trainer on every axis, and TorchTitan's own. Runs go on from one rank's initial values and on another axis."""
    assert_same_run(new, name, runs)
    # The time limit also holds for groups that TorchTitan did not make.
    assert set(dict(new.seen(name)["timeouts"]).values()) == {100}


def test_a_run_continues_from_a_checkpoint_of_0_2_2(runs, new):
    continue_from(runs.checkpoint("2 text", 3), new.folder / "2 continued")
    assert list(new.log("2 continued")) == [4, 5]
    assert_same_run(new, "2 continued", runs)
    assert set(milestones(new.folder / "2 continued" / "checkpoint")) == {4, 5}


def test_checkpoints_of_torchtitan_0_3_are_read(runs, new, tmp_path):
    """`convert` reads them, and a run under 0.2.2 continues from them."""
    saved = new.checkpoint("2 stock shards", 3)
    export(saved, tmp_path / "folder")
    runs.add("1 back", same_as="2 text", near=1e-6, checkpoint__enable=True, training__steps=4)
    continue_from(saved, runs.folder / "1 back")
    assert_same_run(runs, "1 back")


@pytest.mark.parametrize("name", ["2 stock shards", "2 entered"])
def test_each_rank_writes_a_trace(new, name):
    traces = sorted(new.at(name).glob("profile_traces/**/*.gz"))
    assert [path.name for path in traces] == ["rank0_trace.json.gz", "rank1_trace.json.gz"]


@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_a_configuration_of_the_users_own(new, axis):
    """TorchTitan's data, optimizer, metrics and validator. The data of all axes are the same."""
    seen = new.every(f"2 own {axis}")[-1]
    expected = new.seen("2 own tensor")
    for what in ("log", "validation"):
        assert seen[what].keys() == expected[what].keys()
        for step, scalars in seen[what].items():
            assert scalars["loss"] == pytest.approx(expected[what][step]["loss"], rel=1e-6)
    assert seen["log"][3]["n_tokens_seen"] == 3 * 512


def test_the_model_of_such_a_configuration_is_exported(new, tmp_path):
    folder = export(new.checkpoint("2 own context", 3), tmp_path / "folder")
    assert "| c4_test | 0 | 1 |" in (folder / "README.md").read_text()


PIPELINE = "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel"
# Flags of each entry, and a part of the error message.
TITANS = "--module interdomain.titan --config run.toml"
OURS = "--module interdomain.titan.trainer --config run.toml"
REFUSED = [
    (f"{TITANS} --parallelism.spmd_backend partial_dtensor", "only the loss of spmd_types takes"),
    (f"{TITANS} --parallelism.expert_parallel_degree 2", "no experts"),
    (f"{TITANS} --training.no-disable-cuda-graphs", "was never captured"),
    (f"{TITANS} --profiler.enable_memory_snapshot", "needs a GPU"),
    (f"{TITANS} --hf_assets_path elsewhere", "the tokenizer is that of data.corpus"),
    (f"{TITANS} --training.mixed_precision_param float32", "Set training.precision instead"),
    (f"{TITANS} --debug.spmd_typechecking", "no types to check"),
    (f"{TITANS} {PIPELINE}_schedule ZBVZeroBubble", NO_ZERO_BUBBLE),
    (f"{TITANS} {PIPELINE}_microbatch_size 8", "cannot run 1 micro-batch(es)."),
    (f"{TITANS} --mixer.condition softmax --mixer.n_basis 8", "no layer reads it"),
    ("--module interdomain.titan --config wrong.toml", "must be int"),
    (f"{OURS} --checkpoint.load_only", "no effect in our trainer"),
    (f"{OWN} --training.dtype bfloat16", "Parameters are float32"),
    (f"{OWN} --parallelism.context_parallel_load_balancer ptrr", "needs contiguous pieces"),
]


def test_what_torchtitan_0_3_does_not_honour_is_refused(new, corpus, tmp_path):
    toml_of(tmp_path / "run.toml", data__corpus=str(corpus), job__dump_folder=str(tmp_path))
    toml_of(tmp_path / "wrong.toml", parallelism__pipeline_parallel_microbatch_size="two")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([os.environ[TITAN03], env["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.titan.refused_0_3"]
    command += [given for given, _ in REFUSED]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    for given, message in REFUSED:
        _, _, answer = said.partition(f"> {given}")
        assert message in answer.partition(" > --")[0], given
