"""Every combination of the axes on 2 and 4 ranks, and features of a run under each axis, against one rank. By request:

INTERDOMAIN_MATRIX=matrix.md ./launch.sh test tests/matrix -n 0        (the table is written there; a quarter of an hour)

The same pairs of axes under TorchTitan 0.3.0's own trainer: -k titan_0_3 alone takes five minutes.
"""

import itertools
import math
import multiprocessing
import os
import re
import signal
from pathlib import Path

import pytest

from interdomain.tools import compare_runs

from ..ranks import forks
from ..titan.runs import AXES, COMPILED, INTERLEAVED, Runs, parallel, start_launcher
from ..titan.test_random_kills import children
from ..titan.test_spec import toml_of

TABLE = os.environ.get("INTERDOMAIN_MATRIX", "")
pytestmark = pytest.mark.skipif(not TABLE, reason="a quarter of an hour: by request, with INTERDOMAIN_MATRIX=matrix.md")

EVERY = {"validation__enable": True, "training__steps": 4, "checkpoint__enable": True, "checkpoint__interval": 2}
FEATURES = {
    "softmax": {"mixer__condition": "softmax"},
    "s4d": {"mixer__condition": "s4d"},
    "single-query, grouped": {"mixer__condition": "single-query", "mixer__n_kv_heads": 2, "mixer__output_gate": True},
    "hybrid": {"mixer__softmax_every": 2, "mixer__window": 16},
    "rff": {"mixer__feature_map": "rff"},
    "documents": {"data__reset_state_at_documents": True},
    "accumulated": {"training__local_batch_size": 1, "validation__local_batch_size": 1},
    "compiled": COMPILED,
    "checkpointed": {"activation_checkpoint__mode": "full"},
    "GPipe": {"parallelism__pipeline_parallel_schedule": "GPipe"},
    "Interleaved1F1B": INTERLEAVED,
    "bf16": {"training__precision": "bf16"},
    "bf16-products": {"training__precision": "bf16-products"},
}
SCHEDULES = ("GPipe", "Interleaved1F1B")
TOLERANCE = {"bf16": 2e-2, "bf16-products": 2e-2}  # of losses and gradients; 1e-5 for the others


