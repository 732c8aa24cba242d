"""Computations of four ranks under Megatron-Core, over gloo, in one start: the tests look at the files that they leave.

With INTERDOMAIN_MATRIX in the environment, of eight, and all three axes at once.
"""

import functools
import gc
import math
import multiprocessing
import os
import shutil
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from interdomain.data import PackedDataset, TokenCorpus
from interdomain.files.megatron_checkpoint import RECORD, part_of, write_checkpoint
from interdomain.model import CONDITIONS, ModelConfig, Transformer, build_config, meta_model
from interdomain.model.config import FIXED_STATE
from interdomain.model.mixers.interdomain import InterdomainMixer

from ..model.common import lively, random_tokens, small_config
from ..ranks import become, forks, new_store

MATRIX = "INTERDOMAIN_MATRIX" in os.environ
RANKS, MICRO = (8, 1) if MATRIX else (4, 2)
T, BATCH, STEPS = 32, 8, 10
LR, MIN_LR, SSM_LR = 3e-3, 1e-4, 1e-3
SEED = 42  # of TorchTitan's runs: debug.seed
VOCAB = 304  # some more than the tokenizer has
ENDS = (0, 5, 6, 20, T)  # of packed documents

WITHOUT = dict(sequence_parallel=False)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CORE_ATTN = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
ENGINE = dict(transformer_engine=True)
# By tensor-parallel ranks, stages and context-parallel ranks (the other ranks are data-parallel), in turns:
# name: (whose checkpoint of step 5 it resumes, or "start"; the last step; options).
LEGS = {
    (2, 1, 1): {
        "tensor and sequence": ("start", STEPS, {}),
        "tensor": ("start", 2, WITHOUT),
        "recompute core_attn": ("start", 1, WITHOUT | CORE_ATTN),
        "bf16": ("start", 6, dict(bf16=True)),
        "transformer engine": ("start", 6, ENGINE),
        "tensor to transformer engine": ("tensor and sequence", 7, ENGINE | WITHOUT),
        "mamba2, transformer engine": ("start", 0, ENGINE | dict(case="mamba2")),
    },
    (1, 1, 1): {
        "one": ("start", STEPS, {}),
        "tensor to one": ("tensor and sequence", 7, FULL),
        "transformer engine to one": ("transformer engine", 7, {}),
        "torchtitan": ("start", STEPS, dict(case="torchtitan", min_lr=1e-5, warmup_steps=2)),
    },
    (1, 2, 1): {
        "pipeline": ("start", 2, {}),
        "one to pipeline": ("one", 7, {}),
        "bf16 to pipeline": ("bf16", 6, dict(bf16=True)),
    },
    (2, 2, 1): {
        "tensor and pipeline": ("start", 3, {}),
        "mamba2, stages": ("start", 0, dict(case="mamba2")),
        "one to tensor and pipeline": ("one", 7, {}),
    },
    (1, 1, 4): {
        "context": ("start", STEPS, {}),
        "recompute, context": ("start", 1, FULL),
        "hybrid, context": ("start", 0, dict(case="hybrid")),
    },
    (1, 1, 2): {
        "two pieces": ("start", 2, {}),
    },
    (2, 1, 2): {
        "tensor and context": ("start", 2, {}),
        "tensor to tensor and context": ("tensor and sequence", 7, WITHOUT | CORE_ATTN),
        "mamba2, context": ("start", 0, dict(case="mamba2")),
        "hybrid, gated-deltanet, context": ("start", 0, dict(case="hybrid, gated-deltanet")),
    },
    (1, 2, 2): {
        "pipeline and context": ("start", 2, {}),
    },
    **({(2, 2, 2): {"tensor, pipeline and context": ("start", 2, {})}} if MATRIX else {}),
}
SOURCES = {source for legs in LEGS.values() for source, _, _ in legs.values()}
STATE = dict(n_basis=6, state_heads=4)
# Models of which the first gradients are compared, on two tensor-parallel ranks.
CASES = {
    **{name: (name, {}) for name in CONDITIONS if name not in ("interdomain", *FIXED_STATE)},
    "gate, kv2, soft": ("interdomain", dict(output_gate=True, n_kv_heads=2, readout="hermitian", output_norm="soft")),
    "kv2, identity": ("interdomain", dict(n_kv_heads=2, c_form="identity")),
    "gate, s4d": ("s4d", dict(output_gate=True)),
    "rff, no sequence": ("single-query", dict(feature_map="rff", normalize=True, c_form="diagonal")),
    "favor, kv2": ("interdomain", dict(feature_map="favor", normalize=True, n_kv_heads=2)),
    "hermitian": ("interdomain", dict(readout="hermitian")),
    "softmax, kv2": ("softmax", dict(n_kv_heads=2)),
    "gla": ("gla", STATE | dict(conv_width=3)),
    "mamba2": ("mamba2", STATE),
    "mamba2, no sequence": ("mamba2", STATE),
    "deltanet": ("deltanet", STATE),
    "hybrid, gated-deltanet": ("gated-deltanet", STATE | dict(softmax_every=2)),
    "hybrid": ("single-query", dict(softmax_every=2, window=7, n_kv_heads=2, c_form="diagonal")),
}
REFUSED = {
    "kv1": ("interdomain", dict(n_kv_heads=1)),
    "one head": ("gla", dict(n_basis=8)),
}


