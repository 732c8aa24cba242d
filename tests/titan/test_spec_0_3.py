"""TorchTitan 0.3.0: its own trainer on every axis, a configuration of the user's own, and our trainer by its entry."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
from torch.distributed import fsdp

from interdomain.checkpoint.step_folder import milestones
from interdomain.removed import NO_ZERO_BUBBLE
from interdomain.tools import convert

from ..common import REPOSITORY
from ..ranks import environment
from .runs import Runs, assert_same_run, continue_from, read_runs
from .test_spec import TOKENS, own_data, toml_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TITAN03 = (
    "INTERDOMAIN_TITAN03"  # a folder with TorchTitan 0.3.0; `./launch.sh test` makes and names it
)
GIVEN = read_runs("titan_0_3")


@pytest.fixture(scope="module")
def new(runs, tmp_path_factory):
    """Runs under TorchTitan 0.3.0, which a process that has imported 0.2.2 cannot import."""
    if not os.environ.get(TITAN03):
        pytest.skip(f"{TITAN03} names no folder with TorchTitan 0.3.0")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("TorchTitan 0.3.0 needs a newer PyTorch")
    folder, context = tmp_path_factory.mktemp("titan03"), multiprocessing.get_context("spawn")
    os.environ["RUNS_OF_TITAN03"] = str(folder)  # a path of a flag may name a variable
    new = Runs(folder, runs.corpora, context, [os.environ[TITAN03]])
    for name, given in GIVEN.items():
        new.add(name, **given)
        if given.get("stock"):
            new.jobs[name]["args"] = entry_arguments(new, name)
    new.jobs["1 seed"]["args"].append("--checkpoint.create_seed_checkpoint")
    os.environ["OWN_DATA"] = str(folder)
    own_data(folder)
    for axis in ("context", "tensor", "pipeline"):
        name = f"2 own {axis}"
        new.add(name, training__steps=3, stock=True)
        args = (
            f"--module tests.titan.own_config --config tiny --parallelism.{axis}_parallel_degree 2"
        )
        args += " --parallelism.pipeline_parallel_microbatch_size 4 --dump_folder"
        new.jobs[name]["args"] = [*args.split(), str(folder / name)]
    # Replaces a component that the model does not have: TorchTitan warns.
    new.jobs["2 own tensor"]["args"] += [
        "--override.imports",
        "torchtitan.overrides.fused_swiglu.fused_swiglu",
    ]
    yield new
    new.end()
    del os.environ["RUNS_OF_TITAN03"], os.environ["OWN_DATA"]


def entry_arguments(new, name):
    """TorchTitan 0.3.0's entry on a TOML file with a run's settings. Flags set its length, data and layers."""
    settings = dict(new.settings[name])
    n_layers = settings.pop("model__n_layers", 2)
    steps = settings.pop("training__steps")
    file = toml_of(
        new.folder / f"{name}.toml",
        job__dump_folder="elsewhere",
        **settings,
        **TOKENS,
        model__n_layers=1,
    )
    module = "interdomain.titan.trainer" if name == "2 entered" else "interdomain.titan"
    flags = f"--module {module} --training.steps {steps} --lr_scheduler.warmup_steps 2 --model.n_layers {n_layers}"
    corpus = new.corpora[new.jobs[name]["corpus"]]
    paths = [
        "--config",
        str(file),
        "--dump_folder",
        f"$RUNS_OF_TITAN03/{name}",
        "--data.corpus",
        str(corpus),
    ]
    return [*flags.split(), *paths]


@pytest.mark.parametrize("name", [name for name in GIVEN if name != "1 seed"])
def test_torchtitan_0_3_trains_the_same(runs, new, name):
    """Our trainer on every axis, and TorchTitan's own. Runs go on from a checkpoint of 0.2.2, from one rank's initial values
    and on another axis."""
    if name == "2 continued":
        continue_from(runs.checkpoint("2 text", 3), new.folder / name)
        assert [*new.seen(name)["log"]] == [4, 5]
    assert_same_run(new, name, runs)
    timeouts = new.seen(name)["timeouts"]
    assert {seconds for _, seconds in timeouts} == {
        100
    }  # also in groups that TorchTitan did not make
    if name == "2 continued":
        assert {*milestones(new.folder / name / "checkpoint")} == {4, 5}


@pytest.mark.parametrize("name", ["2 stock shards", "2 entered"])
def test_traces_of_a_cpu(new, name):
    traces = new.at(name) / "profile_traces"
    assert sorted(path.name for path in traces.rglob("*.gz")) == [
        "rank0_trace.json.gz",
        "rank1_trace.json.gz",
    ]


def test_a_configuration_of_the_users_own(new, tmp_path):
    """TorchTitan's data, optimizer, metrics and validator; the data of all axes are the same."""
    expected = new.seen("2 own tensor")
    for axis in ("context", "pipeline"):
        seen = new.every(f"2 own {axis}")[-1]
        for what in ("log", "validation"):
            assert [*seen[what]] == [*expected[what]]
            for step, scalars in expected[what].items():
                assert seen[what][step]["loss"] == pytest.approx(scalars["loss"], rel=1e-6)
        assert seen["log"][3]["n_tokens_seen"] == 3 * 512
    assert (
        convert.main(
            [str(new.checkpoint("2 own context", 3)), "--output", str(tmp_path / "folder")]
        )
        == 0
    )
    assert "| c4_test | 0 | 1 |" in (tmp_path / "folder" / "README.md").read_text()


