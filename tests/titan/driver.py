"""A rank that waits for jobs: many runs in one process group.

A job is {"output", "args": the entry's flags, "probes": [...]}. Each is parsed, built, trained and
closed as `trainer.run` does it; only the start of Python and of the process group is shared. What was seen is written to
OUTPUT.rankN.pt:

    log, validation  {step: {"loss", every other scalar}}      initial   {parameter: sha256 of the whole tensor at the start}
    drawn            names of the tensors whose initial values this rank drew
    samples          {step: one hash per sample that it got}   compiled  arguments of every torch.compile of a block
    gradients        (a probe) whole ones of the first step   states    (a probe) {step: sha256 of weights and optimizer}
    calls, dtypes    (probe "scan") runs of its forward implementation by step; what it and the SSM parameters saw
    folds            (probe "scan") computations of a stage's dynamics, by step
    traffic          (a probe) bytes received in the first step
    order            (a probe) what PyTorch's profiler has of the first step, by its beginning
    timeouts         (name, seconds) of all process groups at the end

"stock": TorchTitan's own trainer and settings. With --checkpoint.create_seed_checkpoint its entry saves instead of training.
"spoil": {STEP: "loss" | "gradient" | "both"} makes that of rank 1 not finite. "stops": the run ends itself.
"""

# ruff: noqa: E402 (a stand-in comes before what needs it)

import contextlib
import hashlib
import json
import math
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torchtitan.train
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

NEW = torchtitan.__version__ == "0.3.0"
if NEW:  # of PyTorch 2.14, which has no build for CPUs in the package index
    torch.distributed.set_timeout = lambda timeout, group=None: distributed_c10d._set_pg_timeout(
        timeout, group
    )

    def of_micro_batches(whole):
        """A schedule's step that also takes its micro-batches one by one."""

        def step(self, *args, arg_mbs=None, kwarg_mbs=(), target_mbs=None, target=None, **others):
            args = (
                tuple(torch.cat(parts) for parts in zip(*arg_mbs, strict=True)) if arg_mbs else args
            )
            names = kwarg_mbs[0] if kwarg_mbs else ()
            others |= {name: torch.cat([one[name] for one in kwarg_mbs]) for name in names}
            return whole(
                self, *args, target=torch.cat(target_mbs) if target_mbs else target, **others
            )

        return step

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind.step = of_micro_batches(kind.step)