def config_of(case="interdomain") -> ModelConfig:
    if case == "torchtitan":
        return replace(build_config("debug"), vocab_size=VOCAB, max_seq_len=2 * T)
    condition, options = (CASES | REFUSED).get(case, ("interdomain", {}))
    return small_config(condition, n_layers=2, vocab_size=VOCAB, max_seq_len=T, **options)


def plain_model(case="interdomain") -> Transformer:
    config = config_of(case)
    # Away from initial values a normalizing mixer's denominator is near zero, and float32 too coarse.
    if config.mixers[0].normalize or case == "torchtitan":
        model = Transformer(config)
        model.init_weights(SEED if case == "torchtitan" else 0)
        return model
    return lively(config, torch.float32)


def tokens_of(step: int, corpus: Path | None = None) -> torch.Tensor:
    """[BATCH, T + 1]; of a corpus, the windows that TorchTitan's trainer reads."""
    if corpus is None:
        return random_tokens(config_of(), BATCH, T + 1, seed=step)
    dataset = PackedDataset(TokenCorpus(corpus, "train"), seq_len=2 * T, seed=SEED)
    return torch.from_numpy(dataset.read_batch(range(step * BATCH, (step + 1) * BATCH)))


def write_start(folder: Path, case="interdomain", hybrid=False) -> None:
    model = plain_model(case)
    write_checkpoint(folder, model.config, model.state_dict(), hybrid=hybrid)


def plain_steps() -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: the same model, data and optimizer in plain PyTorch."""
    model, found = plain_model(), []
    ours = [p for n, p in model.named_parameters() if any(s in n for s in (".ssm.", "k_norm", "v_norm"))]
    others = [p for p in model.parameters() if all(p is not q for q in ours)]
    groups = [{"params": others, "peak": LR}, {"params": ours, "peak": SSM_LR, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = MIN_LR + (group["peak"] - MIN_LR) * (1 + math.cos(math.pi * step / (STEPS - 1))) / 2
        tokens = tokens_of(step)
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]) / (BATCH * T)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def run_rank(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    from interdomain.megatron import contiguous, cpu

    from . import stand_ins

    cpu.install()
    stand_ins.install()
    save_from_forks()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    seen: dict = {"losses": {}, "gradients": {}, "signs": {}, "folds": {}, "refused": {}}
    for (tensor, pipeline, context), legs in LEGS.items():
        parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
        for name, (source, until, options) in legs.items():
            train(folder, name, seen, source, until, **options)
        if context > 1 and pipeline == 1:
            seen["packed", tensor, context] = packed_documents(open_run(), folder)
        if context == 4:
            refusal(seen, "pieces", lambda: open_run(contiguous=False))
            refusal(seen, "length", lambda: contiguous({"tokens": tokens_of(0)[:, :-2]}))
        if (tensor, pipeline, context) == (2, 1, 1):
            for case in CASES:
                options = WITHOUT if case.endswith("no sequence") else {}
                train(folder, case, seen, "start", 0, case=case, **options)
            others(folder, seen)
        parallel_state.destroy_model_parallel()
        dist.barrier()
        for group in [*dist.distributed_c10d._world.pg_map]:
            if group is not dist.group.WORLD:  # Gloo's threads wake a hundred times a second for each, used or not
                dist.destroy_process_group(group)
    torch.save(seen, folder / f"seen {rank}.pt")
    dist.destroy_process_group()


def open_run(
    case="interdomain",
    contiguous=True,
    min_lr=MIN_LR,
    warmup_steps=0,
    bf16=False,
    kind=None,
    transformer_engine=False,
    tokenizer=None,
    **settings,
):
    """settings: of TransformerConfig."""
    from megatron.core import parallel_state as p

    from interdomain.megatron import layer_spec
    from interdomain.megatron.train import Run

    config = config_of(case)
    tensor = p.get_tensor_model_parallel_world_size()
    rates = dict(lr=LR, min_lr=min_lr, ssm_lr=SSM_LR, steps=STEPS, warmup_steps=warmup_steps, global_batch=MICRO)
    layout = dict(
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=p.get_pipeline_model_parallel_world_size(),
        context_parallel_size=p.get_context_parallel_world_size(),
    )
    facts = dict(
        max_seq_len=config.max_seq_len,
        rope_theta=config.rope_theta,
        seed=7,
        contiguous=contiguous,
        transformer_engine=transformer_engine,
    )
    spec = layer_spec(kind or config.mixers[0].kind, **facts)
    spec.submodules.self_attention.params |= {"mixers": config.mixers, "tokenizer": tokenizer}
    return Run(config, spec, Namespace(bf16=bf16, seed=1, micro_batch=MICRO, **rates), **layout | settings)


def batches_of(tokens: torch.Tensor) -> list[torch.Tensor]:
    """This rank's micro-batches of a step."""
    from megatron.core import parallel_state as p

    return list(tokens.split(MICRO)[p.get_data_parallel_rank() :: p.get_data_parallel_world_size()])


