"""Small runs by name, of which the first word is the number of ranks. None begins before a test asks for what it saw."""

import contextlib
import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.run as torch_run

from interdomain.files.checkpoint_index import read_tensors, tensor_index
from interdomain.tools._start import torchrun

from ..common import REPOSITORY
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
        if isinstance(value, bool) and section != "mixer":  # [mixer]'s switches have three values: unset is None
            arguments.append(f"--{section}.{'' if value else 'no-'}{field}")
        else:
            arguments += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return arguments


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
    options = ["--standalone", "--nproc-per-node=2", "--run-path", "--start-method=fork", "--local-ranks-filter=0"]
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


def start_launcher(corpus, folder, *options, output=subprocess.PIPE, **settings):
    """The launcher on the tiny run, as a user starts it. options: of the launcher itself."""
    _, _, *arguments = flags(corpus, folder, **settings)  # the launcher says itself which file
    command = [sys.executable, "-m", "interdomain.tools.launch", TINY, *arguments, *options]
    pipes = {"stdout": output, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([str(part) for part in command], cwd=REPOSITORY, env=environment(), **pipes)


def parallel(**degrees):
    """Settings for these degrees and the same steps of 8 sequences; through a pipeline in four micro-batches."""
    passes = 4 if degrees.get("pipeline", 1) > 1 else 1
    data = degrees.get("replicas", 1) * degrees.get("shards", 1)
    each = {"training__local_batch_size": 8 // data // passes, "validation__local_batch_size": 8 // data // passes}
    return each | {f"parallelism__{name}_degree": degrees.get(axis, 1) for axis, name in AXES.items()}


def steps(n):
    return {"training__steps": n}


def condition(name):
    return {"mixer__condition": name}


SAVED, DRAWN = {"checkpoint__enable": True}, {"metrics__enable_tensorboard": True}
VALIDATED = {"validation__enable": True}
SELECTIVE, FULL = {"activation_checkpoint__mode": "selective"}, {"activation_checkpoint__mode": "full"}
COMPILED = SELECTIVE | {"compile__enable": True, "compile__backend": "aot_eager"}
CONTEXT = {"parallelism__context_parallel_degree": 2}
TENSOR, PIPELINE = {"parallelism__tensor_parallel_degree": 2}, {"parallelism__pipeline_parallel_degree": 2}
INTERLEAVED = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}  # two stages a rank
SCAN, GRADIENTS, TRAFFIC = {"probes": ["scan"]}, {"probes": ["gradients", "traffic"]}, {"probes": ["traffic"]}
ORDER = {"probes": ["order"]}
BOTH, ALL = {"probes": ["scan", "gradients"]}, {"probes": ["scan", "gradients", "traffic"]}
DOCUMENTS = {"data__reset_state_at_documents": True, "data": "short"}
NORM = {"mixer__readout": "hermitian", "mixer__output_norm": "soft"}
FOUR = {"model__n_layers": 4}  # for two stages on each rank of a pipeline
HYBRID = {"mixer__softmax_every": 2, "mixer__window": 16} | FOUR | NORM | DOCUMENTS
BASELINES = ["gla", "mamba2", "deltanet", "gated-deltanet"]
FIXED = DOCUMENTS | FOUR | {"mixer__layers": BASELINES, "mixer__state_heads": 4}
LAYERS = HYBRID | SAVED | VALIDATED | GRADIENTS
ANSWERS = {"data": "pairs", "model__vocab_size": 8} | VALIDATED | steps(3)
EACH = {"training__reduce_gradients": "micro-batch", "training__local_batch_size": 1}
BFLOAT16 = {"training__precision": "bf16"} | steps(2)
ASYNC = {"checkpoint__async_mode": "async", "checkpoint__interval": 1}
ONCE, LONG = steps(1) | TRAFFIC, {"training__seq_len": 128}
RESHARD = "parallelism__fsdp_reshard_after_forward"
SPOIL, TWICE = {2: "loss", 3: "gradient", 5: "both", 6: "loss"}, {3: "loss", 4: "loss"}
LIMIT = {"training__max_skipped_steps": 2, "optimizer__implementation": "for-loop"}
HUGE = {"checkpoint__interval": 1, "optimizer__lr": 1e38, "lr_scheduler__min_lr": 0}
MUON_AXES = ("pipeline", "replicas", "shards", "tensor")  # "4 tensor context muon" has the other
MUON = {"optimizer__name": "Muon", "mixer__softmax_every": 2, "checkpoint__interval": 1} | SAVED | GRADIENTS

RUNS = {
    # One kind of layer; a text's documents are one stream.
    "1 text": SAVED | VALIDATED | BOTH,
    "2 text": SAVED | VALIDATED | DRAWN | GRADIENTS,
    "2 replicas": parallel(replicas=2) | SAVED | VALIDATED | ASYNC | steps(4) | GRADIENTS,
    "1 after two": SAVED | {"of": ("2 text", 3)},
    "1 other seed": SAVED | steps(5) | {"of": ("2 text", 3), "checkpoint__load_step": 3, "debug__seed": 43},
    "1 other rate": SAVED | steps(4) | {"of": ("2 text", 3), "optimizer__lr": 2e-4},
    # A hybrid with windows, whose states end with the documents.
    "1 layers": LAYERS | steps(5),
    "2 context layers": parallel(context=2) | LAYERS | steps(3),
    # A DTensor must not enter what is compiled: softmax layers cannot save its mesh.
    "2 tensor layers": parallel(tensor=2) | LAYERS | COMPILED | steps(3),
    "2 tensor softmax": parallel(tensor=2) | condition("softmax") | COMPILED | FULL | steps(2),
    "2 pipeline layers": parallel(pipeline=2) | INTERLEAVED | LAYERS | ALL | steps(3),
    "4 pipeline shards layers": parallel(pipeline=2, shards=2) | INTERLEAVED | LAYERS | steps(2),
    "4 replicas shards layers": parallel(replicas=2, shards=2) | LAYERS | steps(3),
    "4 context shards layers": parallel(context=2, shards=2) | LAYERS | steps(2),
    "4 context tensor layers": parallel(context=2, tensor=2) | LAYERS | steps(2),
    "4 tensor pipeline layers": parallel(tensor=2, pipeline=2) | LAYERS | steps(2),
    "4 after pipeline": parallel(context=2, tensor=2) | LAYERS | steps(5) | {"of": ("2 pipeline layers", 3)},
    "4 after context": parallel(tensor=2, pipeline=2) | LAYERS | steps(5) | {"of": ("2 context layers", 3)},
    # Answers, whose loss is of some labels; compiled, with the scan's output saved for the backward pass.
    "1 answers": ANSWERS,
    "1 answers accumulated": ANSWERS | {"training__local_batch_size": 2} | SCAN,
    "2 shards answers": parallel(shards=2) | ANSWERS | COMPILED | DRAWN | SCAN,
    "2 context answers": parallel(context=2) | ANSWERS | COMPILED | SCAN,
    "2 tensor answers": parallel(tensor=2) | ANSWERS | COMPILED | SCAN,
    "2 pipeline answers": parallel(pipeline=2) | ANSWERS | COMPILED | SCAN,
    # Gradients that are summed over the ranks after each micro-batch, and once a step.
    "4 each": parallel(replicas=2, shards=2) | EACH | steps(2) | GRADIENTS,
    "2 each bfloat16": parallel(shards=2) | EACH | steps(2) | GRADIENTS | {"training__mixed_precision_reduce": "bf16"},
    "2 once": parallel(shards=2) | EACH | {"training__reduce_gradients": "step"} | steps(2) | GRADIENTS,
    "2 pipeline bfloat16": parallel(pipeline=2) | FOUR | BFLOAT16 | steps(1) | ORDER,
    # Other layers.
    "1 softmax": condition("softmax") | steps(2),
    "1 s4d": condition("s4d") | steps(2) | BOTH,
    "1 fixed": FIXED | steps(2) | GRADIENTS,
    "2 context softmax": parallel(context=2) | condition("softmax") | steps(2) | TRAFFIC,
    "2 context s4d": parallel(context=2) | condition("s4d") | steps(2),
    "2 s4d": condition("s4d") | steps(2) | {RESHARD: "always"},
    "2 fixed": FIXED | steps(2) | {RESHARD: "never"},
    "2 context fixed": parallel(context=2) | FIXED | SELECTIVE | steps(2) | GRADIENTS,
    "2 tensor fixed": parallel(tensor=2) | FIXED | SELECTIVE | steps(2) | GRADIENTS,
    "2 pipeline fixed": parallel(pipeline=2) | FIXED | steps(2) | GRADIENTS,
    # What the ranks exchange.
    "2 context full": parallel(context=2) | FULL | ONCE,
    "2 context full long": parallel(context=2) | FULL | LONG | ONCE,
    # Precision and recomputation.
    "1 bfloat16": BFLOAT16 | SCAN,
    "2 bfloat16": BFLOAT16 | SCAN,
    "2 products compiled": BFLOAT16 | COMPILED | SCAN | {"training__precision": "bf16-products"},
    # As a GPU runs it, down to generated code; that takes twice as long on two ranks.
    "1 compiled": COMPILED | steps(2) | SCAN | {"compile__backend": "inductor"},
    "1 text selective": SELECTIVE | steps(2) | BOTH,
    "1 text full": FULL | steps(2) | BOTH,
    "1 s4d selective": condition("s4d") | SELECTIVE | steps(2) | BOTH,
    # Muon, on every axis from one rank's third step on. Layers of the recurrence and of softmax.
    "1 muon": MUON | steps(5),
    "1 muon again": MUON | steps(5) | {"of": ("1 muon", 3)},
    **{f"2 {axis} muon": parallel(**{axis: 2}) | MUON | steps(4) | {"of": ("1 muon", 3)} for axis in MUON_AXES},
    "4 tensor context muon": parallel(tensor=2, context=2) | MUON | steps(5) | {"of": ("1 muon", 3)},
    "1 muon of adamw": MUON | steps(5) | {"of": ("2 text", 3), "stops": True},
    "2 spoiled muon": MUON | steps(4) | {"spoil": {2: "loss", 3: "both"}, "probes": ["states"]},
    # Steps that are not finite on rank 1.
    "2 spoiled": SAVED | {"spoil": SPOIL, "probes": ["states"]},
    "2 given up": LIMIT | {"spoil": TWICE, "stops": True, "probes": ["states"]},
    "2 not finite": SAVED | HUGE | {"stops": True},
}


class Runs:
    """Records of runs, on processes that are started by number.

    Args:
        corpora: folders by name. A run without `data` has "text".
        context, path: of Ranks.
    """

    def __init__(self, folder, corpora, context, path=()):
        self.folder, self.corpora, self.context, self.path = folder, corpora, context, path
        self.jobs, self.settings, self.sources, self.outcomes, self.started = {}, {}, {}, {}, {}

    def add(
        self,
        name,
        *,
        data="text",
        toml=TINY,
        probes=(),
        of=None,
        spoil=None,
        stops=False,
        stock=False,
        **settings,
    ):
        """of: a run and the step of it from whose checkpoint this one continues. stock: TorchTitan's own trainer."""
        self.sources[name] = of
        self.settings[name] = settings = {"training__local_batch_size": 8 // int(name.split()[0])} | settings
        arguments = flags(self.corpora.get(data, data), self.folder / name, toml, **settings)
        if stock:
            arguments += ["--job.custom_config_module", "interdomain.titan"]
        job = {"output": str(self.folder / name), "args": arguments, "probes": list(probes), "spoil": spoil}
        self.jobs[name] = job | {"stops": stops, "stock": stock}

    def said(self, name):
        """The output of a run, which is over. Raises: AssertionError, at each call, if it failed."""
        if name not in self.outcomes:
            if of := self.sources[name]:
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
    of_all_checkpoints = checkpoint.parent.parent / "interdomain.json"  # TorchTitan's trainer writes it
    if of_all_checkpoints.exists():
        shutil.copy(of_all_checkpoints, folder)
    (folder / "checkpoint" / "step-5").mkdir(exist_ok=True)


def assert_same_run(runs, name, reference, tolerance=1e-5, others=None):
    """At every step of a run, on every rank: losses, the gradients' norm, samples and validation are those of the reference.
    Where it begins at the beginning: the initial bits, and the whole gradients, for losses alone hide a factor.

    tolerance: float32 sums in another order. The largest difference seen of losses and norms is 4e-7.
    others: where the reference is, if elsewhere.
    """
    others = others or runs
    theirs, every = others.seen(reference), runs.every(name)
    if stock := runs.jobs[name]["stock"]:
        every = every[-1:]  # TorchTitan's pipeline has the loss on its last stage alone
    steps, log = list(every[0]["log"]), theirs["log"]
    assert steps == list(range(steps[0], runs.settings[name].get("training__steps", 6) + 1))
    for step, scalars in every[0]["log"].items():
        for quantity in ("loss", "grad_norm", "n_tokens_seen"):
            assert {seen["log"][step][quantity] for seen in every} == {scalars[quantity]}
            assert scalars[quantity] == pytest.approx(log[step][quantity], rel=tolerance), (step, quantity)
        # Of the piece of the batch with the highest loss, if several ranks have a piece.
        assert scalars["loss_metrics/global_max_loss"] >= scalars["loss"] * (1 - tolerance)
    samples = dict(zip(log, others.samples(reference), strict=True))
    assert runs.samples(name) == [samples[step] for step in steps]
    validated = every[-1]["validation"]
    assert bool(validated) == runs.settings[name].get("validation__enable", False)
    for step in validated.keys() & theirs["validation"].keys():
        for tag, expected in theirs["validation"][step].items():
            if re.match("loss" if stock else "loss|validation_position|validation_metrics/accuracy", tag):
                near = {"abs": 0.011} if "accuracy" in tag else {"rel": tolerance}  # of few answers
                assert validated[step][tag] == pytest.approx(expected, **near), (step, tag)
    if steps[0] == 1:
        assert runs.whole(name, "initial") == theirs["initial"]
    if steps[0] == 1 and "gradients" in every[0]:
        gradients = runs.whole(name, "gradients")
        assert gradients.keys() == theirs["gradients"].keys()
        for parameter, gradient in theirs["gradients"].items():
            difference = (gradients[parameter] - gradient).norm() / gradient.norm()
            assert difference < 1e-5, (parameter, difference)


def tensors_of(*checkpoints):
    """All tensors of each, by name: weights and the optimizer's state; of the same names."""
    indices = [tensor_index(folder) for folder in checkpoints]
    assert "optimizer.state.output.weight.exp_avg" in indices[0]
    assert all(index.keys() == indices[0].keys() for index in indices)
    return [read_tensors(folder, list(index)) for folder, index in zip(checkpoints, indices, strict=True)]


def assert_same_tensors(ours, reference):
    """Compare two checkpoints, to the bit."""
    ours, reference = tensors_of(ours, reference)
    assert not [name for name in reference if not torch.equal(ours[name], reference[name])]


def assert_close_tensors(ours, reference):
    ours, reference = tensors_of(ours, reference)
    for name, x in reference.items():
        difference = torch.linalg.vector_norm((ours[name] - x).float())
        assert difference <= 1e-4 * torch.linalg.vector_norm(x.float()), name
