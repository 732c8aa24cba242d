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
# The parallel axes, outermost first, and the names of their settings.
AXES = {
    "pipeline": "pipeline_parallel",
    "replicas": "data_parallel_replicate",
    "shards": "data_parallel_shard",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}


def flags(corpus, folder, toml=TINY, **settings):
    """Returns the entry's command line for the tiny run: `training__steps=3` becomes --training.steps 3.

    A switch of [mixer] may be unset, and so has three values: its value is a string, "True" or "False".
    """
    arguments = ["--job.config_file", str(toml)]
    arguments += ["--data.corpus", str(corpus), "--job.dump_folder", str(folder)]
    for name, value in settings.items():
        section, field = name.split("__")
        if isinstance(value, bool):
            switch = field if value else f"no-{field}"
            arguments.append(f"--{section}.{switch}")
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{section}.{field}", *map(str, values)]
    return arguments


def parse(given="", corpus="corpus", toml=TINY):
    """Returns the configuration of the tiny run with these flags."""
    return read_job_config([*flags(corpus, "folder", toml), *given.split()])


class Forked:
    """subprocess.Popen of torchrun, whose process and ranks are forks of one that has imported what they need."""

    def __init__(self, arguments, env, preexec_fn):
        self.pid = os.fork()
        if not self.pid:
            preexec_fn()
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
    # A rank that has ended counts as alive until someone waits for it.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    sys.exit(status)


def run_disturbed(plan, restarts, *flags, largest=resource.RLIM_INFINITY):
    """Runs torchrun on two ranks, until all its processes have ended.

    Args:
        plan: The file with the plan of disturbed.py for each start.
        largest: The largest size of a file, in bytes.

    Returns:
        The exit status and the output.
    """
    arguments = [
        "--standalone",
        "--nproc-per-node=2",
        "--run-path",
        "--start-method=fork",
        "--local-ranks-filter=0",
        f"--max-restarts={restarts}",
        str(Path(__file__).parent / "disturbed.py"),
        str(plan),
        *flags,
    ]
    ours, theirs = forks().Pipe(duplex=False)
    process = forks().Process(target=be_torchrun, args=(theirs, arguments, largest))
    process.start()
    theirs.close()
    with open(os.dup(ours.fileno())) as output:
        said = output.read()
    process.join()
    return process.exitcode, said


def settings_of(table, groups):
    """Returns a table of runs.toml as arguments of `Runs.add`."""
    settings = {}
    for group in table.get("like", ()):
        settings |= settings_of(groups[group], groups)
    for name, value in table.items():
        if isinstance(value, dict) and name != "spoil":
            for field, field_value in value.items():
                settings[f"{name}__{field}"] = field_value
        elif name != "like":
            settings[name] = value
    return settings


TABLES = tomllib.loads((Path(__file__).parent / "runs.toml").read_text())


def read_runs(table):
    """Returns {name: arguments of `Runs.add`} of a table of runs.toml."""
    return {name: settings_of(run, TABLES["groups"]) for name, run in TABLES[table].items()}


RUNS = read_runs("runs")
# What runs.toml may list beside the settings of a run.
DEFAULTS = {
    "corpus": "text",
    "toml": TINY,
    "of": None,
    "same_as": None,
    "near": 1e-5,
    "probes": [],
    "spoil": None,
    "stops": False,
    "stock": False,
}


def batch_sizes(ranks, settings):
    """Returns sizes for eight sequences in a step. A pipeline gets them in four micro-batches."""
    local = 8 // ranks
    for axis in ("pipeline", "context", "tensor"):
        local *= settings.get(f"parallelism__{AXES[axis]}_degree", 1)
    if "parallelism__pipeline_parallel_degree" in settings:
        local //= 4
    return {"training__local_batch_size": local, "validation__local_batch_size": local}


def count_ranks(name):
    return int(name.split()[0])


