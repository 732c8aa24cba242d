"""torchrun --nproc-per-node 2 -m interdomain.megatron.train --data.corpus data/stdlib --tensor-parallel 2 --steps 40

Pretraining on Megatron-Core alone, without a checkout of Megatron-LM: its model, data sets, schedules, distributed optimizer
and checkpoints, put together in one file to copy from. On a machine without GPUs it runs over gloo (interdomain.megatron.cpu).
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from interdomain.data.corpus import read_manifest
from interdomain.files.megatron_checkpoint import TRACKER, find_checkpoint
from interdomain.model.config import CONDITIONS, SIZES, ModelConfig, build_config

from . import cpu
from .arguments import add_mixer_arguments, corpus_files, execution, mixer_settings
from .context import contiguous
from .optimizer import Schedule, overrides
from .spec import block_spec, layer_spec, transformer_config

# Megatron's default form, dp_reshardable, saves float32 parameters of the distributed optimizer and cannot load them.
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
RECOMPUTE = {
    "none": {},
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "core_attn": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    line, description = str(__doc__).split("\n\n")
    p = argparse.ArgumentParser("interdomain.megatron.train", description=description, epilog=f"Example: {line}")
    p.add_argument("--data.corpus", required=True, help="folder of interdomain prepare-data")
    p.add_argument("--model.size", choices=SIZES, default="debug")
    p.add_argument("--mixer.condition", choices=CONDITIONS, default="interdomain")
    mixer = p.add_argument_group("mixer")
    add_mixer_arguments(mixer)
    mixer.add_argument("--mixer.softmax_every", type=int, help="a hybrid: of every so many layers the last is softmax")
    mixer.add_argument(
        "--mixer.layers", nargs="+", default=(), choices=CONDITIONS, help="or a condition for each layer"
    )
    p.add_argument("--tensor-parallel", type=int, default=1, help="with sequence parallelism")
    p.add_argument("--pipeline-parallel", type=int, default=1)
    p.add_argument("--context-parallel", type=int, default=1)
    p.add_argument("--recompute", choices=RECOMPUTE, default="none")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--global-batch", type=int, default=16, help="sequences per step")
    p.add_argument("--micro-batch", type=int, default=8, help="sequences per rank and pass")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--min-lr", type=float, default=1e-5)
    p.add_argument("--warmup-steps", type=int, default=24)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--save", type=Path, help="folder of checkpoints; the newest one in it is continued")
    p.add_argument("--save-interval", type=int, default=500)
    p.add_argument("--load", type=Path, help="weights to start from (convert --to-megatron), where --save has none")
    p.add_argument("--log-interval", type=int, default=10)
    return p.parse_args(argv)


def check(args: argparse.Namespace, ranks: int) -> Path | None:
    """The checkpoint to begin with. Raises: ValueError for what cannot run on so many ranks, and for a --load without one."""
    together = args.tensor_parallel * args.pipeline_parallel * args.context_parallel
    if ranks % together:
        raise ValueError(
            f"--tensor-parallel x --pipeline-parallel x --context-parallel = {together} does not divide the {ranks} rank(s). "
            "Start others."
        )
    if args.global_batch % (each := ranks // together * args.micro_batch):
        raise ValueError(
            f"--global-batch {args.global_batch} must be a multiple of {each}: {ranks // together} data-parallel rank(s) x "
            f"--micro-batch {args.micro_batch}."
        )
    newest = find_checkpoint(args.save) if args.save else None
    if newest is None and args.load and (newest := find_checkpoint(args.load)) is None:
        raise ValueError(
            f"--load {args.load} holds no checkpoint of Megatron-Core. Leave it out, or name another folder."
        )
    return newest


class Run:
    """A model and its optimizer, after `parallel_state.initialize_model_parallel`.

    options: further settings of TransformerConfig.
    """

    def __init__(self, config: ModelConfig, spec: Any, args: argparse.Namespace, **options: Any) -> None:
        tensor, pipeline = args.tensor_parallel, args.pipeline_parallel
        on_cpu = not torch.cuda.is_available()
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        self.step, self.seq_len, self.micro_batch = 0, config.max_seq_len, args.micro_batch
        settings = dict(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=args.context_parallel,
            sequence_parallel=tensor > 1,
            bf16=args.bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            use_cpu_initialization=on_cpu,
            batch_p2p_comm=not on_cpu,
            bias_dropout_fusion=False,
            bias_activation_fusion=not on_cpu,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,  # needs Apex
        )
        megatron = transformer_config(config, **(settings | RECOMPUTE[args.recompute] | options))
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        torch.manual_seed(args.seed)
        layers: Any = block_spec(megatron, spec)
        model = GPTModel(
            config=megatron,
            transformer_layer_spec=layers,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_seq_len,
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        model = model if on_cpu else model.cuda()
        self.model = Float16Module(megatron, model) if args.bf16 else model
        gradients = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.ddp = DistributedDataParallel(megatron, gradients, self.model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=args.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        groups = overrides(args.lr, args.min_lr, args.ssm_lr)
        self.optimizer: Any = get_megatron_optimizer(settings, [self.ddp], config_overrides=groups)
        warmup = args.warmup_steps if args.warmup_steps <= args.steps else args.steps // 10
        self.schedule = Schedule(
            self.optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(args.steps, warmup + 1),
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=args.steps,
            wd_incr_style="constant",
        )
        megatron.finalize_model_grads_func, megatron.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss

    def gradients(self, batches: list[dict[str, Tensor]]) -> Tensor | None:
        """Gradients of this rank's micro-batches; returns the mean loss of all ranks on a last stage of the pipeline."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=[self.ddp],
            num_microbatches=len(batches),
            seq_length=self.seq_len,
            micro_batch_size=self.micro_batch,
            forward_only=False,
        )
        if not parallel_state.is_pipeline_last_stage():
            return None
        loss = torch.stack([one["loss"] for one in losses]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return loss / parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def update(self) -> float:
        """The optimizer's step; returns the norm of the gradients."""
        _, norm, _ = self.optimizer.step()
        self.schedule.step(1)
        self.step += 1
        return norm

    def save(self, folder: Path) -> None:
        place = folder / f"iter_{self.step:07d}"
        place.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self._state(loading=False), str(place))
        if dist.get_rank() == 0:
            (folder / TRACKER).write_text(str(self.step))

    def load(self, checkpoint: Path) -> None:
        """A step of this program, or weights alone (`release`). Another layout of ranks may have written it."""
        started = checkpoint.name != "release"
        wanted = self._state(loading=True) if started else {"model": self._model_state()}
        state: Any = dist_checkpointing.load(wanted, str(checkpoint))
        self.model.load_state_dict(state["model"])
        if started:
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.step = state["step"]
        else:
            self.optimizer.reload_model_params()

    def _model_state(self) -> dict:
        return self.model.sharded_state_dict(metadata=dict(RESHARDABLE))

    def _state(self, loading: bool) -> dict:
        model = self._model_state()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(RESHARDABLE))
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": self.step}


