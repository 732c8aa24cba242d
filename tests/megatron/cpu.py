"""Megatron-Core without CUDA, over gloo. Call `install` before process groups are made.

Megatron asks for CUDA when it seeds, allocates buffers and steps the optimizer. `install` replaces
functions of torch.cuda and of Megatron in this process. This project's softmax attention runs so,
Megatron's own does not.
"""

import functools

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.optim.adamw import adamw

from interdomain.patches import one_gloo_thread

FACTORIES = "arange empty empty_like full ones rand randn tensor zeros zeros_like"


def on_cpu(factory, *args, device=None, **options):
    if str(device).startswith("cuda"):
        device = "cpu"
    return factory(*args, device=device, **options)


def type_as_of_cuda(x, *args, tensor_type=Tensor.type, **options):
    """Does what Tensor.type does. Megatron compares its text with CUDA's."""
    result = tensor_type(x, *args, **options)
    if isinstance(result, str):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def same_tensor(x, *args, **options):
    return x


def nothing(*args, **options):
    pass


def cpu_device():
    return torch.device("cpu")


def get_rng_state(*args, **options):
    return torch.get_rng_state()


def set_rng_state(state, *args, **options):
    torch.set_rng_state(state)


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps its step with the group, as Apex's and Transformer Engine's do.

    Megatron cannot load the state of its distributed optimizer with PyTorch's.
    """

    def __init__(self, params, adam_w_mode, **defaults):
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            steps_before = group.get("step", 0)
            group["step"] = steps_before + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                adamw(
                    [p],
                    [p.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(steps_before))],
                    amsgrad=False,
                    maximize=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )


def install():
    one_gloo_thread()
    cuda = torch.cuda
    cuda.current_device = cpu_device
    cuda.current_stream = torch.cpu.current_stream
    cuda.default_stream = torch.cpu.current_stream
    cuda.get_rng_state = get_rng_state
    random._get_cuda_rng_state = get_rng_state
    random._set_cuda_rng_state = set_rng_state
    # torch.manual_seed keeps a traceback of each call.
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.synchronize = nothing
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    for name in FACTORIES.split():
        setattr(torch, name, functools.partial(on_cpu, getattr(torch, name)))
    Tensor.cuda = same_tensor
    Tensor.pin_memory = same_tensor
    Tensor.type = type_as_of_cuda
