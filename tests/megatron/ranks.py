"""Computations of four ranks under Megatron-Core, over gloo. Tests read the files they leave."""

import functools
import gc
import math
import multiprocessing
import shutil
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from interdomain.data import PackedDataset, TokenCorpus
from interdomain.megatron.checkpoint import RECORD, TRACKER, part_of, write_checkpoint
from interdomain.model import Transformer, build_config, meta_model
from interdomain.model.mixers.interdomain import InterdomainMixer

from ..model.common import lively, random_tokens, small_config
from ..ranks import be_member, forks

RANKS = 4
MICRO_BATCH = 2
BATCH = 8
T = 32
STEPS = 10
RATES = {"lr": 3e-3, "ssm_lr": 1e-3, "steps": STEPS, "micro_batch": MICRO_BATCH}
MIN_LR = 1e-4
SEED = 42  # debug.seed of TorchTitan's runs
VOCAB = 304  # some more than the tokenizer has
ENDS = (0, 5, 6, 20, T)  # of the documents that a packed sequence has

# The legs of each layout: training runs, and first gradients of models.
LEGS = tomllib.loads(Path(__file__).with_name("legs.toml").read_text())
CASES = LEGS.pop("cases")
for case in CASES:
    LEGS["2 x 1 x 1"][case] = {"case": case}
SOURCES = ("tensor and sequence", "one", "bf16", "transformer engine")  # of resumed legs


def config_of(case="interdomain"):
    if case == "torchtitan":
        return replace(build_config("debug"), vocab_size=VOCAB, max_seq_len=2 * T)
    settings = {"condition": "interdomain", "n_layers": 2} | CASES.get(case, {})
    return small_config(**settings, vocab_size=VOCAB, max_seq_len=T)


def plain_model(case="interdomain"):
    config = config_of(case)
    # The denominator of a normalizing mixer is near zero away from initial values, and float32 too
    # coarse.
    if config.mixers[0].normalize or case == "torchtitan":
        return initial_model(config, SEED)
    return lively(config, torch.float32)


def initial_model(config, seed):
    model = Transformer(config)
    model.init_weights(seed)
    return model


def tokens_of(step, corpus=None):
    """Returns tokens [BATCH, T + 1], or the windows of a corpus that TorchTitan's trainer reads."""
    if corpus is None:
        return random_tokens(config_of(), BATCH, T + 1, seed=step)
    dataset = PackedDataset(TokenCorpus(corpus, "train"), seq_len=2 * T, seed=SEED)
    return torch.from_numpy(dataset.read_batch(range(step * BATCH, (step + 1) * BATCH)))


def write_start(folder, case="interdomain", hybrid=False):
    model = plain_model(case)
    write_checkpoint(folder, model.config, model.state_dict(), hybrid=hybrid)


def run_rank(rank, folder):
    from megatron.core import parallel_state

    save_from_forks()
    seen = {"losses": {}, "gradients": {}, "folds": {}, "refused": {}}
    for layout, legs in LEGS.items():
        tensor, pipeline, context = map(int, layout.split(" x "))
        parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
        for name, leg in legs.items():
            train(folder, name, seen, **leg)
        if context == 4:
            seen["refused"]["pieces"] = error_of(open_run, contiguous=False)
        if layout == "2 x 1 x 1":
            seen["initial"] = own_parts(open_run())
            seen["delayed"] = delayed_linears()
            refusals(folder, seen["refused"])
        parallel_state.destroy_model_parallel()
        dist.barrier()
        # Gloo's threads wake a hundred times a second for each group, used or not.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    torch.save(seen, folder / f"seen {rank}.pt")


def open_run(
    case="interdomain",
    *,
    kind=None,
    contiguous=True,
    transformer_engine=False,
    tokenizer=None,
    min_lr=MIN_LR,
    warmup_steps=0,
    **settings,
):
    """Opens a run of a case on these groups.

    Args:
        kind: The condition of layer_spec. None means the case's.
        settings: More arguments of `Run`.
    """
    from megatron.core import parallel_state

    from interdomain.megatron import layer_spec

    from .loop import Run

    config = config_of(case)
    spec = layer_spec(
        kind or config.mixers[0].kind,
        max_seq_len=config.max_seq_len,
        rope_theta=config.rope_theta,
        seed=SEED,
        contiguous=contiguous,
        transformer_engine=transformer_engine,
    )
    spec.submodules.self_attention.params |= {"mixers": config.mixers, "tokenizer": tokenizer}
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    settings = {"sequence_parallel": tensor_parallel} | settings
    return Run(config, spec, **RATES, min_lr=min_lr, warmup_steps=warmup_steps, **settings)


