"""torchrun --nproc-per-node 2 -m interdomain.megatron.train --data.corpus data/stdlib --tensor-parallel 2 --steps 40

A training loop on Megatron-Core alone, to copy from. Without a GPU it runs over gloo (interdomain.megatron.cpu).
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from interdomain.data import PackedDataset, TokenCorpus, read_manifest
from interdomain.files.megatron_checkpoint import TRACKER, find_checkpoint
from interdomain.folders import expand_path
from interdomain.megatron import DynamicsOnce, contiguous, cpu
from interdomain.megatron.arguments import add_mixer_arguments, corpus_files, corpus_record, execution, mixer_settings
from interdomain.megatron.optimizer import Schedule, overrides
from interdomain.megatron.spec import block_spec, layer_spec, transformer_config
from interdomain.model.config import CONDITIONS, SIZES, ModelConfig, build_config

LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
DEFAULTS = {"global-batch": 16, "micro-batch": 8, "lr": 3e-3, "min-lr": 1e-5, "seed": 42}  # batches in sequences
DEFAULTS |= {"steps": 400, "warmup-steps": 24, "save-interval": 500, "log-interval": 10}
# Megatron's default form, dp_reshardable, saves float32 parameters of the distributed optimizer and cannot load them.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser("interdomain.megatron.train", description=__doc__)
    p.add_argument("--data.corpus", dest="corpus", required=True, help="folder of interdomain prepare-data")
    p.add_argument("--model.size", dest="size", choices=SIZES, default="debug")
    p.add_argument("--mixer.condition", dest="condition", choices=CONDITIONS, default="interdomain")
    p.add_argument("--mixer.softmax_every", dest="softmax_every", type=int, metavar="N", help="each Nth layer: softmax")
    p.add_argument("--mixer.layers", dest="layers", nargs="+", default=(), choices=CONDITIONS, help="of each layer")
    add_mixer_arguments(p)
    for name in LAYOUT:  # --tensor-parallel, ...
        p.add_argument(f"--{name.split('_')[0]}-parallel", dest=name, type=int, default=1)
    for name, default in DEFAULTS.items():
        p.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--save", help="folder of checkpoints; continues the newest, or from converted weights")
    return p.parse_args(argv)


def check(args: argparse.Namespace, layout: dict[str, int], data: PackedDataset) -> None:
    """Raises: ValueError for settings that cannot run on the ranks of this start, or on this corpus."""
    ranks, model, context = int(os.environ.get("WORLD_SIZE", 0)), math.prod(layout.values()), args.context_parallel_size
    uneven, each = not ranks or ranks % model, max(args.micro_batch, 1) * max(ranks // model, 1)
    counts = [getattr(args, name) for name in ("micro_batch", "global_batch", "log_interval", "save_interval")]
    unloadable = args.save and torch.cuda.is_available() and not distrib_optimizer.HAVE_APEX_OR_TE
    wrong = {
        f"start it with torchrun on a multiple of {model} ranks (tensor x pipeline x context), not {ranks}": uneven,
        "--micro-batch, --global-batch, --log-interval and --save-interval must be at least 1": min(counts) < 1,
        f"--global-batch must be a multiple of {each}, --micro-batch x data-parallel ranks": args.global_batch % each,
        f"--context-parallel must divide a sequence of {data.seq_len} tokens": data.seq_len % context,
        "--warmup-steps may be at most --steps": args.warmup_steps > args.steps,
        "--min-lr may be at most --lr": args.min_lr > args.lr,
        "--save on a GPU needs Transformer Engine or Apex, else Megatron cannot load the optimizer": unloadable,
    }
    for words in (words for words, is_wrong in wrong.items() if is_wrong):
        raise ValueError(f"{words}.")


class Run:
    """A model, its optimizer and its schedule on the groups of `parallel_state`. settings: more ones of TransformerConfig."""

    def __init__(self, config: ModelConfig, spec: Any, args: argparse.Namespace, **settings: Any) -> None:
        self.step, self.shape = 0, dict(seq_length=config.max_seq_len, micro_batch_size=args.micro_batch)
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        precision: Any = dict(bf16=args.bf16, params_dtype=dtype)
        settings = dict(use_cpu_initialization=not torch.cuda.is_available(), pipeline_dtype=dtype) | settings
        megatron = transformer_config(config, **precision, **settings)
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        torch.manual_seed(args.seed)
        layers: Any = block_spec(megatron, spec)
        ends = (parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
        around: Any = dict(position_embedding_type="none", share_embeddings_and_output_weights=False)
        model = GPTModel(megatron, layers, config.vocab_size, config.max_seq_len, *ends, **around).cuda()
        self.model = Float16Module(megatron, model) if args.bf16 else model
        gradients = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.ddp = DistributedDataParallel(megatron, gradients, self.model)

        self.recipe: Any = {name: getattr(args, name) for name in ("lr", "min_lr", "ssm_lr", "seed", "global_batch")}
        adam: Any = dict(adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.1, clip_grad=1.0)
        optimizer = OptimizerConfig(lr=args.lr, min_lr=args.min_lr, use_distributed_optimizer=True, **adam, **precision)
        self.optimizer: Any = get_megatron_optimizer(
            optimizer, [self.ddp], config_overrides=overrides(args.lr, args.min_lr, args.ssm_lr)
        )
        rates: Any = dict(init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr, lr_decay_style="cosine")
        length: Any = dict(lr_warmup_steps=args.warmup_steps, lr_decay_steps=max(args.steps, args.warmup_steps + 1))
        decay: Any = dict(start_wd=0.1, end_wd=0.1, wd_incr_steps=1, wd_incr_style="constant")
        self.schedule = Schedule(self.optimizer, **rates, **length, **decay)
        megatron.finalize_model_grads_func = DynamicsOnce(finalize_model_grads)
        megatron.grad_scale_func = self.optimizer.scale_loss

    def gradients(self, batches: list[Tensor]) -> Tensor | None:
        """Gradients of this rank's micro-batches [B, S + 1]; the mean loss of all ranks, on a pipeline's last stage."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        passes: Any = dict(data_iterator=iter(batches), model=[self.ddp], num_microbatches=len(batches), **self.shape)
        losses = get_forward_backward_func()(forward_step_func=forward, forward_only=False, **passes)
        if not parallel_state.is_pipeline_last_stage():
            return None
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        loss = torch.stack(losses).mean() / group.size()
        dist.all_reduce(loss, group=group)
        return loss

    def update(self) -> float:
        """The optimizer's step; returns the norm of the gradients."""
        _, norm, _ = self.optimizer.step()
        self.schedule.step(1)
        self.step += 1
        return norm

    def state(self, optimizer: bool = True, loading: bool = False) -> dict[str, Any]:
        model = self.model.sharded_state_dict(metadata=METADATA.copy())
        if not optimizer:
            return {"model": model}
        state = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=METADATA.copy())
        return {"model": model, "optimizer": state, "step": self.step, "recipe": self.recipe}

    def save(self, folder: Path) -> None:
        place = folder / f"iter_{self.step:07d}"
        place.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.state(), str(place))
        if dist.get_rank() == 0:
            (folder / TRACKER).write_text(str(self.step))

    def load(self, checkpoint: Path) -> None:
        """A step of this program, or weights alone (`release`), of any layout of ranks.

        Raises: ValueError for another recipe.
        """
        started = checkpoint.name != "release"
        state: Any = dist_checkpointing.load(self.state(optimizer=started, loading=True), str(checkpoint))
        self.model.load_state_dict(state["model"])
        if not started:
            return self.optimizer.reload_model_params()
        if (recipe := state.get("recipe")) != self.recipe:
            raise ValueError(f"{checkpoint} is of a run with {recipe}, not {self.recipe}. Give the same.")
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.schedule.step(self.step)


def forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    tokens, pieces = next(batches), parallel_state.get_context_parallel_world_size()
    batch = contiguous({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})

    def mean(losses: Tensor) -> tuple[Tensor, Tensor]:
        mean = losses.float().mean()
        return mean / pieces, mean.detach()  # Megatron multiplies the first by them

    return model(batch["tokens"], None, None, labels=batch["labels"]), mean


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    layout = {name: getattr(args, name) for name in LAYOUT}
    try:
        args.save = Path(expand_path(args.save)) if args.save else None
        corpus = expand_path(args.corpus)
        corpus_files(corpus, "train")  # refuses a corpus whose loss is that of its answers
        manifest = read_manifest(corpus)
        layers: Any = dict(layers=args.layers, softmax_every=args.softmax_every, **mixer_settings(args))
        config = build_config(args.size, args.condition, vocab_size=manifest["vocab_size"], **layers)
        data = PackedDataset(TokenCorpus(corpus), config.max_seq_len, args.seed)
        check(args, layout, data)
    except (OSError, ValueError) as e:
        sys.exit(f"error: {e}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cpu.install()
    dist.init_process_group()  # NCCL and gloo, or gloo alone
    parallel_state.initialize_model_parallel(**layout)
    spec: Any = layer_spec(max_seq_len=config.max_seq_len, execution=execution(args), seed=args.seed, contiguous=True)
    spec.submodules.self_attention.params |= {"mixers": config.mixers} | corpus_record(manifest)
    run = Run(config, spec, args, **layout, sequence_parallel=args.tensor_model_parallel_size > 1)
    if args.save and (newest := find_checkpoint(args.save)):
        run.load(newest)
    copies, copy = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    while run.step < args.steps:
        samples = range(run.step * args.global_batch, (run.step + 1) * args.global_batch)[copy::copies]
        tokens = torch.from_numpy(data.read_batch(samples)).cuda()
        loss, norm = run.gradients([*tokens.split(args.micro_batch)]), run.update()
        if run.step % args.log_interval == 0 and dist.get_rank() == dist.get_world_size() - 1:  # on the last stage
            print(f"step {run.step} loss {loss:.5f} grad_norm {norm:.4f}", flush=True)
        if args.save and (run.step % args.save_interval == 0 or run.step == args.steps):
            run.save(args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # the writer of checkpoints starts processes
    main()