def train(folder, name, seen, source, until, *, case="interdomain", **options) -> None:
    """Losses and gradient norms of the steps into seen["losses"][name]; life signs and gradients of the first step."""
    from interdomain.megatron.watch import mixer_statistics

    run = open_run(case, **options)
    run.load(folder / "start" / case / "release" if source == "start" else folder / source / "iter_0000005")
    found = seen["losses"][name] = {}
    corpus = folder / "corpus" if case == "torchtitan" else None
    if name == "bf16":
        seen["dtypes"] = {n: p.dtype for n, p in run.model.named_parameters()}
    if source == "start":
        seen["signs"][name] = case, mixer_statistics([run.ddp])
    while run.step < max(until, 1):
        with mock.patch.object(InterdomainMixer, "dynamics", side_effect=InterdomainMixer.dynamics) as folds:
            loss = run.gradients(batches_of(tokens_of(run.step, corpus)))
        seen["folds"].setdefault(name, []).append(folds.call_count)
        if run.step == 0 and name != "bf16":
            seen["gradients"][name] = own_gradients(run)
        if not until:
            break
        step, norm = run.step, run.update()
        found[step] = None if loss is None else loss.item(), norm
        if run.step == 5 and name in SOURCES:
            run.save(folder / name)


def own_gradients(run) -> list[tuple]:
    """(Megatron's name, where it stands in the whole tensor, the shape of that, the numbers) of what this rank has."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in run.ddp.buffers:
        for bucket in buffer.buckets:  # the distributed optimizer has left each rank its share
            shares = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(shares, shares[group.rank()].clone(), group=group)
    weights = [p.detach().clone() for p in run.model.parameters()]
    for p in run.model.parameters():
        p.data.copy_(p.main_grad)
    state = run.model.sharded_state_dict()
    apply_factories(state)
    parts = [x for x in _leaves(state) if isinstance(x, ShardedTensor) and x.data.is_floating_point()]
    found = [(x.key, x.global_offset, x.global_shape, x.data.detach().clone()) for x in parts]
    for p, weight in zip(run.model.parameters(), weights, strict=True):
        p.data.copy_(weight)
    return found


def _leaves(tree):
    for x in tree.values() if isinstance(tree, dict) else tree:
        yield from _leaves(x) if isinstance(x, dict | list) else (x,)


def whole_gradients(config: ModelConfig, parts: list[tuple], form=None) -> dict[str, torch.Tensor]:
    """Gradients of all ranks together, by the plain model's names."""
    whole: dict = {}
    for key, offset, shape, data in parts:
        place = whole.setdefault(key, torch.full(shape, math.nan))
        stacked = len(shape) - data.ndim
        sizes = (1,) * stacked + tuple(data.shape)
        place[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = data.view(sizes)
    names = (name for name in meta_model(config).state_dict() if not name.endswith("frequencies"))
    form = form or ("stacked" if len(config.mixers) == 1 else "by layer")
    return {name: part_of(whole, name, form) for name in names}


def packed_documents(run, folder: Path) -> tuple[torch.Tensor, list[tuple]]:
    """Losses [1, S] of this rank's tokens, where documents end at ENDS, and the gradients of their mean."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from interdomain.megatron import contiguous

    run.load(folder / "start" / "interdomain" / "release")
    tokens, ends = tokens_of(0)[:1], torch.tensor(ENDS, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=T, max_seqlen_kv=T)
    batch = contiguous({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    losses = run.model(batch["tokens"], None, None, labels=batch["labels"], packed_seq_params=packed).detach()
    with mock.patch.object(run.ddp, "forward", functools.partial(run.ddp.forward, packed_seq_params=packed)):
        run.gradients([tokens])
    return losses, own_gradients(run)


def refusal(seen: dict, name: str, function) -> None:
    try:
        function()
    except Exception as e:
        seen["refused"][name] = f"{type(e).__name__}: {e}"


def others(folder: Path, seen: dict) -> None:
    """Initial values, packed documents, refusals."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from . import stand_ins

    run = open_run()
    own = run.model.decoder.layers[1].self_attention
    rank = own.tp_group.rank()
    plain = Transformer(config_of())
    plain.init_weights(7)
    mixer = plain.layers["1"].attention
    parts = [getattr(mixer, name).weight.chunk(2)[rank] for name in ("wq", "wk", "wv")]
    seen["initial"] = (
        torch.equal(own.in_proj.weight, torch.cat(parts))
        and torch.equal(own.out_proj.weight, mixer.wo.weight.chunk(2, 1)[rank])
        and torch.equal(own.core.ssm.log_dt, mixer.ssm.log_dt.chunk(2)[rank])
        and torch.equal(own.core.q_conv.weight, mixer.q_conv.weight.chunk(2)[rank])
    )
    seen["packed", 2, 1] = packed_documents(run, folder)

    own = open_run(**ENGINE).model.decoder.layers[1].self_attention
    own.backward_dw()
    seen["delayed"] = [own.in_proj, own.out_proj] == stand_ins.DELAYED

    tokens = tokens_of(0)[:1]
    with torch.no_grad():
        context = StaticInferenceContext(1, T)
        run.model.eval()
        refusal(seen, "inference", lambda: run.model(tokens[:, :-1], None, None, inference_context=context))
    refusal(seen, "heads", lambda: open_run("kv1"))
    refusal(seen, "heads of the state", lambda: open_run("one head"))
    begun = folder / "tensor and sequence" / "iter_0000005"
    refusal(seen, "rates", lambda: open_run(min_lr=2 * MIN_LR).load(begun))
    one, other = (open_run(tokenizer=x).model.decoder.layers[0].self_attention for x in ("one", "another"))
    loaded = {RECORD: other.record.clone()}  # as from a checkpoint, at the end of a sharded load
    refusal(seen, "another tokenizer", lambda: one.load_state_dict(loaded, strict=False))
    refusal(seen, "a norm within in_proj", lambda: open_run("mamba2", kind="interdomain", **ENGINE))
    refusal(seen, "another mixer", lambda: run.load(folder / "start" / "hermitian" / "release"))


def compute(folder: Path, corpus: Path) -> Path:
    """Everything above, in four processes."""
    for case in ("interdomain", "torchtitan", *CASES):
        write_start(folder / "start" / case, case)
    shutil.copytree(corpus, folder / "corpus")
    start(run_rank, RANKS, folder)
    return folder


def run_own_program(argv: list[str], log: Path) -> str:
    """Output of interdomain.megatron.train on two ranks."""
    store = new_store()
    start(run_own_program_rank, 2, store.port, argv, log)
    return log.read_text()


def run_own_program_rank(rank: int, port: int, argv: list[str], log: Path) -> None:
    from interdomain.megatron import train

    become(rank, 2, port, log)
    save_from_forks()
    train.main(argv)


def save_from_forks() -> None:
    """Megatron's own queue of what was written is of a new process, which imports PyTorch anew."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def start(target, ranks: int, *args) -> None:
    """target(rank, *args) on each rank: forks of one process that has imported Megatron-Core."""
    parent = forks().Process(target=fork_ranks, args=(target, ranks, args))
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def fork_ranks(target, ranks: int, args: tuple) -> None:
    import interdomain.megatron.train  # noqa: F401

    gc.freeze()  # Megatron collects garbage at every save
    torch.multiprocessing.start_processes(target, args, nprocs=ranks, start_method="fork")
