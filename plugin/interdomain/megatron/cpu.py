"""Megatron-Core on a machine without CUDA, over gloo: for trying it out and for tests. Call `install()` before anything else of
Megatron is imported: it replaces functions of torch.cuda in this process.

Stock Megatron asks for CUDA where it seeds, allocates buffers and steps the optimizer. Softmax attention of Megatron's own does
not run here; this project's does.
"""

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _OnCPU(TorchFunctionMode):
    """Takes the CPU where Megatron's code names CUDA: as a device, by `.cuda()`, and in types that it compares as text."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs["device"] = CPU
        if func is torch.device and str(args[0]).startswith("cuda"):
            return CPU
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    """A stream that has nothing to wait for."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps its step with the group, as Apex's and Transformer Engine's do: without either of these, Megatron cannot
    load the state of its distributed optimizer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            t = group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5).add_(group["eps"])
                p.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**t))


def install() -> None:
    torch.cuda.current_device = lambda: CPU
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: _Stream()
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.is_current_stream_capturing = lambda: False
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = FusedAdam, True, True
    _OnCPU().__enter__()
