"""Small modules of the model: PyTorch's own, and the parameters and tables of what stands between projections and scan.

`interdomain.features` and `feature_maps.py` compute the latter. The module that holds a layer draws its values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .feature_maps import normed, rope_tables
from .shard import Part

# Shapes: B batch, T time, H heads, R head_dim, W convolution width, E channels.


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Data type that autocast rounds x to for a product; None where autocast is off, or x float64."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class LocalParameters(nn.Module):
    """Base of the modules whose parameters tensor parallelism makes DTensors: they compute with `local` of each.

    Attributes:
        local_weight, local_bias: this rank's slice as a plain tensor, where the parameter is a DTensor; set before each forward
            pass. None: the parameter is a plain tensor. Buffers, whose shapes torch.compile takes as fixed.
        whole: True where every rank has all of a matrix that is split by its name (`shard.split_dimension`).
    """

    whole: bool = False
    weight: nn.Parameter
    local_weight: Tensor | None
    local_bias: Tensor | None

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_buffer("local_weight", None, persistent=False)
        self.register_buffer("local_bias", None, persistent=False)

    def reset_parameters(self) -> None:
        """Do nothing: the module that holds this one draws its values (`initialize`)."""

    def local(self, name: str = "weight") -> Any:
        local = getattr(self, f"local_{name}", None)
        return getattr(self, name) if local is None else local


class Embedding(LocalParameters, nn.Embedding):
    """tokens [B, T] -> [B, T, dim]. With `heads`: from its part of the rows to its part of the tokens, [B, T / size, dim]."""

    heads: "Part | None" = None

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.local()
        if self.heads is None:
            return F.embedding(tokens, rows)
        tokens = tokens - self.heads.rank * len(rows)
        elsewhere = (tokens < 0) | (tokens >= len(rows))
        rows_of_tokens = F.embedding(tokens.masked_fill(elsewhere, 0), rows).masked_fill(
            elsewhere[..., None], 0
        )
        return self.heads.scatter_tokens(rows_of_tokens)


class Linear(LocalParameters, nn.Linear):
    """Linear layer without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.local())


class RMSNorm(LocalParameters, nn.RMSNorm):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.normalized_shape, self.local(), self.eps)
        # Products read it: rounded here, it is rounded and kept for the backward pass once, not by each of them.
        rounded = autocast_dtype(x)
        return y if rounded is None else y.to(rounded)


class ShortConv(LocalParameters):
    """Parameters of a causal depthwise convolution over time (paper eq. 10, SC), W + 1 per channel: (weight, bias) by a call,
    around which accelerate brings what it has offloaded."""

    def __init__(self, channels: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias: Any = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self) -> tuple[Tensor, Any]:
        return self.local(), self.local("bias")


def rope_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rope_tables` of a model that computes in this dtype: float32, or float64 for that."""
    return rope_tables(
        positions, config.head_dim, config.rope_theta, torch.promote_types(dtype, torch.float32)
    )


class InputNorm(LocalParameters):
    """Parameters of RMSNorm over R, scale shared by the heads, plus a bias per head (paper eq. 12): R + H R. Called, it returns
    (weight, bias), as ShortConv.

    The paper's text gives every head a scale of its own; its parameter counts leave no room for that.
    """

    def __init__(self, n_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.bias = nn.Parameter(torch.empty(n_heads, head_dim))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.local(), self.local("bias")


class OutputNorm(LocalParameters):
    """`MixerConfig.output_norm` of each head, o [B, T, H, D] -> [B, T, H, D]; its scale is shared by the heads."""

    def __init__(self, head_dim: int, eps: float, *, soft: bool) -> None:
        super().__init__()
        self.eps = eps
        self.soft = soft
        self.weight = nn.Parameter(torch.empty(head_dim))

    def forward(self, o: Tensor) -> Tensor:
        return normed(o, self.local(), self.eps, self.soft)
