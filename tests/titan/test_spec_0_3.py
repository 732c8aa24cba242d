"""TorchTitan 0.3.0: its own trainer on every axis, a configuration of the user's own, and our trainer by its entry."""

import json
import multiprocessing
import os
import subprocess
import sys

import pytest
from torch.distributed import fsdp

from interdomain.files.distributed_checkpoint import milestones
from interdomain.removed import NO_ZERO_BUBBLE
from interdomain.tools import convert

from ..common import REPOSITORY
from ..ranks import environment
from .runs import (
    ANSWERS,
    COMPILED,
    FULL,
    GRADIENTS,
    HYBRID,
    INTERLEAVED,
    SAVED,
    SELECTIVE,
    Runs,
    assert_same_run,
    continue_from,
    parallel,
    steps,
)
from .test_spec import MICRO, STEPS, TOKENS, TOLERANCE, WINDOWS, own_data, toml_of

pytestmark = pytest.mark.e2e

TITAN03 = "INTERDOMAIN_TITAN03"  # a folder with TorchTitan 0.3.0; `./launch.sh test` makes and names it
TITAN_03 = pytest.mark.slow
OURS_03 = {"2 context": "1 layers", "2 tensor": "1 layers", "2 pipeline": "1 layers", "2 continued": "2 text"}
WHOLE_WINDOWS = {"validation__local_batch_size": 8}
TRACES = {"profiling__enable_profiling": True, "profiling__profile_freq": 3, "profiling__profiler_warmup": 1}
PIPELINE_03 = parallel(pipeline=2) | MICRO
REFERENCES_03 = {"1 answers again": ANSWERS | STEPS | GRADIENTS}
STOCK_03 = {  # runs of TorchTitan 0.3.0's trainer: their settings, and ours that do the same
    "2 stock shards": (WINDOWS | SAVED | TRACES, "2 text"),
    "2 stock replicas": (parallel(replicas=2), "2 text"),
    "2 stock compiled": (COMPILED, "2 text"),
    "2 stock context": (parallel(context=2) | WINDOWS | SAVED, "2 text"),
    "2 stock context documents": (parallel(context=2) | HYBRID, "1 layers"),
    "2 stock tensor": (parallel(tensor=2) | HYBRID | SELECTIVE, "1 layers"),
    "2 stock pipeline": (PIPELINE_03 | HYBRID | INTERLEAVED | FULL, "1 layers"),
    "2 stock pipeline answers": (PIPELINE_03 | ANSWERS | WINDOWS | WHOLE_WINDOWS, "1 answers again"),
}
CONTINUED_03 = {  # of a run of another axis: it goes on from that run's third step
    "2 stock tensor continued": (parallel(tensor=2) | SAVED, "2 stock context"),
    "2 stock pipeline continued": (PIPELINE_03 | SAVED, "2 stock tensor continued"),
}


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
    for axis in ("context", "tensor", "pipeline"):
        new.add(f"2 {axis}", **parallel(**{axis: 2}) | HYBRID | GRADIENTS | steps(2))
    new.add("2 continued", **SAVED, training__steps=5, checkpoint__keep_every=2)
    for name, (settings, _) in STOCK_03.items():
        add_stock_03(new, runs, name, settings, 3)
    for length, (name, (settings, _)) in enumerate(CONTINUED_03.items(), 4):
        add_stock_03(new, runs, name, settings, length)
    add_stock_03(new, runs, "2 entered", parallel(tensor=2) | TRACES, 3, "interdomain.titan.trainer")
    add_stock_03(new, runs, "1 seed", SAVED, 3)
    new.jobs["1 seed"]["args"].append("--checkpoint.create_seed_checkpoint")
    add_stock_03(new, runs, "2 stock seeded", parallel(tensor=2) | SAVED, 3)
    os.environ["OWN_DATA"] = str(folder)
    own_data(folder)
    for axis in ("context", "tensor", "pipeline"):
        new.add(f"2 own {axis}", **steps(3), stock=True)
        args = [
            "--module",
            "tests.titan.own_config",
            "--config",
            "tiny",
            "--dump_folder",
            str(folder / f"2 own {axis}"),
        ]
        args += [f"--parallelism.{axis}_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "4"]
        new.jobs[f"2 own {axis}"]["args"] = args
    # Replaces a component that the model does not have: TorchTitan warns.
    new.jobs["2 own tensor"]["args"] += ["--override.imports", "torchtitan.overrides.fused_swiglu.fused_swiglu"]
    yield new
    new.end()
    del os.environ["RUNS_OF_TITAN03"], os.environ["OWN_DATA"]


def add_stock_03(new, runs, name, settings, length, module="interdomain.titan"):
    """Add a run of TorchTitan 0.3.0's entry on a TOML file with these settings. Flags set its length, data and layers."""
    given = {"training__local_batch_size": 4} | settings
    corpus, n_layers = runs.corpora[given.pop("data", "text")], given.pop("model__n_layers", 2)
    given |= {"model__n_layers": 1}
    file = toml_of(new.folder / f"{name}.toml", job__dump_folder="elsewhere", **given, **TOKENS)
    new.add(name, **STEPS | GRADIENTS | settings | steps(length), stock=True)
    args = ["--module", module, "--config", str(file), "--dump_folder", f"$RUNS_OF_TITAN03/{name}"]
    args += ["--training.steps", str(length), "--lr_scheduler.warmup_steps", "2"]
    new.jobs[name]["args"] = [*args, "--data.corpus", str(corpus), "--model.n_layers", str(n_layers)]


SAME_03 = OURS_03 | {"2 entered": "2 text"} | {name: reference for name, (_, reference) in STOCK_03.items()}


@TITAN_03
@pytest.mark.parametrize(("name", "reference"), SAME_03.items())
def test_torchtitan_0_3_trains_the_same(runs, new, name, reference):
    """Our trainer on every axis, and TorchTitan's own. One run goes on from a checkpoint of 0.2.2."""
    if reference in REFERENCES_03 and reference not in runs.jobs:
        runs.add(reference, **REFERENCES_03[reference])
    if name == "2 continued":
        continue_from(runs.checkpoint("2 text", 3), new.folder / name)
    assert_same_run(new, name, reference, TOLERANCE, runs)
    assert {seconds for _, seconds in new.seen(name)["timeouts"]} == {
        100
    }  # also in groups that TorchTitan did not make
    if name == "2 continued":
        assert {*milestones(new.folder / name / "checkpoint")} == {4, 5}


@TITAN_03
def test_torchtitan_0_3_goes_on_on_another_axis(runs, new):
    """Each run saves one step more; the number of tokens seen is right, too."""
    for step, (name, (_, source)) in enumerate(CONTINUED_03.items(), 3):
        continue_from(new.checkpoint(source, step), new.folder / name)
        assert list(new.seen(name)["log"]) == [step + 1]
        assert_same_run(new, name, "2 text", TOLERANCE, runs)


@TITAN_03
def test_a_seed_checkpoint(runs, new):
    """One rank writes the initial values, and another number of ranks begins with them."""
    continue_from(new.checkpoint("1 seed", 0), new.folder / "2 stock seeded")
    assert list(new.seen("2 stock seeded")["log"]) == [1, 2, 3]
    assert_same_run(new, "2 stock seeded", "2 text", TOLERANCE, runs)


@TITAN_03
@pytest.mark.parametrize("name", ["2 stock shards", "2 entered"])
def test_traces_of_a_cpu(new, name):
    traces = new.at(name) / "profile_traces"
    assert sorted(path.name for path in traces.rglob("*.gz")) == ["rank0_trace.json.gz", "rank1_trace.json.gz"]


@TITAN_03
def test_a_configuration_of_the_users_own(new, tmp_path):
    """TorchTitan's data, optimizer, metrics and validator; the data of all axes are the same."""
    expected = new.seen("2 own tensor")
    for axis in ("context", "pipeline"):
        seen = new.every(f"2 own {axis}")[-1]
        for found, theirs in ((seen["log"], expected["log"]), (seen["validation"], expected["validation"])):
            assert [*found] == [*theirs]
            for step, scalars in theirs.items():
                assert found[step]["loss"] == pytest.approx(scalars["loss"], rel=TOLERANCE)
        assert seen["log"][3]["n_tokens_seen"] == 3 * 512
    assert convert.main([str(new.checkpoint("2 own context", 3)), "--output", str(tmp_path / "folder")]) == 0
    assert "| c4_test | 0 | 1 |" in (tmp_path / "folder" / "README.md").read_text()


REFUSED_03 = [  # flags of the TOML file's entry, and what is said
    ("--training.seq_len 62 --parallelism.context_parallel_degree 2", "wants a multiple of 4"),
    ("--parallelism.spmd_backend partial_dtensor", "only the loss of spmd_types takes"),
    ("--parallelism.expert_parallel_degree 2", "no experts"),
    ("--parallelism.context_parallel_load_balancer ptrr", "needs contiguous pieces"),
    ("--training.no-disable-cuda-graphs", "was never captured"),
    ("--training.mixed_precision_param float32", "Set training.precision instead"),
    ("--debug.spmd_typechecking", "no types to check"),
    ("--profiler.enable_memory_snapshot", "needs a GPU"),
    ("--hf_assets_path elsewhere", "the tokenizer is that of data.corpus"),
    (
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble",
        NO_ZERO_BUBBLE,
    ),
    ("--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 8", "a multiple of 16"),
    ("--mixer.condition softmax --mixer.n_basis 8", "no layer reads it"),
]
REFUSED_BY_OURS_03 = [
    ("--checkpoint.load_only", "no effect in our trainer"),
    ("--parallelism.pipeline_parallel_microbatch_size 4", "no effect in our trainer"),
    ("--override.imports torchtitan.overrides.fused_swiglu.fused_swiglu", "no effect in our trainer"),
]
REFUSED_OF_THE_USER_03 = [
    ("--training.dtype bfloat16", "Parameters are float32"),
    ("--parallelism.context_parallel_load_balancer ptrr", "needs contiguous pieces"),
    ("--training.seq_len 62 --parallelism.context_parallel_degree 2", "wants a multiple of 4"),
]


@TITAN_03
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
    # A setting that only TorchTitan has, with a wrong value, in the file.
    wrong = toml_of(tmp_path / "wrong.toml", parallelism__pipeline_parallel_microbatch_size="two")
    lists.append(["--module", "interdomain.titan", "--config", str(wrong)])
    expected.append("must be int")
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([os.environ[TITAN03], env["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.titan.refused_0_3", str(tmp_path / "lists.json")]
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    for given, answer, said in zip(lists, answers, expected, strict=True):
        assert said in " ".join(answer.split()), (given, answer)


@TITAN_03
def test_checkpoints_of_torchtitan_0_3_are_read(runs, new, tmp_path):
    """By `convert`, and by a run under 0.2.2."""
    saved = new.checkpoint("2 stock shards", 3)
    assert convert.main([str(saved), "--output", str(tmp_path / "folder")]) == 0
    runs.add("1 back", **SAVED, training__steps=4)
    continue_from(saved, runs.folder / "1 back")
    assert_same_run(runs, "1 back", "2 text", TOLERANCE)
