"""A rank that waits for jobs: many runs in one process group.

A job is {"output", "args": the entry's flags, "probes": [...]}. Each is parsed, built, trained and
closed as `trainer.run` does it; only the start of Python and of the process group is shared. What was seen is written to
OUTPUT.rankN.pt:

    log, validation  {step: {"loss", every other scalar}}
    initial          {parameter: sha256 of the whole tensor at the start}
    samples          {step: one hash per sample that this rank got}
    compiled         arguments of every torch.compile of a block
    gradients        (a probe) whole gradients of the first step
    states           (a probe) {step: sha256 of each tensor of weights and optimizer state}
    calls, dtypes    (probe "scan") calls of its forward implementation by step; what it and the SSM parameters saw
    folds            (probe "scan") computations of a stage's SSM tensors, by step
    traffic          (a probe) bytes received in the first step
    timeouts         (name, seconds) of all process groups at the end

"stock": TorchTitan's own trainer and settings. With --checkpoint.create_seed_checkpoint its entry saves instead of training.
"spoil": {STEP: "loss" | "gradient" | "both"} makes that of rank 1 not finite. "stops": the run ends itself.
"""

# ruff: noqa: E402 (a stand-in comes before what needs it)

import contextlib
import hashlib
import math
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torchtitan.train
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

NEW = torchtitan.__version__ == "0.3.0"
if NEW:
    # TorchTitan 0.3.0 needs PyTorch 2.14, which has no build for CPUs in the package index. These
    # are the parts of it that are missing.
    def set_timeout(timeout, group=None):
        distributed_c10d._set_pg_timeout(timeout, group)

    def by_micro_batches(whole_step):
        """Returns a pipeline schedule's step that also takes its micro-batches one by one."""

        def step(self, *args, arg_mbs=None, kwarg_mbs=(), target_mbs=None, **others):
            if arg_mbs:
                args = [torch.cat(parts) for parts in zip(*arg_mbs, strict=True)]
            if kwarg_mbs:
                for name in kwarg_mbs[0]:
                    others[name] = torch.cat([micro_batch[name] for micro_batch in kwarg_mbs])
            if target_mbs:
                others["target"] = torch.cat(target_mbs)
            return whole_step(self, *args, **others)

        return step

    torch.distributed.set_timeout = set_timeout
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        schedule.step = by_micro_batches(schedule.step)

from interdomain.model import Transformer
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
    data = whole(tensor).contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def parameters_of(trainer):
    parameters = {}
    for part in trainer.model_parts:
        for name, p in part.named_parameters():
            parameters[clean_name(name)] = p
    return parameters


def watch_log(trainer, seen):
    """Records the scalars of every logged step and of every validation."""
    seen |= {"log": {}, "validation": {}}
    logger = trainer.metrics_processor.logger
    log = logger.log

    def record_and_log(scalars, step):
        if "validation_metrics/loss" in scalars:
            seen["validation"][step] = {"loss": scalars["validation_metrics/loss"], **scalars}
        else:
            seen["log"][step] = {"loss": scalars["loss_metrics/global_avg_loss"], **scalars}
        log(scalars, step)

    logger.log = record_and_log


def watch_samples(trainer, seen):
    """Records a hash of each sample that this rank gets."""
    seen["samples"] = {}
    take = getattr(trainer.dataloader, "_next_batch", None)  # TorchTitan's loader has none

    def take_and_record(batches):
        inputs, labels = take(batches)
        rows = torch.cat([inputs["input"][:, :1], labels], dim=1)
        hashes = seen["samples"].setdefault(trainer.step, [])
        for row in rows.numpy():
            hashes.append(hashlib.sha256(row.tobytes()).hexdigest())
        return inputs, labels

    trainer.dataloader._next_batch = take_and_record


def watch_steps(trainer, probes, seen):
    """Makes the probes of the first step, and of the state after each step."""
    seen["states"] = {}
    train_step = trainer.train_step
    parameters = parameters_of(trainer)
    of_first_step = set(probes)

    def probe_and_train(batches):
        try:
            if "traffic" in of_first_step:
                with counted() as received:
                    train_step(batches)
                seen["traffic"] = sum(received.values())
            else:
                train_step(batches)
        finally:  # the step may end the run
            if "states" in probes:
                seen["states"][trainer.step] = state_digests(trainer)
        if "gradients" in of_first_step:
            seen["gradients"] = {name: whole(p.grad) for name, p in parameters.items()}
        of_first_step.clear()

    trainer.train_step = probe_and_train


def state_digests(trainer):
    """Returns digests of weights and optimizer state, by name."""
    state = parameters_of(trainer) | trainer.optimizers.state_dict()
    return {name: digest(x) for name, x in state.items() if isinstance(x, torch.Tensor)}


