"""Initial values: a pure function of the seed and the parameter's name.

They are the same on every device and for every topology.

Each tensor is drawn whole, on the CPU, from a generator seeded by its name; a sharded parameter
keeps its slice. Neither world size nor device nor order of construction changes a single bit.
Another kind of processor does: PyTorch draws normal numbers with vectorised functions, and the last
bits of a third of them differ between x86-64 and aarch64.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import starmap

import torch
from torch import Tensor, nn

from interdomain.scan.tables import initial_A

from .config import ModelConfig
from .feature_maps import FEATURE_MAPS
from .settings import OUTPUT_NORM_SCALE, readout_std

_LAYER = re.compile(r"layers\.(\d+)\.")
# What torch.compile and activation checkpointing add to the names of parameters.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


def clean_name(name: str) -> str:
    """Returns a parameter's name in the model without wrappers, such as those of torch.compile."""
    return _WRAPPERS.sub("", name)


@torch.no_grad()
def initialize(
    module: nn.Module,
    config: ModelConfig,
    seed: int | None = None,
    prefix: str = "",
    *,
    parameters: bool = True,
    draw_all: Callable[..., Iterable[Tensor]] = starmap,
) -> None:
    """Sets every parameter and buffer of a model or of a part of one.

    Tensors on the meta device are left alone.

    Args:
        module: The model, or a part of it.
        config: The configuration of the model.
        seed: The seed. None takes one from PyTorch's global generator, so that a constructor
            follows torch.manual_seed, as those of PyTorch's modules do.
        prefix: The name of the module in the model, with a dot; empty for the model.
        parameters: False if a checkpoint will replace all parameters: they are NaN until then.
            Buffers are set anyway.
        draw_all: Called with (draw, [(name, shape), ...]); returns the tensors draw(name, shape) in
            order. The largest come first. Ranks can share the work with a function of their own.
    """
    # The tensors to set, and the seed.
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = [(name, tensor) for name, tensor in named if not tensor.is_meta]
    if seed is None:
        seed = int(torch.randint(2**62, (), device="cpu")) if tensors else 0
    if not parameters:
        # NaN shows a parameter that the checkpoint did not replace.
        for _, tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                tensor.fill_(math.nan)
        tensors = [(n, t) for n, t in tensors if not isinstance(t, nn.Parameter)]
    tensors.sort(key=lambda item: -item[1].numel())

    # Draw each tensor whole, and copy this rank's slice of it.
    wanted = [(prefix + clean_name(name), tensor.shape) for name, tensor in tensors]
    values = draw_all(partial(initial_value, config=config, seed=seed), wanted)
    for (_, tensor), full in zip(tensors, values, strict=True):
        # A DTensor. Its module takes a second to import, so it is imported only if there is one.
        if hasattr(tensor, "placements"):
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(tensor, DTensor)
            # src_data_rank=None: every rank has the same full tensor and slices it, without
            # communication.
            full = distribute_tensor(
                full.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        tensor.copy_(full)


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Draws a parameter or buffer.

    Args:
        name: Its name in the model, such as "layers.0.attention.wq.weight".
        shape: Its whole shape.
        config: The configuration of the model.
        seed: The seed.
    Returns:
        A float32 tensor on the CPU.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # Whatever the default device and dtype are, the numbers are drawn in float32 on the CPU.
    cpu = {"device": "cpu", "dtype": torch.float32}
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def normal(std: float) -> Tensor:
        return torch.empty(shape, **cpu).normal_(0.0, std, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(shape, **cpu).uniform_(low, high, generator=generator)

    # The rule depends on the names of the module and of the tensor in it, and on the mixer of the
    # tensor's layer.
    match_of_layer = _LAYER.match(name)
    layer = int(match_of_layer[1]) if match_of_layer else 0
    mixer = config.layers[layer].mixer
    path, _, leaf = name.rpartition(".")
    module = path.rpartition(".")[2]
    match module, leaf:
        case "wo" | "w2", "weight":
            # The output projections of the residual path (paper, backbone details).
            return normal(0.02 / math.sqrt(2 * config.n_layers))
        case ("q_conv" | "k_conv" | "v_conv" | "conv", _):
            # PyTorch's default for Conv1d, whose fan-in is the width.
            bound = 1 / math.sqrt(mixer.conv_past + 1)
            return uniform(-bound, bound)
        case ("norm" | "attention_norm" | "ffn_norm" | "k_norm" | "v_norm", "weight") | (
            "ssm",
            "D",
        ):
            return torch.ones(shape, **cpu)
        case "o_norm", "weight":
            scale = mixer.output_norm_scale or OUTPUT_NORM_SCALE[mixer.output_norm]
            return torch.full(shape, scale, **cpu)
        case ("k_norm" | "v_norm", "bias") | (_, "gate_bias"):
            return torch.zeros(shape, **cpu)
        case "ssm", "log_dt":
            return uniform(math.log(mixer.dt_min), math.log(mixer.dt_max))
        case "ssm", "A_log":
            # The ranges of Mamba-2 and of gated DeltaNet.
            lowest = 1.0 if mixer.kind == "mamba2" else 0.0
            return uniform(lowest, 16.0).log()
        case "ssm", "dt_bias":
            # Delta is softplus of it, and starts log-uniform.
            dt = uniform(math.log(mixer.dt_min), math.log(mixer.dt_max)).exp()
            return dt + (-torch.expm1(-dt)).log()
        case "ssm", "log_A_real" | "A_imag":
            log_real, imag = initial_A(mixer.a_init, mixer.n_basis)
            A = imag if leaf == "A_imag" else log_real
            return A.float().expand(shape).clone()
        case "ssm", "C" | "c":
            return normal(readout_std(mixer, leaf))
        case "feature_map", "frequencies":
            # Spectral density of exp(-|x|^2 / (2 sqrt(R))): the scale at which softmax compares
            # queries and keys.
            feature_map = FEATURE_MAPS[mixer.feature_map]
            assert feature_map is not None
            return feature_map.drawn(normal(config.head_dim**-0.25))
        case "tok_embeddings" | "output" | "wq" | "wk" | "wv" | "wg" | "w1" | "w3", "weight":
            return normal(0.02)
        case "wa" | "wb" | "gate_down" | "gate_up", "weight":
            # The gates of the fixed-state baselines.
            return normal(0.02)
    raise AssertionError(f"no initialisation rule for {name}")