class Runs:
    """Runs by name, on processes that are started once for each number of ranks.

    Args:
        folder: The parent of the runs' folders.
        corpora: Folders of corpora by name.
        context: Of multiprocessing, for `Ranks`.
        path: Folders of packages, for `Ranks`.
    """

    def __init__(self, folder, corpora, context, path=()):
        self.folder = folder
        self.corpora = corpora
        self.context = context
        self.path = path
        self.jobs = {}
        self.settings = {}
        self.outputs = {}
        self.started = {}

    def add(self, name, **given):
        """Adds a run.

        Args:
            name: Its first word is the number of ranks.
            given: Settings beside those of tiny.toml, written section__name, and changes of DEFAULTS.
        """
        job = DEFAULTS | {"output": str(self.folder / name)}
        settings = batch_sizes(count_ranks(name), given)
        for key, value in given.items():
            target = settings if "__" in key else job
            target[key] = value
        corpus = self.corpora.get(job["corpus"], job["corpus"])
        job["args"] = flags(corpus, self.folder / name, job["toml"], **settings)
        if job["stock"]:
            job["args"] += ["--job.custom_config_module", "interdomain.titan"]
        self.jobs[name] = job
        self.settings[name] = settings

    def said(self, name):
        """Returns the output of a run. It begins with the first call. Raises AssertionError if it failed."""
        if name not in self.outputs:
            job = self.jobs[name]
            if job["of"]:
                continue_from(self.checkpoint(*job["of"]), self.folder / name)
            self.outputs[name] = self.ranks(count_ranks(name)).run(job)
        return self.outputs[name]

    def ranks(self, n):
        if n not in self.started or self.started[n].ended:
            log = self.folder / f"log-{n}-{len(self.outputs)}.txt"
            self.started[n] = Ranks(driver.serve, n, log, self.context, self.path)
        return self.started[n]

    def end(self):
        for ranks in self.started.values():
            ranks.end()

    def at(self, name):
        """Returns the folder that a run wrote."""
        self.said(name)
        return self.folder / name

    def checkpoint(self, name, step):
        return self.at(name) / "checkpoint" / f"step-{step}"

    def seen(self, name, rank=0):
        """Returns what a rank recorded of a run (driver.py)."""
        self.said(name)
        return torch.load(self.folder / f"{name}.rank{rank}.pt", weights_only=False)

    def log(self, name):
        """Returns {step: scalars} of the steps that were logged."""
        return self.seen(name)["log"]

    def every(self, name):
        """Returns what each rank recorded."""
        return [self.seen(name, rank) for rank in range(count_ranks(name))]

    def whole(self, name, what):
        """Returns "initial" or "gradients" of all parameters: a pipeline's ranks have some each."""
        tensors = {}
        for seen in self.every(name):
            tensors |= seen[what]
        return tensors

    def samples(self, name):
        """Returns {step: sorted hashes of its samples}. Ranks share a step's samples in an order of their own.

        Ranks that share sequences, heads or layers read the same samples, which count once.
        """
        different = {repr(seen["samples"]): seen["samples"] for seen in self.every(name)}
        steps = {}
        for samples in different.values():
            for step, hashes in samples.items():
                steps[step] = sorted(steps.get(step, []) + hashes)
        return steps


def continue_from(checkpoint, folder):
    """Makes a folder as if its run, which saved this checkpoint, was killed in a later save."""
    shutil.copytree(checkpoint, folder / "checkpoint" / checkpoint.name)
    # TorchTitan's trainer writes one record for all checkpoints of a run.
    record = checkpoint.parent.parent / "interdomain.json"
    if record.exists():
        shutil.copy(record, folder)
    (folder / "checkpoint" / "step-5").mkdir(exist_ok=True)