def spoil_losses(trainer, spoil):
    """Makes losses or gradients of rank 1 not finite.

    Args:
        spoil: {"step": "loss" | "gradient" | "both"}.
    """

    def infinite(gradient):
        return gradient * math.inf

    def spoil_loss(model, inputs, loss):
        what = spoil.get(str(trainer.step))
        if what is None or not model.training or torch.distributed.get_rank() != 1:
            return loss
        if what == "gradient":
            loss.register_hook(infinite)
            return loss
        if what == "loss":
            return loss + math.nan  # its gradient is finite
        return loss * math.nan

    if spoil:
        trainer.model_parts[-1].register_forward_hook(spoil_loss)


def watch_scan(trainer, stack, seen):
    """Records the scan's calls, what it gets, and how often the SSM tensors are computed."""
    seen |= {"calls": Counter(), "folds": Counter(), "dtypes": {"scan": set(), "ssm": {}}}
    call = ops._call
    ssm_tensors = Transformer.ssm_tensors

    def count(what):
        if trainer.model_parts[0].training:
            seen[what][trainer.step] += 1

    def count_and_fold(model):
        count("folds")
        return ssm_tensors(model)

    def count_and_call(backend, name, *args, **kwargs):
        if name.endswith("forward"):
            count("calls")
            dtypes = [x.dtype for x in args if isinstance(x, torch.Tensor)]
            seen["dtypes"]["scan"].add(tuple(dtypes))
        return call(backend, name, *args, **kwargs)

    def record_dtypes(module, args, output):
        for name, x in [*module.named_parameters(), ("mixing", output[1])]:
            seen["dtypes"]["ssm"][name] = x.dtype

    stack.enter_context(mock.patch.object(ops, "_call", count_and_call))
    stack.enter_context(mock.patch.object(Transformer, "ssm_tensors", count_and_fold))
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "ssm"):
                module.ssm.register_forward_hook(record_dtypes)


def build(job):
    if not job["stock"]:
        return InterdomainTrainer(read_job_config(job["args"]))
    with mock.patch.object(sys, "argv", ["torchtitan.train", *job["args"]]):
        config = ConfigManager().parse_args(job["args"])
        return config.build() if NEW else torchtitan.train.Trainer(config)


def train(trainer, job):
    if "--checkpoint.create_seed_checkpoint" in job["args"]:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    elif job["stops"]:
        with contextlib.suppress(SystemExit):
            trainer.train()
            raise AssertionError("the run did not end itself")
    else:
        trainer.train()


def time_limits():
    """Returns (name, seconds) of the process groups of several ranks."""
    limits = set()
    for group in distributed_c10d._world.pg_map:
        if torch.distributed.get_backend(group) == "gloo" and group.size() > 1:
            options = group._get_backend(torch.device("cpu")).options
            limits.add((group.group_desc, options._timeout.total_seconds()))
    return limits


def run(job):
    seen = {}
    with contextlib.ExitStack() as stack:
        compiled = stack.enter_context(mock.patch.object(torch, "compile", wraps=torch.compile))
        trainer = build(job)
        seen["initial"] = {name: digest(p) for name, p in parameters_of(trainer).items()}
        watch_log(trainer, seen)
        watch_samples(trainer, seen)
        watch_steps(trainer, job["probes"], seen)
        spoil_losses(trainer, job["spoil"])
        if "scan" in job["probes"]:
            watch_scan(trainer, stack, seen)
        train(trainer, job)
    seen["timeouts"] = time_limits()
    trainer.close()
    seen["compiled"] = []
    for call in compiled.call_args_list:
        if call.args and isinstance(call.args[0], torch.nn.Module):
            seen["compiled"].append(call.kwargs)
    torch._dynamo.reset()
    return seen


GROUPS = {}
make_group = device_mesh.new_group


def new_group(**settings):
    """Returns the group of an earlier job, if that made one: Gloo's threads wake often for each group, used or not."""
    if repr(settings) not in GROUPS:
        GROUPS[repr(settings)] = make_group(**settings)
    elif isinstance(GROUPS[repr(settings)], torch.distributed.ProcessGroup):
        # The time limit of a group that was just made. An earlier job has set another.
        group = GROUPS[repr(settings)]
        if torch.distributed.get_backend(group) == "gloo":
            distributed_c10d._set_pg_timeout(timedelta(seconds=300), group)
    return GROUPS[repr(settings)]


def do_not_sleep(seconds):
    pass


def serve(rank, ranks, port, jobs, log):
    """Takes jobs from a connection as one of the ranks, until that is closed, and answers each."""
    become(rank, ranks, port, log)
    init_logger()
    # The trainer waits two seconds for the other ranks' last lines; between jobs nothing needs them.
    module = "torchtitan.trainer" if NEW else "torchtitan.train"
    loop = sys.modules[module]
    loop.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=do_not_sleep)
    errors.GRACE_SECONDS = 0
    device_mesh.new_group = new_group
    with contextlib.suppress(EOFError):
        while job := jobs.recv():
            signal.alarm(TIMEOUT)
            torch.save(run(job), f"{job['output']}.rank{rank}.pt")
            torch.distributed.barrier()
            signal.alarm(0)
            jobs.send(True)