def combinations(ranks):
    """All degrees of all axes whose product is the number of ranks: {axis: degree}, of those above 1."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for degrees in itertools.product(divisors, repeat=len(AXES)):
        found = {axis: n for axis, n in zip(AXES, degrees, strict=True) if n > 1}
        if math.prod(degrees) == ranks:
            yield found


def continued(runs, name, source, **settings):
    """A run that begins where another had saved its second step, with everything."""
    path = runs.checkpoint(source, 2)
    runs.add(name, checkpoint__initial_load_path=path, checkpoint__initial_load_model_only=False, **settings, **EVERY)


def worst(runs, name, of):
    """The largest relative difference by quantity, of the steps that a run made; and None for what it was not asked."""
    every, theirs, found = runs.every(name), runs.seen(of), {}
    ours = every[0]
    for quantity in ("loss", "grad_norm"):
        found[quantity] = max(
            abs(log[quantity] / theirs["log"][step][quantity] - 1) for step, log in ours["log"].items()
        )
    validated = ours["validation"].items()
    found["validation"] = max(abs(seen["loss"] / theirs["validation"][step]["loss"] - 1) for step, seen in validated)
    if "gradients" in ours:
        assert runs.whole(name, "initial") == theirs["initial"]
        gradients = runs.whole(name, "gradients")
        assert gradients.keys() == theirs["gradients"].keys()
        pairs = ((gradients[n], g) for n, g in theirs["gradients"].items())
        found["gradients"] = max(((x - g).norm() / g.norm()).item() for x, g in pairs)
        assert runs.samples(name) == runs.samples(of)
    for seen in every:  # every rank says the same
        assert all(seen["log"][step][q] == log[q] for step, log in ours["log"].items() for q in ("loss", "grad_norm"))
    return found


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    columns = ("loss", "grad_norm", "validation", "gradients")
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, found in rows:
        lines.append(f"| {name} | " + " | ".join(f"{found[c]:.0e}" if c in found else "" for c in columns) + " |")
    Path(TABLE).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, short):
    runs = Runs(tmp_path_factory.mktemp("matrix"), {"text": corpus, "short": short}, forks())
    runs.add("1 one", **parallel(), **EVERY, probes=["gradients"])
    for feature, settings in FEATURES.items():
        given = {**parallel(), **EVERY, **settings, "training__local_batch_size": 8}
        runs.add(f"1 {feature}", data="short", **given, probes=["gradients"])
    yield runs
    runs.end()


def check(table, name, found):
    table.append((name, found))
    assert max(found.values()) < 1e-5, (name, found)


def test_every_combination(runs, table):
    """Each begins with the same bits and computes what one rank does. It goes on from a checkpoint of the one before it in the
    table, and one rank from its own."""
    before, every = "1 one", [(ranks, degrees) for ranks in (2, 4) for degrees in combinations(ranks)]
    for ranks, degrees in (*every, (8, {"pipeline": 2, "context": 2, "tensor": 2})):
        name = f"{ranks} " + " x ".join(f"{axis} {n}" for axis, n in degrees.items())
        runs.add(name, **parallel(**degrees), **EVERY, probes=["gradients"])
        continued(runs, f"{name}, continued from {before}", before, **parallel(**degrees))
        continued(runs, f"1 one rank, continued from {name}", name, **parallel())
        for run in (name, f"{name}, continued from {before}", f"1 one rank, continued from {name}"):
            check(table, run, worst(runs, run, "1 one"))
        before = name


# For TorchTitan 0.3.0's trainer, by the axes of a run.
OF_TITAN_03 = {
    "pipeline": {
        "training__local_batch_size": 8,
        "validation__local_batch_size": 8,
        "parallelism__pipeline_parallel_microbatch_size": 2,
    },
    "features": ("hybrid", "documents", "compiled", "checkpointed", "s4d"),
}


@pytest.fixture(scope="module")
def titan_03(runs, tmp_path_factory):
    """Runs under TorchTitan 0.3.0's own trainer."""
    if not os.environ.get("INTERDOMAIN_TITAN03"):
        pytest.skip("INTERDOMAIN_TITAN03 names no folder with TorchTitan 0.3.0")
    spawn, folder = multiprocessing.get_context("spawn"), tmp_path_factory.mktemp("titan03")
    new = Runs(folder, runs.corpora, spawn, [os.environ["INTERDOMAIN_TITAN03"]])
    yield new
    new.end()


