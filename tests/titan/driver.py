"""Several jobs in one process group: torchrun ... driver.py jobs.json OUTPUT

A job is {"name", "args": the entry's flags, "probes": [...]}. Each is parsed, built, trained and closed as `trainer.run` does
it; only the start of Python and of the process group is shared. What was seen is written to OUTPUT/NAME.rankN.pt:

    log           {step: {"loss", "grad_norm", every other scalar}}        validation   {step: {"loss", ...}}
    initial       {parameter: sha256 of the whole tensor at the start}     samples      one hash per sample, as training got it
    calls         runs of the scan's forward implementation by step        dtypes       of what the scan and Delta, A, C saw
    compiled      keyword arguments of every torch.compile of a block     peak_flops   what utilisation is measured by
    gradients     whole gradients of the first step, as the optimizer gets them
    states        {step: sha256 over weights and optimizer state after it}
    undrawn       parameters that are NaN before loading    index_reads  how often the index of a checkpoint was opened

"spoil": {"rank", STEP: "loss" | "gradient" | "both"} makes that of one rank not finite; "stops": the run ends itself.
"""

import contextlib
import hashlib
import json
import math
import sys
from pathlib import Path

import torch
import torchtitan.train
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import init_logger

from interdomain.model.initialize import clean_name
from interdomain.scan import chunkwise
from interdomain.titan import errors
from interdomain.titan.settings import read_job_config
from interdomain.titan.trainer import InterdomainTrainer


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def digest(tensor):
    return hashlib.sha256(whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Watch:
    """Stands between the trainer and what it calls, and writes down what passes."""

    def __init__(self, probes, spoil=None):
        self.probes, self.spoil = probes, spoil or {}
        self.seen = {"log": {}, "validation": {}, "samples": [], "calls": {}, "dtypes": {}, "gradients": {}}
        self.seen["compiled"] = []

    def attach(self, trainer, stack):
        self.trainer = trainer
        seen, model, metrics = self.seen, trainer.model_parts[0], trainer.metrics_processor
        seen["initial"] = {clean_name(name): digest(p) for name, p in model.named_parameters()}
        seen["undrawn"] = [clean_name(name) for name, p in model.named_parameters() if whole(p).isnan().all()]
        seen["peak_flops"] = trainer.metrics_processor.gpu_peak_flops
        self.replace(stack, metrics.logger, "log", lambda log: lambda scalars, step: self.scalars(log, scalars, step))
        self.replace(stack, trainer.dataloader, "_take", lambda take: lambda batches: self.samples(take(batches)))
        self.replace(stack, trainer.optimizers, "step", lambda step: lambda *a, **k: self.optimizer_step(step, *a, **k))
        if self.spoil:
            stack.callback(model.register_forward_hook(self.spoiled).remove)
        if "scan" in self.probes:
            for name in ("scan_forward", "linear_forward"):
                self.replace(stack, chunkwise, name, lambda forward, name=name: self.counted(name, forward))
            for layer in model.layers.values():
                if hasattr(layer.attention, "ssm"):
                    layer.attention.ssm.register_forward_hook(self.dynamics)

    def compilation(self, compile_it):
        def compile_and_note(model, **kwargs):
            if isinstance(model, torch.nn.Module):
                self.seen["compiled"].append(kwargs)
            return compile_it(model, **kwargs)

        return compile_and_note

    def replace(self, stack, place, name, make):
        original = getattr(place, name)
        setattr(place, name, make(original))
        stack.callback(setattr, place, name, original)

    def scalars(self, log, scalars, step):
        if "validation_metrics/loss" in scalars:
            self.seen["validation"][step] = {"loss": scalars["validation_metrics/loss"], **scalars}
        else:
            self.seen["log"][step] = {"loss": scalars["loss_metrics/global_avg_loss"], **scalars}
        log(scalars, step)

    def samples(self, batch):
        inputs, labels = batch
        rows = torch.cat([inputs["input"][:, :1], labels], dim=1).numpy()
        self.seen["samples"] += [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]
        return batch

    def optimizer_step(self, step, *args, **kwargs):
        if "gradients" in self.probes and self.trainer.step == 1:
            named = self.trainer.model_parts[0].named_parameters()
            self.seen["gradients"] = {clean_name(name): whole(p.grad) for name, p in named}
        result = step(*args, **kwargs)
        if "states" in self.probes:
            named = dict(self.trainer.model_parts[0].named_parameters()) | self.trainer.optimizers.state_dict()
            tensors = {name: digest(value) for name, value in named.items() if isinstance(value, torch.Tensor)}
            whole_of_it = json.dumps(tensors, sort_keys=True).encode()
            self.seen.setdefault("states", {})[self.trainer.step] = hashlib.sha256(whole_of_it).hexdigest()
        return result

    def spoiled(self, model, inputs, loss):
        what = self.spoil.get(str(self.trainer.step))
        if what is None or not model.training or torch.distributed.get_rank() != self.spoil["rank"]:
            return loss
        if what == "gradient":
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss + math.nan if what == "loss" else loss * (math.nan if what == "both" else 1)

    def counted(self, name, forward):
        def run(*args, **kw):
            step = self.trainer.step if self.trainer.model_parts[0].training else "validation"
            self.seen["calls"][step] = self.seen["calls"].get(step, 0) + 1
            tensors = [a.dtype for a in args if isinstance(a, torch.Tensor)]
            self.seen["dtypes"].setdefault(name, set()).add(tuple(map(str, tensors)))
            return forward(*args, **kw)

        return run

    def dynamics(self, module, args, output):
        kinds = {f"parameter {name}": str(p.dtype) for name, p in module.named_parameters()}
        kinds |= {f"output {i}": str(x.dtype) for i, x in enumerate(output) if x is not None}
        self.seen["dtypes"].setdefault("dynamics", set()).add(tuple(sorted(kinds.items())))


index_reads = []


def note_index(event, arguments):
    if event == "open" and str(arguments[0]).endswith("/.metadata") and arguments[1] in ("r", "rb"):
        index_reads.append(arguments[0])


def run(job):
    watch = Watch(job.get("probes", []), job.get("spoil"))
    index_reads.clear()
    config = read_job_config(job["args"])
    with contextlib.ExitStack() as stack:
        watch.replace(stack, torch, "compile", watch.compilation)
        trainer = InterdomainTrainer(config)
        watch.attach(trainer, stack)
        with contextlib.suppress(SystemExit) if job.get("stops") else contextlib.nullcontext():
            trainer.train()
            assert not job.get("stops")
    trainer.close()
    watch.seen["index_reads"] = len(index_reads)
    torch._dynamo.reset()
    return watch.seen


def main(jobs, output):
    init_logger()
    sys.addaudithook(note_index)
    # The trainer waits two seconds for the other ranks' last lines; between jobs nothing needs them.
    torchtitan.train.time = type(
        "time", (), {"perf_counter": torchtitan.train.time.perf_counter, "sleep": lambda s: None}
    )
    errors.GRACE_SECONDS = 0
    for job in json.loads(Path(jobs).read_text()):
        seen = run(job)
        rank = torch.distributed.get_rank()
        torch.save(seen, Path(output) / f"{job['name']}.rank{rank}.pt")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
