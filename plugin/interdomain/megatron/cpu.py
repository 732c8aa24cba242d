"""Megatron-Core without CUDA, over gloo: for trying it out and for tests. Call `install` before process groups are made.

Megatron asks for CUDA where it seeds, allocates buffers and steps the optimizer; `install` replaces functions of torch.cuda and
of Megatron in this process. Softmax attention of Megatron's own does not run here; this project's does.
"""

import functools

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random
from torch import Tensor

from interdomain.model.shard import one_gloo_thread

FACTORIES = ["arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like"]


def _made(factory, *args, device=None, **options):
    """A tensor by one of these, on the CPU where Megatron's code names CUDA."""
    return factory(*args, device="cpu" if str(device).startswith("cuda") else device, **options)


def _type(x, *args, tensor_type=Tensor.type, **options):
    """Tensor.type, whose text Megatron compares with those of CUDA."""
    given = tensor_type(x, *args, **options)
    return given.replace("torch.", "torch.cuda.", 1) if isinstance(given, str) else given


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps its step with the group, as Apex's and Transformer Engine's do: without either of these, Megatron cannot
    load the state of its distributed optimizer."""

    def __init__(self, params, adam_w_mode, **defaults):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            t = group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p] or {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p], mean, square = state, state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (square.sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
                p.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, root, value=-lr / (1 - beta1**t))


def install() -> None:
    one_gloo_thread()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = torch.cuda.default_stream = torch.cpu.current_stream
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # torch.manual_seed keeps a traceback of each call, for when CUDA is there.
    torch.cuda.manual_seed, torch.cuda.synchronize = torch.default_generator.manual_seed, lambda *args, **kwargs: None
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = FusedAdam, True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    for name in FACTORIES:
        setattr(torch, name, functools.partial(_made, getattr(torch, name)))
    for name, method in dict(cuda=lambda x, *_, **__: x, pin_memory=lambda x, *_, **__: x, type=_type).items():
        setattr(Tensor, name, method)
