"""Small runs by name, of which the first word is the number of ranks. None begins before a test asks for what it saw."""

import contextlib
import ctypes
import os
import re
import resource
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.run as torch_run

from interdomain.checkpoint.index import read_tensors, tensor_index
from interdomain.checkpoint.step_folder import finished_steps
from interdomain.titan.settings.job_config import read_job_config
from interdomain.tools._start import torchrun

from ..ranks import Ranks, environment, forks
from . import driver

TINY = Path(__file__).parent / "tiny.toml"
PR_SET_CHILD_SUBREAPER = 36  # Linux: orphans become children of this process
AXES = {  # as the plan calls them, outermost first: their settings
    "pipeline": "pipeline_parallel",
    "replicas": "data_parallel_replicate",
    "shards": "data_parallel_shard",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}


def flags(corpus, folder, toml=TINY, **settings):
    """The entry's command line for the tiny run: `training__steps=3` becomes --training.steps 3."""
    given = {"data.corpus": corpus, "job.dump_folder": folder}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    arguments = ["--job.config_file", str(toml)]
    for name, value in given.items():
        section, _, field = name.partition(".")
        if (
            isinstance(value, bool) and section != "mixer"
        ):  # [mixer]'s switches have three values: unset is None
            arguments.append(f"--{section}.{'' if value else 'no-'}{field}")
        else:
            arguments += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return arguments


def parse(given="", corpus="corpus", toml=TINY):
    """The configuration of the tiny run with these flags."""
    return read_job_config([*flags(corpus, "folder", toml), *given.split()])


class Forked:
    """subprocess.Popen of torchrun, whose process and ranks are forks of one that has imported what they need."""

    def __init__(self, arguments, env):
        self.pid = os.fork()
        if not self.pid:
            os.environ |= env
            torch_run.main(arguments)
            os._exit(0)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def be_torchrun(output, arguments, largest):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    with mock.patch.object(torchrun, "subprocess", SimpleNamespace(Popen=Forked)):
        status = torchrun.run(arguments, torchrun.ELASTIC | environment())
    with contextlib.suppress(ChildProcessError):
        while True:  # a rank that has ended counts as alive until someone waits for it
            os.wait()
    sys.exit(status)


def run_disturbed(plan, restarts, *flags, largest=resource.RLIM_INFINITY):
    """(exit status, output) of torchrun on two ranks, when all its processes have ended.

    plan: of disturbed.py, for each start. largest: bytes of a file.
    """
    options = [
        "--standalone",
        "--nproc-per-node=2",
        "--run-path",
        "--start-method=fork",
        "--local-ranks-filter=0",
    ]
    program = [str(Path(__file__).parent / "disturbed.py"), str(plan), *flags]
    ours, theirs = forks().Pipe(duplex=False)
    arguments = [*options, f"--max-restarts={restarts}", *program]
    process = forks().Process(target=be_torchrun, args=(theirs, arguments, largest))
    process.start()
    theirs.close()
    with open(os.dup(ours.fileno())) as output:
        said = output.read()
    process.join()
    return process.exitcode, said


def settings_of(table, groups):
    """A table of runs.toml, or a part of it, as arguments of `Runs.add`."""
    settings = {}
    for group in table.get("like", ()):
        settings |= settings_of(groups[group], groups)
    for name, value in table.items():
        if name == "like":
            continue
        if isinstance(value, dict) and name != "spoil":
            settings |= {f"{name}__{field}": of_field for field, of_field in value.items()}
        else:
            settings[name] = value
    return settings


TABLES = tomllib.loads((Path(__file__).parent / "runs.toml").read_text())


def read_runs(table):
    """{name: arguments of `Runs.add`} of a table of runs.toml."""
    return {name: settings_of(run, TABLES["groups"]) for name, run in TABLES[table].items()}


RUNS = read_runs("runs")


