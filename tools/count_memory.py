"""python -m interdomain.tools.count_memory --prompts 8x16384 1x131072

Count, without a GPU, the memory that reading a prompt takes at its peak on one: the model and the launch code of its kernels
run on tensors without data, no kernel is launched, and the bytes of what is alive are added up. With --training, of a
training step instead: activations and loss, beside what the dry run estimates.
"""

import argparse
import contextlib
import re
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interdomain import features, scan
from interdomain.model import (
    CONDITIONS,
    SIZES,
    Execution,
    ModelConfig,
    Transformer,
    build_config,
    count_parameters,
    meta_model,
)
from interdomain.model.config import PRECISIONS
from interdomain.model.flops import memory_estimate
from interdomain.model.generation import PREFILL_CHUNK, prefill

from ._cli import argument_parser, user_errors
from .bench_inference import model_bytes

MODES = ("none", "selective", "full")  # of activation checkpointing
BLOCK = 512  # bytes: PyTorch's allocator hands out multiples
META, CUDA = torch.device("meta"), torch.device("cuda", 0)
# Of an H100 or H200: how the kernels are launched depends on them.
CAPABILITY, PROPERTIES = (9, 0), SimpleNamespace(multi_processor_count=132)


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors without data that are made in it: `live` now, and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(out):
            storage = x.untyped_storage()
            if x.device == META and storage._cdata not in given | self._known.keys():
                self._made(storage)
        return out

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // BLOCK) * BLOCK

        def freed(_):
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


class OnCUDA(TorchFunctionMode):
    """Tensors without data say that they are on CUDA, where two functions of PyTorch allocate otherwise than elsewhere."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _flash_attention(*args, **kwargs)
        if func is F.linear and torch.is_autocast_enabled("cuda"):
            args = tuple(x.to(torch.get_autocast_dtype("cuda")) for x in args[:2])
        if func is F.rms_norm:
            return _FusedRMSNorm.apply(args[0], kwargs["weight"])
        out = func(*map(_here, args), **{name: _here(x) for name, x in kwargs.items()})
        return CUDA if func == torch.Tensor.device.__get__ and out == META else out


def _here(x):
    return META if isinstance(x, torch.device) and x.type == "cuda" else x


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask=None, is_causal=False, **options) -> Tensor:
    """As cuDNN's, too: the output, laid out by token, and a float32 per query."""
    if attn_mask is not None:
        raise NotImplementedError("attention under a mask of its own is not counted")
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[0]


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx, by_out):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _tensors(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@contextlib.contextmanager
def without_gpu(inside: bool = True) -> Iterator[None]:
    """In it, tensors without data take the way of CUDA, up to the launch of a Triton kernel. inside: what our ops allocate for
    themselves is counted, and nothing can be differentiated; else, what they return."""
    try:
        from interdomain.scan.triton_launch import expand_kernel
    except ImportError as e:
        raise ValueError("the launch code cannot be run: Triton is not installed. pip install triton") from e
    ops = [(scan.ops, "scan"), (scan.ops, "linear_scan"), (features.ops, "features")]
    stand_ins = [
        # What an op allocates inside would be left out: run the function that it was made of.
        *((room, name, getattr(room, name)._init_fn) for room, name in ops if inside),
        (type(expand_kernel), "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None),
        (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
        (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
        *((torch.cuda, name, contextlib.nullcontext) for name in ("device", "device_of")),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_: True),
        # Which PyTorch cannot make in a mode. Attention allocates the same with it and without.
        (bias, "causal_lower_right", lambda *lengths: None),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, stand_in in stand_ins:
            stack.enter_context(patch.object(place, name, stand_in))
        with OnCUDA():
            yield


def _model(config: ModelConfig, precision: str) -> Transformer:
    with META:
        model = Transformer(config, Execution(bf16_products=precision == "bf16-products"))
    return model.to(torch.bfloat16) if precision == "bf16" else model


def prefill_bytes(config: ModelConfig, batch: int, length: int, chunk: int, precision: str = "bf16") -> int:
    """At the peak of reading tokens [batch, length] in pieces of `chunk`, weights and state or cache included."""
    model = _model(config, precision)
    tokens = torch.empty(batch, length, dtype=torch.int64, device=META)
    with without_gpu(), LiveBytes() as count:
        prefill(model, tokens, chunk=chunk)
    return model_bytes(model) + count.peak


def training_bytes(
    config: ModelConfig, batch: int, length: int, checkpointing: str = "none", precision: str = "bf16"
) -> int:
    """At the peak of forward and backward pass of tokens [batch, length], not compiled, without parameters and gradients.

    checkpointing: none, selective or full. Not counted: what the kernels of the scan and the features allocate inside.
    """
    model = _model(config, precision)
    if checkpointing != "none":
        from interdomain.titan.parallelize import ActivationCheckpoint, checkpoint_blocks

        settings = ActivationCheckpoint(mode=checkpointing, selective_ac_option="op", determinism_check="none")
        checkpoint_blocks(model, settings)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # FSDP2 reduces it right away
    tokens = torch.empty(batch, length, dtype=torch.int64, device=META)
    with without_gpu(inside=False), LiveBytes() as count:
        loss = model(tokens, labels=tokens)
        # loss.backward(), in which blocks that are computed again would not be under OnCUDA.
        one = torch.empty((), device=META)
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    return count.peak


def cells(args: argparse.Namespace, condition: str, batch: int, length: int) -> Iterator[tuple[str, str]]:
    """(what is counted, GiB) of one condition and [batch, length] tokens; in brackets what the dry run estimates."""
    config = build_config(args.size, condition)
    if not args.training:
        for way, chunk in ("whole", length), ("chunked", PREFILL_CHUNK):
            yield f"{condition} {way}", f"{prefill_bytes(config, batch, length, chunk, args.precision) / 2**30:.2f}"
        return
    for mode in MODES:
        how = dict(checkpointing=mode, precision=args.precision)
        parts = memory_estimate(
            config, count_parameters(meta_model(config)), shards=1, local_batch=batch, seq_len=length, **how
        )
        counted, estimated = training_bytes(config, batch, length, **how), parts["activations"] + parts["loss"]
        yield f"{condition} {mode}", f"{counted / 2**30:.2f} ({estimated / 2**30:.2f})"


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    p.add_argument("--size", default="1.3B", choices=tuple(SIZES), help="default %(default)s")
    p.add_argument("--conditions", nargs="+", choices=tuple(CONDITIONS), default=("interdomain", "softmax"))
    p.add_argument("--prompts", nargs="+", default=["8x4096"], help="sequences x tokens; default 8x4096")
    p.add_argument("--training", action="store_true", help="a step on --prompts, by activation checkpointing")
    p.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default %(default)s")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    what = "activations and loss of a training step (estimated)" if args.training else "at the peak of reading a prompt"
    print(f"{args.size}, {args.precision}: GiB, {what}, counted, not measured\n")
    for prompt in args.prompts:
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", prompt):
            raise ValueError(f"--prompts: {prompt!r} is no BxT, sequences x tokens, such as 8x4096.")
        found = dict(cell for c in args.conditions for cell in cells(args, c, *map(int, prompt.split("x"))))
        if prompt == args.prompts[0]:
            print(f"| prompt | {' | '.join(found)} |\n{'|---' * (1 + len(found))}|")
        print(f"| {prompt} | {' | '.join(found.values())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
