"""Real runs, shared by all tests of this folder: one start of the ranks trains many small configurations (driver.py)."""

import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import string
import subprocess
import sys
from multiprocessing import connection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from interdomain.files.distributed_checkpoint import read_tensors, tensor_index
from interdomain.tools import prepare_data

from ..common import TIMEOUT

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
TINY = HERE / "tiny.toml"


def environment():
    path = f"{REPOSITORY}{os.pathsep}{os.environ['PYTHONPATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def torchrun_command(ranks, *program):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    return [str(part) for part in command]


def torchrun(ranks, *program, **options):
    """Returns the finished process with its output as text."""
    options |= {"capture_output": True, "text": True, "timeout": TIMEOUT, "check": False}
    return subprocess.run(torchrun_command(ranks, *program), env=environment(), cwd=REPOSITORY, **options)


def assert_same_tensors(ours, reference):
    """Of two checkpoints, to the bit: weights and the optimizer's state."""
    index = tensor_index(reference)
    assert "optimizer.state.output.weight.exp_avg" in index
    assert tensor_index(ours).keys() == index.keys()
    ours, reference = (read_tensors(folder, list(index), index) for folder in (ours, reference))
    assert not [name for name in index if not torch.equal(ours[name], reference[name])]


def flags(corpus, folder, toml=TINY, **settings):
    """The entry's command line for the tiny run: `training__steps=3` becomes --training.steps 3."""
    given = {"data.corpus": corpus, "job.dump_folder": folder}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    arguments = ["--job.config_file", str(toml)]
    for name, value in given.items():
        section, _, field = name.partition(".")
        if isinstance(value, bool) and section != "mixer":  # [mixer]'s switches have three values: unset is None
            arguments.append(f"--{section}.{'' if value else 'no-'}{field}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


def refusal(capsys, act, *arguments, **named):
    with pytest.raises(SystemExit) as end:
        act(*arguments, **named)
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    return error


def run_rank(rank, ranks, port, program, log):
    """One of the ranks that `launch` starts."""
    signal.alarm(TIMEOUT)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), output)
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """launch(ranks, FILE, *arguments): the program on ranks that are forks of a process which has imported TorchTitan, without
    torchrun's seconds. Returns its output, if it came to its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "interdomain.titan.trainer"])

    def launch(ranks, *program):
        log, program = tmp_path_factory.mktemp("log") / "log.txt", [str(part) for part in program]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        running = [context.Process(target=run_rank, args=(rank, ranks, port, program, log)) for rank in range(ranks)]
        with mock.patch.dict(os.environ, environment()):
            for process in running:
                process.start()
        waiting = {process.sentinel: process for process in running}
        while waiting:
            for sentinel in connection.wait(waiting):
                waiting.pop(sentinel).join()
            if any(process.exitcode for process in running):  # the first that fails ends the others
                for process in waiting.values():
                    process.kill()
        assert not any(process.exitcode for process in running), log.read_text()[-8000:]
        return log.read_text()

    return launch


AXES = {  # as the plan calls them, outermost first: their settings
    "pipeline": "pipeline_parallel",
    "replicas": "data_parallel_replicate",
    "shards": "data_parallel_shard",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}


def parallel(**degrees):
    """Settings for these degrees and the same steps of 8 sequences; through a pipeline in four micro-batches."""
    passes = 4 if degrees.get("pipeline", 1) > 1 else 1
    data = degrees.get("replicas", 1) * degrees.get("shards", 1)
    each = {"training__local_batch_size": 8 // data // passes, "validation__local_batch_size": 8 // data // passes}
    return each | {f"parallelism__{name}_degree": degrees.get(axis, 1) for axis, name in AXES.items()}


class Runs:
    """Jobs of one start of the driver: what was seen, by job and rank."""

    def __init__(self, ranks, folder, corpus, launch):
        self.ranks, self.folder, self.corpus, self.launch, self.jobs = ranks, folder, corpus, launch, []
        self.settings = {}

    def add(self, name, *, toml=TINY, probes=(), folder=None, spoil=None, stops=False, stock=False, **settings):
        self.settings[name] = settings = {"training__local_batch_size": 8 // self.ranks} | settings
        arguments = flags(self.corpus, folder or self.folder / name, toml, **settings)
        if stock:
            arguments += ["--job.custom_config_module", "interdomain.titan"]
        job = {"name": name, "args": arguments, "probes": list(probes), "spoil": spoil, "stops": stops, "stock": stock}
        self.jobs.append(job)

    def start(self):
        jobs = self.folder / "jobs.json"
        jobs.write_text(json.dumps(self.jobs))
        self.output = self.launch(self.ranks, HERE / "driver.py", jobs, self.folder)
        return self

    def seen(self, name, rank=0):
        return torch.load(self.folder / f"{name}.rank{rank}.pt", weights_only=False)

    def whole(self, name, what):
        """Of all parameters, wherever a pipeline has them: "initial" or "gradients"."""
        return {n: x for rank in range(self.ranks) for n, x in self.seen(name, rank)[what].items()}

    def samples(self, name):
        """Hashes of all samples of a run, by step: sorted, for ranks share a step's samples in their own order. Those that
        share sequences, heads or layers read the same."""

        def degree(axis):
            return self.settings[name].get(f"parallelism__{AXES[axis]}_degree", 1)

        steps, together, stages = len(self.seen(name)["log"]), degree("context") * degree("tensor"), degree("pipeline")
        data, ranks = self.ranks // together // stages, {}
        for rank in range(self.ranks):
            samples = self.seen(name, rank)["samples"]
            assert ranks.setdefault(rank // together % data, samples) == samples
        n = len(ranks[0]) // steps
        return [sorted(h for samples in ranks.values() for h in samples[i * n : (i + 1) * n]) for i in range(steps)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """What runs in this process does as it would on a machine without a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def alone(monkeypatch):
    """A process group of one: what the hooks ask for their rank."""
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(folder, *source):
    sizes = ["--vocab-size", "512", "--validation-fraction", "0.1"]
    assert prepare_data.main(["--input", *source, *sizes, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A real corpus: 400 kB of the standard library under a vocabulary of 512."""
    return prepared(tmp_path_factory.mktemp("corpus") / "tiny", "stdlib", "--max-bytes", "400000")


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """Documents of 24 words, made up: every Python has the same, and in every batch some end."""
    folder, draw = tmp_path_factory.mktemp("short"), random.Random(1)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 6))) for _ in range(500)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=24))}) for _ in range(1000)]
    (folder / "short.jsonl").write_text("\n".join(lines))
    return prepared(folder / "tiny", str(folder / "short.jsonl"))


def synthetic(folder, kind, items, vocab):
    """500 examples of 64 tokens of a recall task."""
    numbers = {"length": 64, "items": items, "vocab": vocab, "examples": 500}
    options = [f"--synthetic-{name}={n}" for name, n in numbers.items()]
    given = ["--synthetic", kind, *options, "--validation-fraction", "0.1", "--output", str(folder)]
    assert prepare_data.main(given) == 0
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Two keys and two values: half of the answers are soon right."""
    return synthetic(tmp_path_factory.mktemp("pairs") / "tiny", "mqar", 2, 6)


BFLOAT16 = {"training__precision": "bf16", "training__steps": 2}
WITH_CHECKPOINTS, VALIDATED = {"checkpoint__enable": True}, {"validation__enable": True}
ANSWERS = {**VALIDATED, "model__vocab_size": 8, "validation__tokens": 0}
SHORT = {**VALIDATED, "training__steps": 3}
COMPILED = {"compile__enable": True, "activation_checkpoint__mode": "selective"}
CONTEXT = {"parallelism__context_parallel_degree": 2}
TENSOR, PIPELINE = {"parallelism__tensor_parallel_degree": 2}, {"parallelism__pipeline_parallel_degree": 2}
LAYERS = {"mixer__softmax_every": 2, "mixer__window": 16, "data__reset_state_at_documents": True, "training__steps": 4}
INTERLEAVED = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}  # two stages a rank


@pytest.fixture(scope="session")
def two(tmp_path_factory, corpus, short, pairs, launch):
    """On two ranks."""
    runs = Runs(2, tmp_path_factory.mktemp("two"), corpus, launch)
    runs.add("interdomain", **WITH_CHECKPOINTS, **VALIDATED, metrics__enable_tensorboard=True)
    spoil = {"rank": 1, 2: "loss", 3: "gradient", 5: "both"}
    runs.add("spoiled", **WITH_CHECKPOINTS, spoil=spoil, probes=["states"])
    limit = {"training__max_skipped_steps": 2, "optimizer__implementation": "for-loop"}
    runs.add("given up", **limit, spoil={"rank": 1, 3: "loss", 4: "loss"}, stops=True, probes=["states"])
    runs.add("ends skipped", spoil={"rank": 1, 6: "loss"}, metrics__log_freq=5)
    saved = {"checkpoint__interval": 1, "optimizer__lr": 1e38, "lr_scheduler__min_lr": 0, "training__steps": 4}
    runs.add("not finite", **WITH_CHECKPOINTS, **saved, stops=True)
    runs.add("replicated", parallelism__data_parallel_replicate_degree=2, training__steps=4)
    for condition, reshard in (("softmax", "never"), ("s4d", "always")):
        settings = {"mixer__condition": condition, "parallelism__fsdp_reshard_after_forward": reshard}
        runs.add(condition, **settings, training__steps=4)
    runs.add("bfloat16", **BFLOAT16, probes=["scan"])
    products = {"training__precision": "bf16-products", "training__steps": 2}
    runs.add("products compiled", **products, **COMPILED, compile__backend="aot_eager", probes=["scan"])
    # One shape to compile. A last batch that is smaller: the documents on one rank.
    alike = {"validation__local_batch_size": 4}
    runs.add("compiled", **COMPILED, **SHORT, **alike, compile__backend="aot_eager", probes=["scan"])
    whole, once = {"data__corpus": short}, {"training__steps": 1}
    apart = {**whole, "data__reset_state_at_documents": True}
    runs.add("documents", **apart, **SHORT, probes=["gradients"])
    for axis in ("context", "tensor", "pipeline"):
        shared = parallel(**{axis: 2}) | (INTERLEAVED if axis == "pipeline" else {})
        runs.add(axis, **shared, **WITH_CHECKPOINTS, **VALIDATED, probes=["gradients"])
        runs.add(f"{axis} documents", **shared, **apart, **SHORT, probes=["gradients"])
        runs.add(
            f"{axis} compiled", **shared, **COMPILED, compile__backend="aot_eager", training__steps=4, probes=["scan"]
        )
    runs.add("gated-deltanet", mixer__condition="gated-deltanet", training__steps=4)
    runs.add("pipeline mamba2", **parallel(pipeline=2), mixer__condition="mamba2", training__steps=4)
    answers = ANSWERS | {"data__corpus": pairs}
    runs.add("answers", **answers, **WITH_CHECKPOINTS, metrics__enable_tensorboard=True)
    runs.add("context answers", **answers, **parallel(context=2), data__reset_state_at_documents=True)
    runs.add("tensor answers", **answers, **parallel(tensor=2))
    runs.add("pipeline answers", **answers, **parallel(pipeline=2), **INTERLEAVED)
    for mode in ("selective", "full"):  # a DTensor must not enter what is compiled: softmax layers cannot save its mesh
        both = {**COMPILED, "compile__backend": "aot_eager", "activation_checkpoint__mode": mode}
        runs.add(f"tensor softmax {mode}", **parallel(tensor=2), **both, mixer__condition="softmax", training__steps=2)
        runs.add(
            f"tensor layers {mode}", **parallel(tensor=2), **LAYERS | {"training__steps": 2}, **both, data__corpus=short
        )
    for condition in ("softmax", "s4d"):
        runs.add(f"context {condition}", **parallel(context=2), mixer__condition=condition, training__steps=4)
    hybrid = LAYERS | {"data__corpus": short}
    runs.add("layers", **hybrid, probes=["gradients"])
    for axis in ("context", "tensor", "pipeline"):
        runs.add(f"{axis} layers", **parallel(**{axis: 2}), **hybrid, probes=["gradients"])
    runs.add("documents softmax", **apart, mixer__condition="softmax", **once)
    for condition in ("interdomain", "softmax"):
        runs.add(f"through documents {condition}", **whole, mixer__condition=condition, **once)
    saves = {"checkpoint__async_mode": "async", "checkpoint__interval": 1}
    runs.add("asynchronous", **WITH_CHECKPOINTS, **saves, training__steps=5)
    return runs.start()


def half(two, runs, name, of="interdomain", parts=("checkpoint/step-3", "tb")):
    """A folder with the checkpoint of step 3 of the run on two ranks, as if that was killed at step 6: with its TensorBoard
    events, and no checkpoint after it but the remains of a save."""
    folder = runs.folder / name
    for part in parts:
        shutil.copytree(two.folder / of / part, folder / part)
    (folder / "checkpoint" / "step-5").mkdir()
    return folder


@pytest.fixture(scope="session")
def one(tmp_path_factory, corpus, short, pairs, launch, two):
    """On one rank."""
    runs = Runs(1, tmp_path_factory.mktemp("one"), corpus, launch)
    runs.add("interdomain", **WITH_CHECKPOINTS, **VALIDATED, probes=["scan"])
    runs.add("first half", folder=runs.folder / "halves", training__steps=3, **WITH_CHECKPOINTS)
    runs.add("second half", folder=runs.folder / "halves", **WITH_CHECKPOINTS)
    runs.add("after two", folder=half(two, runs, "after two"), **WITH_CHECKPOINTS, metrics__enable_tensorboard=True)
    for axis in ("context", "tensor", "pipeline"):
        shared = half(two, runs, f"after {axis}", axis, ["checkpoint/step-3"])
        runs.add(f"after {axis}", folder=shared, **WITH_CHECKPOINTS)
    runs.add("other rate", folder=half(two, runs, "other rate"), **WITH_CHECKPOINTS, optimizer__lr=2e-4)
    source = two.folder / "interdomain" / "checkpoint" / "step-3"
    runs.add("started", checkpoint__initial_load_path=source, training__steps=1, **WITH_CHECKPOINTS)
    runs.add("accumulated", training__local_batch_size=2, training__steps=4)
    answers = ANSWERS | {"data__corpus": pairs}
    runs.add("answers", **answers)
    runs.add("answers accumulated", **answers, training__local_batch_size=2)
    for condition in ("softmax", "s4d", "gated-deltanet", "mamba2"):
        runs.add(condition, mixer__condition=condition, training__steps=4)
    runs.add("layers", **LAYERS, data__corpus=short, probes=["gradients"])
    runs.add("bfloat16", **BFLOAT16, probes=["scan"])
    # As a GPU runs it, down to generated code; that takes half a minute, and twice as long on two ranks.
    runs.add("compiled", **COMPILED, compile__backend="inductor", training__steps=3, probes=["scan"])
    apart = {"data__corpus": short, "data__reset_state_at_documents": True}
    runs.add("documents compiled", **apart, **COMPILED, **SHORT, compile__backend="aot_eager")
    for condition in ("interdomain", "s4d"):
        for mode in ("none", "selective", "full"):
            settings = {"mixer__condition": condition, "activation_checkpoint__mode": mode, "training__steps": 2}
            runs.add(f"{condition} {mode}", **settings, probes=["scan", "gradients"])
    return runs.start()


@pytest.fixture(scope="session")
def four(tmp_path_factory, corpus, launch, two):
    """On four ranks."""
    runs = Runs(4, tmp_path_factory.mktemp("four"), corpus, launch)
    runs.add("hybrid", **VALIDATED, parallelism__data_parallel_replicate_degree=2, training__steps=4)
    runs.add("after two", folder=half(two, runs, "after two"), **WITH_CHECKPOINTS)
    pairs = {"context shards": "interdomain", "context tensor": "pipeline", "tensor pipeline": "context"}
    for name, of in pairs.items():
        shared = parallel(**dict.fromkeys(name.split(), 2)) | {"training__steps": 4}
        runs.add(name, **shared, **VALIDATED, probes=["gradients"])
        runs.add(
            f"{name} after {of}",
            folder=half(two, runs, f"{name} after {of}", of, ["checkpoint/step-3"]),
            **WITH_CHECKPOINTS,
            **shared,
        )
    return runs.start()