def _forward(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = contiguous(next(batches))
    pieces = parallel_state.get_context_parallel_world_size()

    def mean(loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = loss.float().mean()
        return mean / pieces, {"loss": mean.detach()}  # the schedule multiplies by them

    return model(batch["tokens"], None, None, labels=batch["labels"]), mean


def open_data(corpus: str, seq_len: int, samples: int, cache: str) -> Any:
    """Megatron's data set of a prepared corpus: in its own order, not in that of interdomain.data."""
    manifest = read_manifest(corpus)

    # What GPTDataset asks of one.
    names = {"corpus": manifest["tokenizer"]["sha256"]}
    tokenizer: Any = SimpleNamespace(
        eod=manifest["eos_id"], pad=None, vocab_size=manifest["vocab_size"], unique_identifiers=names
    )
    config = GPTDatasetConfig(
        random_seed=42,
        sequence_length=seq_len,
        blend_per_split=[(corpus_files(corpus, "train"), None), None, None],
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda *_: True, config).build()[0]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    corpus, size, condition = (getattr(args, name) for name in ("data.corpus", "model.size", "mixer.condition"))
    try:
        manifest = read_manifest(corpus)
        settings = {name: getattr(args, f"mixer.{name}") for name in ("layers", "softmax_every")} | mixer_settings(args)
        config = build_config(size, condition, vocab_size=manifest["vocab_size"], **settings)
        if "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "start it with torchrun, on one rank too: torchrun --nproc-per-node 1 -m interdomain.megatron.train"
            )
        begin = check(args, int(os.environ["WORLD_SIZE"]))
    except (OSError, ValueError) as e:
        sys.exit(f"error: {e}")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        cpu.install()
        dist.init_process_group("gloo")
    spec: Any = layer_spec(max_seq_len=config.max_seq_len, execution=execution(args), seed=args.seed, contiguous=True)
    spec.submodules.self_attention.params |= {"mixers": config.mixers, "tokenizer": manifest["tokenizer"]["sha256"]}
    parallel_state.initialize_model_parallel(
        args.tensor_parallel, args.pipeline_parallel, context_parallel_size=args.context_parallel
    )
    run = Run(config, spec, args)
    if begin:
        run.load(begin)
    cache = str((args.save or Path(corpus)) / "cache")
    data = open_data(corpus, config.max_seq_len, args.steps * args.global_batch, cache)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    last = parallel_state.is_pipeline_last_stage() and rank == parallel_state.get_tensor_model_parallel_rank() == 0
    began, start = time.monotonic(), run.step
    while run.step < args.steps:
        first = run.step * args.global_batch
        mine = range(first + rank * args.micro_batch, first + args.global_batch, ranks * args.micro_batch)
        samples = ([data[i + j] for j in range(args.micro_batch)] for i in mine)
        batches = [torch.utils.data.default_collate(batch) for batch in samples]
        if torch.cuda.is_available():
            batches = [{name: x.cuda() for name, x in batch.items()} for batch in batches]
        loss, norm = run.gradients(batches), run.update()
        if loss is not None and last and (run.step == start + 1 or run.step % args.log_interval == 0):
            rate = (run.step - start) * args.global_batch * config.max_seq_len / (time.monotonic() - began)
            print(f"step {run.step} loss {loss.item():.5f} grad_norm {norm:.4f} tokens/s {rate:,.0f}", flush=True)
        if args.save and (run.step % args.save_interval == 0 or run.step == args.steps):
            run.save(args.save)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":  # the writer of checkpoints starts processes
    sys.exit(main())
