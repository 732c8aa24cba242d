"""Every combination of the axes on 2 and 4 ranks, and features of a run under each axis, against one rank. By request:

INTERDOMAIN_MATRIX=1 ./launch.sh test tests/matrix -n 0        (a quarter of an hour)

The same pairs of axes under TorchTitan 0.3.0's own trainer: -k titan_0_3 alone takes five minutes.
"""

import itertools
import math
import multiprocessing
import os

import pytest

from ..ranks import forks
from ..titan.runs import AXES, TABLES, Runs, assert_same_run, read_runs, settings_of
from ..titan.test_spec_0_3 import TITAN03, entry_arguments

pytestmark = pytest.mark.skipif(
    "INTERDOMAIN_MATRIX" not in os.environ,
    reason="a quarter of an hour: by request, with INTERDOMAIN_MATRIX=1",
)

EVERY = settings_of({"like": ["every"]}, TABLES["groups"])
ONE_RANK = {"training__local_batch_size": 8}
FEATURES = read_runs("features")
FEATURES_OF_TITAN_03 = ("hybrid", "documents", "compiled", "checkpointed", "s4d")
PAIRS = ("context tensor", "tensor pipeline", "context pipeline")


def degrees_of(degrees):
    return {f"parallelism__{AXES[axis]}_degree": degree for axis, degree in degrees.items()}


def combinations():
    """Returns {name: degrees} of all axes on 2 and on 4 ranks, and of one combination on 8."""
    named = {}
    for degrees in itertools.product((1, 2, 4), repeat=len(AXES)):
        ranks = math.prod(degrees)
        if ranks in (2, 4):
            used = {axis: n for axis, n in zip(AXES, degrees, strict=True) if n > 1}
            named[f"{ranks} {used}"] = used
    named["8 pipeline, context, tensor"] = {"pipeline": 2, "context": 2, "tensor": 2}
    return named


COMBINATIONS = combinations()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, short):
    runs = Runs(tmp_path_factory.mktemp("matrix"), {"text": corpus, "short": short}, forks())
    runs.add("1 one", **EVERY)
    for feature, settings in FEATURES.items():
        runs.add(f"1 {feature}", corpus="short", **(EVERY | settings | ONE_RANK))
    before = "1 one"
    for name, degrees in COMBINATIONS.items():
        settings = {"same_as": "1 one", **EVERY, **degrees_of(degrees)}
        runs.add(name, **settings)
        runs.add(f"{name} after another", of=(before, 2), **settings)
        runs.add(f"1 after {name}", same_as="1 one", of=(name, 2), **EVERY)
        before = name
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def titan_03(runs, tmp_path_factory):
    """Runs under TorchTitan 0.3.0's own trainer."""
    if TITAN03 not in os.environ:
        pytest.skip(f"{TITAN03} names no folder with TorchTitan 0.3.0")
    folder = tmp_path_factory.mktemp("titan03")
    spawn = multiprocessing.get_context("spawn")
    new = Runs(folder, runs.corpora, spawn, [os.environ[TITAN03]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNS_OF_TITAN03", str(folder))
        yield new
        new.end()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination(runs, name):
    """It begins with the same bits and computes what one rank does. It continues a checkpoint of the combination before it,
    and one rank continues its own."""
    for run in (name, f"{name} after another", f"1 after {name}"):
        assert_same_run(runs, run)


def check_titan_03(new, runs, name, same_as, degrees, **settings):
    """Checks a run of TorchTitan 0.3.0's entry. It does not validate: more data ranks would read other windows."""
    given = EVERY | {"validation__enable": False} | degrees_of(degrees) | settings
    new.add(name, same_as=same_as, stock=True, **given)
    settings = new.settings[name]
    if "pipeline" in degrees:
        # TorchTitan divides a local batch into its micro-batches.
        microbatch = settings["training__local_batch_size"]
        settings["parallelism__pipeline_parallel_microbatch_size"] = microbatch
        settings["training__local_batch_size"] = 4 * microbatch
        settings["validation__local_batch_size"] = 4 * microbatch
    new.jobs[name]["args"] = entry_arguments(new, name)
    assert_same_run(new, name, runs)


@pytest.mark.parametrize(
    "name", [name for name, degrees in COMBINATIONS.items() if degrees.get("pipeline") != 4]
)
def test_every_combination_titan_0_3(runs, titan_03, name):
    check_titan_03(titan_03, runs, name, "1 one", COMBINATIONS[name])


@pytest.mark.parametrize("feature", FEATURES_OF_TITAN_03)
@pytest.mark.parametrize("axes", PAIRS)
def test_features_titan_0_3(runs, titan_03, axes, feature):
    degrees = dict.fromkeys(axes.split(), 2)
    settings = {"corpus": "short", **FEATURES[feature]}
    check_titan_03(titan_03, runs, f"4 {axes}, {feature}", f"1 {feature}", degrees, **settings)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("axes", ["context", "tensor", "pipeline", *PAIRS])
def test_features_under_every_axis(runs, axes, feature):
    degrees = dict.fromkeys(axes.split(), 2)
    if "pipeline" not in degrees and feature in ("GPipe", "Interleaved1F1B"):
        pytest.skip("a schedule of pipelines")
    name = f"{2 ** len(degrees)} {axes}, {feature}"
    settings = EVERY | degrees_of(degrees) | FEATURES[feature]
    runs.add(name, corpus="short", same_as=f"1 {feature}", **settings)
    assert_same_run(runs, name)


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_generated_code_from_the_cache_of_an_earlier_start(axis, runs):
    """Ranks share a cache of compiled code on the disk: what was compiled for one must not be run by another."""
    inductor = FEATURES["compiled"] | {"compile__backend": "inductor"}
    for start in ("first", "second"):
        name = f"2 {axis}, inductor, {start} start"
        runs.add(name, same_as="1 one", **EVERY, **degrees_of({axis: 2}), **inductor)
        runs.end()  # each start is one of new processes
        assert_same_run(runs, name)