def batches(ranks, settings):
    """Sizes for eight sequences in a step, which a pipeline gets in four micro-batches."""
    axes = ("pipeline", "context", "tensor")
    pipeline, context, tensor = (
        settings.get(f"parallelism__{AXES[axis]}_degree", 1) for axis in axes
    )
    local = 8 * pipeline * context * tensor // ranks
    if pipeline > 1:
        local //= 4
    return {"training__local_batch_size": local, "validation__local_batch_size": local}


class Runs:
    """Records of runs, on processes that are started by number.

    Args:
        corpora: folders by name.
        context, path: of Ranks.
    """

    def __init__(self, folder, corpora, context, path=()):
        self.folder, self.corpora, self.context, self.path = folder, corpora, context, path
        self.jobs, self.settings, self.outcomes, self.started = {}, {}, {}, {}

    def add(self, name, **given):
        """given: settings of tiny.toml or of the file `toml`, written section__name, and what runs.toml lists beside them."""
        job = {
            "probes": [],
            "spoil": None,
            "stops": False,
            "stock": False,
            "output": str(self.folder / name),
        }
        others = (
            {"corpus": "text", "toml": TINY, "of": None, "same_as": None, "near": 1e-5}
            | job
            | given
        )
        settings = batches(int(name.split()[0]), given)
        for setting in given:
            if "__" in setting:
                settings[setting] = others.pop(setting)
        corpus = self.corpora.get(others["corpus"], others["corpus"])
        arguments = flags(corpus, self.folder / name, others["toml"], **settings)
        if others["stock"]:
            arguments += ["--job.custom_config_module", "interdomain.titan"]
        self.settings[name] = settings
        self.jobs[name] = others | {"args": arguments}

    def said(self, name):
        """The output of a run, which is over. Raises: AssertionError, at each call, if it failed."""
        if name not in self.outcomes:
            if of := self.jobs[name]["of"]:
                continue_from(self.checkpoint(*of), self.folder / name)
            try:
                self.outcomes[name] = self.ranks(int(name.split()[0])).run(self.jobs[name])
            except AssertionError as failure:
                self.outcomes[name] = failure
        if isinstance(self.outcomes[name], AssertionError):
            raise self.outcomes[name]
        return self.outcomes[name]

    def ranks(self, n):
        if n not in self.started or self.started[n].ended:
            log = self.folder / f"log-{n}-{len(self.outcomes)}.txt"
            self.started[n] = Ranks(driver.serve, n, log, self.context, self.path)
        return self.started[n]

    def end(self):
        for one in self.started.values():
            one.end()

    def at(self, name):
        """The folder that a run wrote."""
        self.said(name)
        return self.folder / name

    def checkpoint(self, name, step):
        return self.at(name) / "checkpoint" / f"step-{step}"

    def seen(self, name, rank=0):
        self.said(name)
        return torch.load(self.folder / f"{name}.rank{rank}.pt", weights_only=False)

    def every(self, name):
        """By rank."""
        return [self.seen(name, rank) for rank in range(int(name.split()[0]))]

    def whole(self, name, what):
        """Tensors of all parameters, wherever a pipeline has them: "initial" or "gradients"."""
        return {n: x for seen in self.every(name) for n, x in seen[what].items()}

    def samples(self, name):
        """Hashes of all samples of a run, by step: sorted, for ranks share a step's samples in their own order. Those that
        share sequences, heads or layers read the same."""

        def degree(axis):
            return self.settings[name].get(f"parallelism__{AXES[axis]}_degree", 1)

        every = self.every(name)
        together, stages = degree("context") * degree("tensor"), degree("pipeline")
        data, ranks = len(every) // together // stages, {}
        for rank, seen in enumerate(every):
            assert ranks.setdefault(rank // together % data, seen["samples"]) == seen["samples"]
        return [sorted(h for samples in ranks.values() for h in samples[step]) for step in ranks[0]]


def continue_from(checkpoint, folder):
    """A folder as if its run, which saved this checkpoint, was killed in a later save."""
    shutil.copytree(checkpoint, folder / "checkpoint" / checkpoint.name)
    of_all_checkpoints = (
        checkpoint.parent.parent / "interdomain.json"
    )  # TorchTitan's trainer writes it
    if of_all_checkpoints.exists():
        shutil.copy(of_all_checkpoints, folder)
    (folder / "checkpoint" / "step-5").mkdir(exist_ok=True)


def assert_same_run(runs, name, others=None):
    """At every step of a run, on every rank: losses, the gradients' norm, samples and validation are those of the run that it
    must be the same as, and so are its checkpoints. Where it begins at the beginning: the initial bits, and the whole
    gradients, for losses alone hide a factor. Sums of float32 are made in another order: the largest difference seen is 4e-7.

    others: where the reference is, if elsewhere.
    """
    others = others or runs
    job = runs.jobs[name]
    reference, tolerance = job["same_as"], job["near"]
    theirs = others.seen(reference)
    every = runs.every(name)
    if job["stock"]:
        every = every[-1:]  # TorchTitan's pipeline has the loss on its last stage alone
    steps = list(every[0]["log"])
    first = job["of"][1] + 1 if job["of"] else steps[0]
    assert steps == list(range(first, runs.settings[name].get("training__steps", 6) + 1))
    for step, scalars in every[0]["log"].items():
        for quantity in ("loss", "grad_norm", "n_tokens_seen"):
            assert {seen["log"][step][quantity] for seen in every} == {scalars[quantity]}
            assert scalars[quantity] == pytest.approx(
                theirs["log"][step][quantity], rel=tolerance
            ), (step, quantity)
        # Of the piece of the batch with the highest loss, if several ranks have a piece.
        assert scalars["loss_metrics/global_max_loss"] >= scalars["loss"] * (1 - tolerance)
    samples = dict(zip(theirs["log"], others.samples(reference), strict=True))
    assert runs.samples(name) == [samples[step] for step in steps]
    validated = every[-1]["validation"]
    assert bool(validated) == runs.settings[name].get("validation__enable", False)
    for step in validated.keys() & theirs["validation"].keys():
        for tag, expected in theirs["validation"][step].items():
            if re.match(
                "loss" if job["stock"] else "loss|validation_position|validation_metrics/accuracy",
                tag,
            ):
                near = {"abs": 0.011} if "accuracy" in tag else {"rel": tolerance}  # of few answers
                assert validated[step][tag] == pytest.approx(expected, **near), (step, tag)
    if first == 1:
        assert runs.whole(name, "initial") == theirs["initial"]
        if "gradients" in every[0]:
            assert_close(
                runs.whole(name, "gradients"),
                others.whole(reference, "gradients"),
                max(1e-5, tolerance),
            )
    # By the same names, weights and optimizer state, whole: what `convert` reads and every topology continues from.
    ours, reference = (
        finished_steps(one / "checkpoint") for one in (runs.at(name), others.at(reference))
    )
    for step in ours.keys() & reference.keys() & {*steps}:
        assert_close(*tensors_of(ours[step], reference[step]), max(1e-4, 10 * tolerance))


def tensors_of(*checkpoints):
    """All tensors of each, by name: weights and the optimizer's state; of the same names."""
    indices = [tensor_index(folder) for folder in checkpoints]
    assert "optimizer.state.output.weight.exp_avg" in indices[0]
    assert all(index.keys() == indices[0].keys() for index in indices)
    return [
        read_tensors(folder, list(index))
        for folder, index in zip(checkpoints, indices, strict=True)
    ]


def assert_same_tensors(ours, reference):
    """Compare two checkpoints, to the bit."""
    ours, reference = tensors_of(ours, reference)
    assert not [name for name in reference if not torch.equal(ours[name], reference[name])]


def assert_close(ours, reference, tolerance):
    assert ours.keys() == reference.keys()
    for name, x in reference.items():
        difference = torch.linalg.vector_norm((ours[name] - x).float())
        assert difference <= tolerance * torch.linalg.vector_norm(x.float()), name