def add_titan_03(new, name, degrees, settings, data="text"):
    """A run of TorchTitan 0.3.0's entry, whose settings all stand in its file."""
    given = {**parallel(**degrees), **EVERY, **settings, "data__corpus": str(new.corpora[data])}
    if "pipeline" in degrees:
        data_ranks = degrees.get("replicas", 1) * degrees.get("shards", 1)
        each = {setting: n // data_ranks for setting, n in OF_TITAN_03["pipeline"].items()}
        given |= each
    file = toml_of(new.folder / f"{name}.toml", **given)
    new.add(name, **given, data=data, probes=["gradients"], stock=True)
    new.jobs[name]["args"] = ["--module", "interdomain.titan", "--config", str(file)]
    new.jobs[name]["args"] += ["--dump_folder", str(new.folder / name)]


def worst_03(new, runs, name, of):
    """The largest relative difference to a run of our trainer, by quantity. More data ranks validate on other windows."""
    seen, theirs = new.every(name)[-1], runs.seen(of)
    found = {}
    for quantity in ("loss", "grad_norm"):
        differences = [abs(log[quantity] / theirs["log"][step][quantity] - 1) for step, log in seen["log"].items()]
        found[quantity] = max(differences)
    gradients = new.whole(name, "gradients")
    assert gradients.keys() == theirs["gradients"].keys()
    found["gradients"] = 0.0
    for parameter, gradient in theirs["gradients"].items():
        difference = ((gradients[parameter] - gradient).norm() / gradient.norm()).item()
        found["gradients"] = max(found["gradients"], difference)
    assert new.samples(name) == runs.samples(of)
    return found


def test_every_combination_titan_0_3(runs, titan_03, table):
    """TorchTitan 0.3.0's trainer on every combination of axes on 2 and 4 ranks, and on 8."""
    every = [(ranks, degrees) for ranks in (2, 4) for degrees in combinations(ranks) if degrees.get("pipeline") != 4]
    for ranks, degrees in (*every, (8, {"pipeline": 2, "context": 2, "tensor": 2})):
        name = f"{ranks} TorchTitan 0.3.0 " + " x ".join(f"{axis} {n}" for axis, n in degrees.items())
        add_titan_03(titan_03, name, degrees, {})
        check(table, name, worst_03(titan_03, runs, name, "1 one"))


@pytest.mark.parametrize("feature", OF_TITAN_03["features"])
def test_features_titan_0_3(runs, titan_03, table, feature):
    """Features of a run under pairs of axes."""
    for axes in ("context tensor", "tensor pipeline", "context pipeline"):
        name = f"4 TorchTitan 0.3.0 {axes}, {feature}"
        add_titan_03(titan_03, name, dict.fromkeys(axes.split(), 2), FEATURES[feature], data="short")
        check(table, name, worst_03(titan_03, runs, name, f"1 {feature}"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_features_under_every_axis(ranks, runs, table):
    chosen = {2: ["context", "tensor", "pipeline"], 4: ["context tensor", "tensor pipeline", "context pipeline"]}[ranks]
    cases = [
        (axes, feature) for axes in chosen for feature in FEATURES if "pipeline" in axes or feature not in SCHEDULES
    ]
    found = {}
    for axes, feature in cases:
        settings = {**parallel(**dict.fromkeys(axes.split(), 2)), **EVERY, **FEATURES[feature]}
        runs.add(f"{ranks} {axes}, {feature}", data="short", **settings, probes=["gradients"])
        found[axes, feature] = worst(runs, f"{ranks} {axes}, {feature}", f"1 {feature}")
    table.extend(
        (f"{axes.replace(' ', ' 2 x ')} 2, {feature}", differences) for (axes, feature), differences in found.items()
    )
    bad = {case: seen for case, seen in found.items() if max(seen.values()) >= TOLERANCE.get(case[1], 1e-5)}
    assert not bad


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_generated_code_from_the_cache_of_an_earlier_start(axis, runs, table):
    """Ranks share a cache of compiled code on the disk: what was compiled for one must not be run by another."""
    for start in ("first", "second"):
        name, inductor = f"2 {axis}, inductor, {start} start", COMPILED | {"compile__backend": "inductor"}
        runs.add(name, **parallel(**{axis: 2}), **EVERY, **inductor, probes=["gradients"])
        runs.end()  # each start is one of new processes
        check(table, name, worst(runs, name, "1 one"))


def test_killed_and_continued_on_other_ranks(tmp_path, corpus):
    """Four starts of one run, three of them killed: its losses are those of a run on one rank that nobody disturbed."""
    longer = {"training__steps": 40, "validation__enable": False, "metrics__enable_tensorboard": True}

    def start(folder, **degrees):
        once = ["--ranks", math.prod(degrees.values()), "--max-restarts", 0]
        return start_launcher(corpus, tmp_path / folder, *once, **EVERY | longer | parallel(**degrees))

    starts = [{"context": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2}, {"shards": 2, "pipeline": 2}]
    for until, degrees in zip((10, 20, 30), starts, strict=True):
        with start("killed", **degrees) as run:
            for line in run.stdout:
                if re.search(rf"step: +{until} ", line):
                    agent = children(run.pid)[0]
                    os.kill(children(agent)[-1], signal.SIGKILL)
        assert run.returncode not in (0, None)
    for folder in ("killed", "alone"):
        with start(folder) as run:
            said = run.stdout.read()
        assert run.returncode == 0, said[-3000:]
    assert compare_runs.main([str(tmp_path / "killed"), str(tmp_path / "alone"), "--tolerance", "1e-3"]) == 0