def batches_of(tokens):
    """Returns this rank's micro-batches of a step."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    return list(tokens.split(MICRO_BATCH)[rank::ranks])


def train(folder, name, seen, *, steps=0, resume=None, case="interdomain", packed=False, **options):
    """Computes a leg: losses and gradient norms by step, and the gradients of the first step.

    Args:
        seen: What this rank has computed, to which the leg's numbers are added.
        steps: The last step. If it is 0, the parameters are not updated.
        resume: The leg whose checkpoint of step 5 is resumed.
        packed: Each rank reads the first sequence, in which documents end at ENDS.
        options: Arguments of `open_run`.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    run = open_run(case, **options)
    if packed:
        ends = torch.tensor(ENDS, dtype=torch.int32)
        documents = PackedSeqParams("thd", ends, ends, max_seqlen_q=T, max_seqlen_kv=T)
        run.ddp.forward = functools.partial(run.ddp.forward, packed_seq_params=documents)
    if resume:
        run.load(folder / resume / "iter_0000005")
    else:
        run.load_weights(folder / "start" / case / "release")
    if name == "bf16":
        seen["dtypes"] = {n: p.dtype for n, p in run.model.named_parameters()}
    seen["losses"][name] = {}
    seen["folds"][name] = []
    corpus = folder / "corpus" if case == "torchtitan" else None
    while run.step < max(steps, 1):
        step = run.step
        tokens = tokens_of(step, corpus)
        batches = [tokens[:1]] if packed else batches_of(tokens)
        ssm_tensors = InterdomainMixer.ssm_tensors
        with mock.patch.object(InterdomainMixer, "ssm_tensors", side_effect=ssm_tensors) as calls:
            loss = run.gradients(batches)
        seen["folds"][name].append(calls.call_count)
        if step == 0 and name != "bf16":
            seen["gradients"][name] = own_gradients(run)
        if steps == 0:
            break
        seen["losses"][name][step] = loss, run.update()
        if run.step == 5 and name in SOURCES:
            run.save(folder / name / "iter_0000005")
            (folder / name / TRACKER).write_text("5")


def own_gradients(run):
    """Returns this rank's parts of the gradients, as `own_parts` does of the parameters."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in run.ddp.buffers:
        for bucket in buffer.buckets:  # the distributed optimizer has left each rank its share
            shares = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(shares, shares[group.rank()].clone(), group=group)
    # A state has places of the parameters: they are their gradients meanwhile.
    weights = []
    for p in run.model.parameters():
        weights.append(p.data)
        p.data = p.main_grad
    parts = own_parts(run)
    for p, weight in zip(run.model.parameters(), weights, strict=True):
        p.data = weight
    return parts


def own_parts(run):
    """Returns this rank's parts: (Megatron's name, offsets, the tensor's shape, numbers)."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = run.model.sharded_state_dict()
    apply_factories(state)
    parts = []
    for x in nested_values(state):
        if isinstance(x, ShardedTensor) and x.data.is_floating_point():
            parts.append((x.key, x.global_offset, x.global_shape, x.data.detach().clone()))
    return parts


def whole_tensors(config, parts, form=None):
    """Returns the tensors that the parts of all ranks make, by the plain model's names."""
    whole = {}
    for key, offsets, shape, data in parts:
        tensor = whole.setdefault(key, torch.full(shape, math.nan))
        # A layer's tensor lacks the dimension in which layers are stacked.
        data = data.view((1,) * (len(shape) - data.ndim) + data.shape)
        place = [slice(first, first + n) for first, n in zip(offsets, data.shape, strict=True)]
        tensor[tuple(place)] = data
    if form is None:
        form = "stacked" if len(config.mixers) == 1 else "by layer"
    return {name: part_of(whole, name, form) for name, _ in meta_model(config).named_parameters()}


def delayed_linears():
    """Returns the names of the linears whose weights' gradients the layer delays."""
    from . import stand_ins

    attention = open_run(transformer_engine=True).model.decoder.layers[1].self_attention
    attention.backward_dw()
    return [name for name, linear in attention.named_modules() if linear in stand_ins.DELAYED]


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(folder, refused):
    from megatron.core.inference.contexts import StaticInferenceContext

    run = open_run()
    run.model.eval()
    tokens = tokens_of(0)[:1, :-1]
    context = StaticInferenceContext(1, T)
    with torch.no_grad():
        refused["inference"] = error_of(run.model, tokens, None, None, inference_context=context)
    options = {"kind": "interdomain", "transformer_engine": True}
    refused["a norm within in_proj"] = error_of(open_run, "mamba2", **options)
    hermitian = folder / "start" / "hermitian" / "release"
    refused["another mixer"] = error_of(run.load_weights, hermitian)
    # The record of another tokenizer, as at the end of a sharded load.
    one = open_run(tokenizer="one").model.decoder.layers[0].self_attention
    another = open_run(tokenizer="another").model.decoder.layers[0].self_attention
    state = {RECORD: another.record.clone()}
    refused["another tokenizer"] = error_of(one.load_state_dict, state, strict=False)


def compute(folder, corpus):
    """Runs the ranks: forks of one process that has imported Megatron-Core."""
    for case in ("interdomain", "torchtitan", *CASES):
        write_start(folder / "start" / case, case)
    shutil.copytree(corpus, folder / "corpus")
    parent = forks().Process(target=fork_ranks, args=(folder,))
    parent.start()
    parent.join()
    assert parent.exitcode == 0


def fork_ranks(folder):
    from . import cpu, loop, stand_ins  # noqa: F401

    warnings.simplefilter("ignore")
    cpu.install()
    stand_ins.install()
    gc.freeze()  # Megatron collects garbage at every save
    arguments = (run_rank, RANKS, folder)
    torch.multiprocessing.start_processes(be_member, arguments, nprocs=RANKS, start_method="fork")


def save_from_forks():
    """Replaces Megatron's queue of written files, whose process would import PyTorch anew."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