from interdomain.model import Transformer, initialize
from interdomain.model.initialize import clean_name
from interdomain.scan import ops
from interdomain.titan import errors
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.trainer import InterdomainTrainer
from tests.common import TIMEOUT
from tests.ranks import become
from tests.traffic import counted


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def digest(tensor):
    return hashlib.sha256(
        whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def watch(trainer, probes, spoil, seen):
    parts = trainer.model_parts
    named = {clean_name(name): p for part in parts for name, p in part.named_parameters()}
    seen |= {"log": {}, "validation": {}, "samples": {}, "states": {}}
    seen["initial"] = {name: digest(p) for name, p in named.items()}

    logger, loader, train_step = (
        trainer.metrics_processor.logger,
        trainer.dataloader,
        trainer.train_step,
    )
    log, take = logger.log, getattr(loader, "_take", None)  # TorchTitan's loader has none

    def scalars(found, step):
        validated = "validation_metrics/loss" in found
        loss = found["validation_metrics/loss" if validated else "loss_metrics/global_avg_loss"]
        seen["validation" if validated else "log"][step] = {"loss": loss, **found}
        log(found, step)

    def samples(batches):
        batch = take(batches)
        rows = torch.cat([batch[0]["input"][:, :1], batch[1]], dim=1).numpy()
        seen["samples"].setdefault(trainer.step, []).extend(
            hashlib.sha256(row.tobytes()).hexdigest() for row in rows
        )
        return batch

    def step(batches):
        try:
            with counted() if "traffic" in probes else contextlib.nullcontext({}) as received:
                with (
                    profile()
                    if "order" in probes and "order" not in seen
                    else contextlib.nullcontext() as profiled
                ):
                    train_step(batches)
        finally:  # it may end the run
            if "states" in probes:
                every = named | trainer.optimizers.state_dict()
                tensors = sorted(
                    (name, digest(x)) for name, x in every.items() if isinstance(x, torch.Tensor)
                )
                seen["states"][trainer.step] = hashlib.sha256(
                    json.dumps(tensors).encode()
                ).hexdigest()
        seen.setdefault("traffic", sum(received.values()))
        if profiled:
            events = sorted(profiled.events(), key=lambda event: event.time_range.start)
            seen["order"] = [event.name for event in events]
        if "gradients" in probes and "gradients" not in seen:
            seen["gradients"] = {name: whole(p.grad) for name, p in named.items()}

    logger.log, loader._take, trainer.train_step = scalars, samples, step
    spoil_losses(trainer, spoil)


def spoil_losses(trainer, spoil):
    """Change losses of rank 1. spoil: {"step": "loss" | "gradient" | "both"}."""

    def spoiled(model, inputs, loss):
        what = spoil.get(str(trainer.step))
        if what is None or not model.training or torch.distributed.get_rank() != 1:
            return loss
        if what == "gradient":
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss + math.nan if what == "loss" else loss * (math.nan if what == "both" else 1)

    if spoil:
        trainer.model_parts[-1].register_forward_hook(spoiled)


def watch_scan(trainer, stack, seen):
    seen |= {"calls": {}, "folds": {}, "dtypes": {}}

    call, fold = ops._call, Transformer.ssm_tensors

    def note(what):
        step = trainer.step if trainer.model_parts[0].training else "validation"
        seen[what][step] = seen[what].get(step, 0) + 1

    def folded(model):
        note("folds")
        return fold(model)

    def counted(backend, name, *args, **kwargs):
        if name.endswith("forward"):
            note("calls")
            tensors = tuple(str(a.dtype) for a in args if isinstance(a, torch.Tensor))
            seen["dtypes"].setdefault(name, set()).add(tensors)
        return call(backend, name, *args, **kwargs)

    def ssm_tensors(module, args, output):
        kinds = {f"parameter {name}": str(p.dtype) for name, p in module.named_parameters()}
        kinds |= {f"output {i}": str(x.dtype) for i, x in enumerate(output) if x is not None}
        seen["dtypes"].setdefault("dynamics", set()).add(tuple(sorted(kinds.items())))

    stack.enter_context(mock.patch.object(ops, "_call", counted))
    stack.enter_context(mock.patch.object(Transformer, "ssm_tensors", folded))
    for layer in (layer for part in trainer.model_parts for layer in part.layers.values()):
        if hasattr(layer.attention, "ssm"):
            layer.attention.ssm.register_forward_hook(ssm_tensors)


def build(job):
    if job["stock"]:
        with mock.patch.object(sys, "argv", ["torchtitan.train", *job["args"]]):
            config = ConfigManager().parse_args(job["args"])
            return config.build() if NEW else torchtitan.train.Trainer(config)
    return InterdomainTrainer(read_job_config(job["args"]))


def run(job):
    seen = {}
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(mock.patch.object(torch, "compile", wraps=torch.compile))
        with mock.patch.object(initialize, "initial_value", wraps=initialize.initial_value) as draw:
            trainer = build(job)
        seen["drawn"] = [call.args[0] for call in draw.call_args_list]
        watch(trainer, job["probes"], job["spoil"], seen)
        if "scan" in job["probes"]:
            watch_scan(trainer, stack, seen)
        with contextlib.suppress(SystemExit) if job["stops"] else contextlib.nullcontext():
            if "--checkpoint.create_seed_checkpoint" in job["args"]:
                trainer.checkpointer.save(curr_step=0, last_step=True)
            else:
                trainer.train()
            assert not job["stops"]
    seen["timeouts"] = {
        (group.group_desc, group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        for group in distributed_c10d._world.pg_map
        if torch.distributed.get_backend(group) == "gloo" and group.size() > 1
    }
    trainer.close()
    calls = compiled.call_args_list
    seen["compiled"] = [
        call.kwargs for call in calls if call.args and isinstance(call.args[0], torch.nn.Module)
    ]
    torch._dynamo.reset()
    return seen


GROUPS, make_group = {}, device_mesh.new_group


def new_group(**settings):
    """The group of an earlier job, if that made one: Gloo's threads wake a hundred times a second for each, used or not."""
    if repr(settings) not in GROUPS:
        GROUPS[repr(settings)] = make_group(**settings)
    elif isinstance(GROUPS[repr(settings)], torch.distributed.ProcessGroup):
        # The time limit of a group that was just made. An earlier job has set another.
        group = GROUPS[repr(settings)]
        if torch.distributed.get_backend(group) == "gloo":
            distributed_c10d._set_pg_timeout(timedelta(seconds=300), group)
    return GROUPS[repr(settings)]


def serve(rank, ranks, port, jobs, log):
    """One of the ranks: it takes jobs from a connection, until that is closed, and answers each."""
    become(rank, ranks, port, log)
    init_logger()
    # The trainer waits two seconds for the other ranks' last lines; between jobs nothing needs them.
    loop = sys.modules["torchtitan.trainer" if NEW else "torchtitan.train"]
    loop.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    errors.GRACE_SECONDS = 0
    device_mesh.new_group = new_group
    with contextlib.suppress(EOFError):
        while job := jobs.recv():
            signal.alarm(TIMEOUT)
            torch.save(run(job), f"{job['output']}.rank{rank}.pt")
            torch.distributed.barrier()
            signal.alarm(0)
            jobs.send(True)
