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
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from interdomain.data import PackedDataset, TokenCorpus
from interdomain.megatron.checkpoint import RECORD, TRACKER, part_of, write_checkpoint
from interdomain.model import CONDITIONS, ModelConfig, Transformer, build_config, meta_model
from interdomain.model.config import FIXED_STATE
from interdomain.model.mixers.interdomain import InterdomainMixer

from ..model.common import lively, random_tokens, small_config
from ..ranks import forks

MATRIX = "INTERDOMAIN_MATRIX" in os.environ
RANKS, MICRO = (8, 1) if MATRIX else (4, 2)
T, BATCH, STEPS = 32, 8, 10
LR, MIN_LR, SSM_LR = 3e-3, 1e-4, 1e-3
SEED = 42  # of TorchTitan's runs: debug.seed
VOCAB = 304  # some more than the tokenizer has
ENDS = (0, 5, 6, 20, T)  # of packed documents
PACKED = ((2, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2))  # layouts that have them

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
}
if MATRIX:
    LEGS[2, 2, 2] = {"tensor, pipeline and context": ("start", 2, {})}
SOURCES = {source for legs in LEGS.values() for source, _, _ in legs.values()}
STATE = dict(n_basis=6, state_heads=4)
# Models of which the first gradients are compared, on two tensor-parallel ranks.
CASES = {
    **{name: (name, {}) for name in CONDITIONS if name not in ("interdomain", *FIXED_STATE)},
    "gate, kv2, soft": (
        "interdomain",
        dict(output_gate=True, n_kv_heads=2, readout="hermitian", output_norm="soft"),
    ),
    "kv2, identity": ("interdomain", dict(n_kv_heads=2, c_form="identity")),
    "gate, s4d": ("s4d", dict(output_gate=True)),
    "rff, no sequence": (
        "single-query",
        dict(feature_map="rff", normalize=True, c_form="diagonal"),
    ),
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
REFUSED = {"kv1": ("interdomain", dict(n_kv_heads=1))}
RATES = dict(lr=LR, ssm_lr=SSM_LR, steps=STEPS, micro_batch=MICRO)


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


def run_rank(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    from . import cpu, stand_ins

    cpu.install()
    stand_ins.install()
    save_from_forks()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS
    )
    seen: dict = {"losses": {}, "gradients": {}, "folds": {}, "refused": {}}
    for (tensor, pipeline, context), legs in LEGS.items():
        parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
        for name, (source, until, options) in legs.items():
            train(folder, name, seen, source, until, **options)
        if (tensor, pipeline, context) in PACKED:
            seen["gradients"][f"packed, {tensor} x {context}"] = packed_documents(folder)
        if context == 4:
            refusal(seen, "pieces", lambda: open_run(contiguous=False))
        if (tensor, pipeline, context) == (2, 1, 1):
            for case in CASES:
                options = WITHOUT if case.endswith("no sequence") else {}
                train(folder, case, seen, "start", 0, case=case, **options)
            others(folder, seen)
        parallel_state.destroy_model_parallel()
        dist.barrier()
        for group in [*dist.distributed_c10d._world.pg_map]:
            if (
                group is not dist.group.WORLD
            ):  # Gloo's threads wake a hundred times a second for each, used or not
                dist.destroy_process_group(group)
    torch.save(seen, folder / f"seen {rank}.pt")
    dist.destroy_process_group()


def open_run(
    case="interdomain", *, kind=None, contiguous=True, transformer_engine=False, tokenizer=None, min_lr=MIN_LR,
    warmup_steps=0, **settings,
):  # fmt: skip
    """A run of a case on these groups. kind: layer_spec's condition, if not that of the case; settings: of `Run`."""
    from megatron.core import parallel_state

    from interdomain.megatron import layer_spec

    from .loop import Run

    config = config_of(case)
    spec = layer_spec(
        kind or config.mixers[0].kind,
        max_seq_len=config.max_seq_len,
        rope_theta=config.rope_theta,
        seed=7,
        contiguous=contiguous,
        transformer_engine=transformer_engine,
    )
    spec.submodules.self_attention.params |= {"mixers": config.mixers, "tokenizer": tokenizer}
    settings = {
        "sequence_parallel": parallel_state.get_tensor_model_parallel_world_size() > 1
    } | settings
    return Run(config, spec, **RATES | dict(min_lr=min_lr, warmup_steps=warmup_steps), **settings)


def batches_of(tokens: torch.Tensor) -> list[torch.Tensor]:
    """This rank's micro-batches of a step."""
    from megatron.core import parallel_state as p

    return list(tokens.split(MICRO)[p.get_data_parallel_rank() :: p.get_data_parallel_world_size()])


def train(folder, name, seen, source, until, *, case="interdomain", **options) -> None:
    """Losses and gradient norms of the steps into seen["losses"][name]; gradients of the first step."""
    run = open_run(case, **options)
    if source == "start":
        run.load_weights(folder / "start" / case / "release")
    else:
        run.load(folder / source / "iter_0000005")
    found = seen["losses"][name] = {}
    if name == "bf16":
        seen["dtypes"] = {n: p.dtype for n, p in run.model.named_parameters()}
    while run.step < max(until, 1):
        tokens = tokens_of(run.step, folder / "corpus" if case == "torchtitan" else None)
        with mock.patch.object(
            InterdomainMixer, "ssm_tensors", side_effect=InterdomainMixer.ssm_tensors
        ) as folds:
            loss = run.gradients(batches_of(tokens))
        seen["folds"].setdefault(name, []).append(folds.call_count)
        if run.step == 0 and name != "bf16":
            seen["gradients"][name] = own_gradients(run)
        if not until:
            break
        step, norm = run.step, run.update()
        found[step] = loss, norm
        if run.step == 5 and name in SOURCES:
            run.save(folder / name / "iter_0000005")
            (folder / name / TRACKER).write_text("5")


def own_gradients(run) -> list[tuple]:
    """(Megatron's name, where it stands in the whole tensor, the shape of that, the numbers) of what this rank has."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in run.ddp.buffers:
        for bucket in buffer.buckets:  # the distributed optimizer has left each rank its share
            shares = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(shares, shares[group.rank()].clone(), group=group)
    # A state has places of the parameters: they hold their gradients meanwhile.
    weights = [p.detach().clone() for p in run.model.parameters()]
    for p in run.model.parameters():
        p.data.copy_(p.main_grad)
    state = run.model.sharded_state_dict()
    apply_factories(state)
    found = []
    for x in nested_values(state):
        if isinstance(x, ShardedTensor) and x.data.is_floating_point():
            found.append((x.key, x.global_offset, x.global_shape, x.data.detach().clone()))
    for p, weight in zip(run.model.parameters(), weights, strict=True):
        p.data.copy_(weight)
    return found


def whole_gradients(config: ModelConfig, parts: list[tuple], form=None) -> dict[str, torch.Tensor]:
    """Gradients of all ranks together, by the plain model's names."""
    whole: dict = {}
    for key, offset, shape, data in parts:
        place = whole.setdefault(key, torch.full(shape, math.nan))
        sizes = (1,) * (len(shape) - data.ndim) + tuple(data.shape)  # a layer's, of stacked ones
        place[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))] = data.view(sizes)
    form = form or ("stacked" if len(config.mixers) == 1 else "by layer")
    return {name: part_of(whole, name, form) for name, _ in meta_model(config).named_parameters()}