REFUSED_03 = [  # flags of the TOML file's entry, and what is said
    ("--parallelism.spmd_backend partial_dtensor", "only the loss of spmd_types takes"),
    ("--parallelism.expert_parallel_degree 2", "no experts"),
    ("--parallelism.context_parallel_load_balancer ptrr", "needs contiguous pieces"),
    ("--training.no-disable-cuda-graphs", "was never captured"),
    ("--training.mixed_precision_param float32", "Set training.precision instead"),
    ("--debug.spmd_typechecking", "no types to check"),
    ("--lr_scheduler.min_lr_factor 0.1", "Set lr_scheduler.min_lr instead"),
    (
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble",
        NO_ZERO_BUBBLE,
    ),
    (
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 8",
        "a multiple of 16",
    ),
    ("--mixer.condition softmax --mixer.n_basis 8", "no layer reads it"),
]
REFUSED_BY_OURS_03 = [
    ("--checkpoint.load_only", "no effect in our trainer"),
    ("--parallelism.pipeline_parallel_microbatch_size 4", "no effect in our trainer"),
    (
        "--override.imports torchtitan.overrides.fused_swiglu.fused_swiglu",
        "no effect in our trainer",
    ),
]
REFUSED_OF_THE_USER_03 = [
    ("--training.dtype bfloat16", "Parameters are float32"),
    ("--parallelism.context_parallel_load_balancer ptrr", "needs contiguous pieces"),
]


def test_what_torchtitan_0_3_does_not_honour_is_refused(new, corpus, tmp_path):
    file = toml_of(tmp_path / "run.toml", data__corpus=str(corpus), job__dump_folder=str(tmp_path))
    entries = {
        ("interdomain.titan", str(file)): REFUSED_03,
        ("interdomain.titan.trainer", str(file)): REFUSED_BY_OURS_03,
        ("tests.titan.own_config", "tiny"): REFUSED_OF_THE_USER_03,
    }
    lists, expected = [], []
    for (module, config), refused in entries.items():
        for given, said in refused:
            lists.append(["--module", module, "--config", config, *given.split()])
            expected.append(said)
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([os.environ[TITAN03], env["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.titan.refused_0_3", str(tmp_path / "lists.json")]
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    for given, answer, said in zip(lists, answers, expected, strict=True):
        assert said in " ".join(answer.split()), (given, answer)


def test_checkpoints_of_torchtitan_0_3_are_read(runs, new, tmp_path):
    """By `convert`, and by a run under 0.2.2."""
    saved = new.checkpoint("2 stock shards", 3)
    assert convert.main([str(saved), "--output", str(tmp_path / "folder")]) == 0
    runs.add("1 back", same_as="2 text", near=1e-6, checkpoint__enable=True, training__steps=4)
    continue_from(saved, runs.folder / "1 back")
    assert_same_run(runs, "1 back")