def assert_same_run(runs, name, others=None):
    """Asserts that a run computes what the run does that it names with `same_as`.

    float32 sums are made in another order. The largest difference of losses that was seen is 4e-7,
    of states 4e-6: Adam's eps (tiny.toml) keeps it from making whole steps of rounding. It is 3e-5
    where a momentum's gradients cancel each other. In bfloat16 states differ by 2e-2, after Muon's
    bfloat16 products by 3e-4.

    Args:
        others: The runs of the reference, if not `runs`.
    """
    others = others or runs
    job = runs.jobs[name]
    settings = runs.settings[name]
    reference = job["same_as"]
    near = job["near"]
    expected = others.seen(reference)
    ranks = runs.every(name)
    if job["stock"]:
        ranks = ranks[-1:]  # only the last stage of TorchTitan's pipeline has the loss
    log = ranks[0]["log"]

    # The steps, and their scalars on every rank.
    first = min(log)
    if job["of"]:
        assert first == job["of"][1] + 1
    assert list(log) == list(range(first, settings.get("training__steps", 6) + 1))
    for step, scalars in log.items():
        for quantity in ("loss", "grad_norm", "n_tokens_seen"):
            value = scalars[quantity]
            assert value == pytest.approx(expected["log"][step][quantity], rel=near), step
            assert {seen["log"][step][quantity] for seen in ranks} == {value}

    # The samples of each step.
    samples = others.samples(reference)
    assert runs.samples(name) == {step: samples[step] for step in log}

    # Validation. A mean over few answers, one of which may fall on the other side, is less exact.
    validated = ranks[-1]["validation"]
    assert bool(validated) == settings.get("validation__enable", False)
    tags = "loss"
    if not job["stock"]:
        tags = "loss|validation_position/.*|validation_metrics/accuracy"
    for step in validated.keys() & expected["validation"].keys():
        for tag, value in expected["validation"][step].items():
            if re.fullmatch(tags, tag):
                margin = 0.011 if "accuracy" in tag else near * value
                assert validated[step][tag] == pytest.approx(value, abs=margin), (step, tag)

    # Initial values, bitwise, and whole gradients: losses hide a factor of the gradients.
    if first == 1:
        assert runs.whole(name, "initial") == expected["initial"]
        if "gradients" in ranks[0]:
            gradients = others.whole(reference, "gradients")
            assert_close(runs.whole(name, "gradients"), gradients, max(1e-5, near))

    # Checkpoints: weights and optimizer state under the same names, whatever the topology.
    our_steps = finished_steps(runs.at(name) / "checkpoint")
    their_steps = finished_steps(others.at(reference) / "checkpoint")
    for step in our_steps.keys() & their_steps.keys() & log.keys():
        tensors = tensors_of(their_steps[step])
        assert "optimizer.state.output.weight.exp_avg" in tensors
        assert_close(tensors_of(our_steps[step]), tensors, max(1e-4, 3 * near))


def tensors_of(checkpoint):
    """Reads all tensors of a checkpoint: {name: tensor} of weights and optimizer state."""
    return read_tensors(checkpoint, list(tensor_index(checkpoint)))


def largest_difference(name, x, expected):
    """Returns a failure's message."""
    place = (x - expected).abs().argmax()
    values = f"{x.flatten()[place]}, expected {expected.flatten()[place]}"
    return f"{name}, element {place}: {values}"


def assert_same_tensors(checkpoint, reference):
    """Asserts that two checkpoints are bitwise identical."""
    tensors = tensors_of(checkpoint)
    expected = tensors_of(reference)
    assert tensors.keys() == expected.keys()
    for name, x in tensors.items():
        assert torch.equal(x, expected[name]), largest_difference(name, x, expected[name])


def assert_close(tensors, expected, tolerance):
    """Asserts that tensors differ by at most `tolerance` of their norms."""
    assert tensors.keys() == expected.keys()
    for name, x in tensors.items():
        difference = (x - expected[name]).float().norm()
        limit = tolerance * expected[name].float().norm()
        assert difference <= limit, largest_difference(name, x, expected[name])