def packed_documents(folder: Path) -> list[tuple]:
    """Gradients of the mean loss of a sequence in which documents end at ENDS."""
    from megatron.core.packed_seq_params import PackedSeqParams

    run = open_run()
    run.load_weights(folder / "start" / "interdomain" / "release")
    ends = torch.tensor(ENDS, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=T, max_seqlen_kv=T
    )
    run.ddp.forward = functools.partial(run.ddp.forward, packed_seq_params=packed)
    run.gradients([tokens_of(0)[:1]])
    return own_gradients(run)


def refusal(seen: dict, name: str, function) -> None:
    try:
        function()
    except Exception as e:
        seen["refused"][name] = f"{type(e).__name__}: {e}"


def others(folder: Path, seen: dict) -> None:
    """Initial values, delayed gradients, refusals."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from . import stand_ins

    run = open_run()
    attention = run.model.decoder.layers[1].self_attention
    plain = Transformer(config_of())
    plain.init_weights(7)
    mixer = plain.layers["1"].attention
    rank = attention.tp_group.rank()
    rows = [getattr(mixer, name).weight.chunk(2)[rank] for name in ("wq", "wk", "wv")]
    seen["initial"] = [
        torch.equal(attention.in_proj.weight, torch.cat(rows)),
        torch.equal(attention.out_proj.weight, mixer.wo.weight.chunk(2, 1)[rank]),
        torch.equal(attention.core.ssm.log_dt, mixer.ssm.log_dt.chunk(2)[rank]),
        torch.equal(attention.core.q_conv.weight, mixer.q_conv.weight.chunk(2)[rank]),
    ]
    with_engine = open_run(**ENGINE).model.decoder.layers[1].self_attention
    with_engine.backward_dw()
    seen["delayed"] = [with_engine.in_proj, with_engine.out_proj] == stand_ins.DELAYED

    with torch.no_grad():
        context = StaticInferenceContext(1, T)
        run.model.eval()
        tokens = tokens_of(0)[:1, :-1]
        refusal(seen, "inference", lambda: run.model(tokens, None, None, inference_context=context))
    refusal(seen, "heads", lambda: open_run("kv1"))
    one, other = (
        open_run(tokenizer=x).model.decoder.layers[0].self_attention for x in ("one", "another")
    )
    loaded = {RECORD: other.record.clone()}  # as from a checkpoint, at the end of a sharded load
    refusal(seen, "another tokenizer", lambda: one.load_state_dict(loaded, strict=False))
    refusal(seen, "a norm within in_proj", lambda: open_run("mamba2", kind="interdomain", **ENGINE))
    refusal(
        seen, "another mixer", lambda: run.load_weights(folder / "start" / "hermitian" / "release")
    )


def compute(folder: Path, corpus: Path) -> None:
    """Everything above: forks of one process that has imported Megatron-Core."""
    for case in ("interdomain", "torchtitan", *CASES):
        write_start(folder / "start" / case, case)
    shutil.copytree(corpus, folder / "corpus")
    parent = forks().Process(target=fork_ranks, args=(folder,))
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def fork_ranks(folder: Path) -> None:
    from . import loop  # noqa: F401

    gc.freeze()  # Megatron collects garbage at every save
    torch.multiprocessing.start_processes(run_rank, (folder,), nprocs=RANKS, start_method="fork")


def save_from_forks() -> None:
    """Megatron's own queue of what was written is of a new process, which imports PyTorch anew."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
