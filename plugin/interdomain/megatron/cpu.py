"""Megatron-Core without CUDA, over gloo: for trying it out and for tests. Call `install` before process groups are made.

Megatron asks for CUDA where it seeds, allocates buffers and steps the optimizer; `install` replaces functions of torch.cuda and
of Megatron in this process. Softmax attention of Megatron's own does not run here; this project's does.
"""

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

from interdomain.model.shard import one_gloo_thread


class _OnCPU(TorchFunctionMode):
    """Takes the CPU where Megatron's code names CUDA: as a device, by `.cuda()`, and in types that it compares as text."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


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
    torch.cuda.manual_seed, torch.cuda.synchronize = torch.manual_seed, lambda *args, **kwargs: None
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = FusedAdam, True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    _OnCPU().__enter__()
