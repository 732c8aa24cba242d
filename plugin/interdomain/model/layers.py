"""Small modules of the model: PyTorch's own, and the parameters and tables of what stands between projections and scan.

`interdomain.features` computes the latter, but for the feature maps here. The module that holds a layer draws its values.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .shard import Part, scatter_tokens, shard_of

# Shapes: B batch, T time, H heads, R head_dim, W convolution width, E channels.


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Data type that autocast rounds x to for a product; None where autocast is off, or x float64."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class KeptInFloat32(nn.Module):
    """A module whose parameters and buffers `half()`, `to(torch.bfloat16)` and the like move, but do not round."""

    def _apply(self, fn, recurse=True):
        def moved(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(moved, recurse)


class LocalParameters(nn.Module):
    """Base of the modules whose parameters tensor parallelism makes DTensors: they compute with `local` of each.

    Attributes:
        local_weight, local_bias: this rank's slice as a plain tensor, where the parameter is a DTensor; set before each forward
            pass. None: the parameter is a plain tensor. Buffers, whose shapes torch.compile takes as fixed.
    """

    weight: nn.Parameter
    local_weight: Tensor | None
    local_bias: Tensor | None

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_buffer("local_weight", None, persistent=False)
        self.register_buffer("local_bias", None, persistent=False)

    def reset_parameters(self) -> None:
        """Nothing: the module that holds it draws its values (`initialize`)."""

    def local(self, name: str = "weight") -> Any:
        local = getattr(self, f"local_{name}")
        return getattr(self, name) if local is None else local


class Embedding(LocalParameters, nn.Embedding):
    """tokens [B, T] -> [B, T, dim]. With `heads`: from its part of the rows to its part of the tokens, [B, T / size, dim]."""

    heads: Part | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.local()
        if self.heads is None:
            return F.embedding(tokens, rows)
        tokens = tokens - self.heads.rank * len(rows)
        elsewhere = (tokens < 0) | (tokens >= len(rows))
        rows_of_tokens = F.embedding(tokens.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0)
        return scatter_tokens(rows_of_tokens, self.heads)


class Linear(LocalParameters, nn.Linear):
    """Without a bias."""

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
    """Parameters of a causal depthwise convolution over time (paper eq. 10, SC), W + 1 per channel."""

    def __init__(self, channels: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias: Any = nn.Parameter(torch.empty(channels)) if bias else None


def widened(x: Tensor) -> Tensor:
    """x in float32 for arithmetic that bf16 would spoil; a float64 model stays float64 throughout."""
    return x if x.dtype == torch.float64 else x.float()


def rope_tables(
    positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles at integer `positions` [T] or [B, T], each [..., T, 1, head_dim / 2] of `dtype`.

    Angles are float64: a float32 one is off by 2e-4 radians at position 4096 and by 0.06 at a million.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None, None] * theta ** (-pairs / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rope_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rope_tables` of a model that computes in this dtype: float32, or float64 for that."""
    return rope_tables(positions, config.head_dim, config.rope_theta, torch.promote_types(dtype, torch.float32))


class FeatureMap(KeptInFloat32):
    """xi of paper eq. 3 as a function of R numbers: x [B, T, H, R] -> [B, T, H, R], of queries or of keys.

    heads: which part of the heads x has, where a model computes a part.
    """

    def forward(self, x: Tensor, heads: Part | None = None, *, query: bool = False) -> Tensor:
        raise NotImplementedError


POINTWISE = {  # positive functions of a number
    "elu": lambda y: F.relu(y) + y.clamp(max=0).exp(),  # elu + 1. F.elu(y) + 1 would round to zero below -17
    "softplus": F.softplus,
}


class PointwiseFeatures(FeatureMap):
    """xi(x) = f(x) / sqrt(R), positive: f is elu + 1 (Katharopoulos et al., 2020) or softplus."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, heads: Part | None = None, *, query: bool = False) -> Tensor:
        return (POINTWISE[self.name](widened(x)) * x.shape[-1] ** -0.5).to(x.dtype)


class RandomFeatures(FeatureMap):
    """Base of the maps by projections on random vectors w.

    The vectors are drawn once and fixed (a buffer, [H_kv, vectors, R]); query heads of a group use those of their keys, or the
    inner product would estimate nothing.
    """

    def __init__(self, n_kv_heads: int, vectors: int, head_dim: int) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(n_kv_heads, vectors, head_dim, dtype=torch.float32))

    def projected(self, x: Tensor, heads: Part | None) -> Tensor:
        """w.x, [B, T, H, vectors], of x [B, T, H, R] with H a multiple of H_kv, or `heads` of them."""
        B, T, H, R = x.shape
        frequencies = shard_of(self.frequencies, heads)
        groups = widened(x).view(B, T, len(frequencies), -1, R)
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("bthgr,hfr->bthgf", groups, frequencies.to(groups.dtype)).reshape(B, T, H, -1)


class RandomFourierFeatures(RandomFeatures):
    """xi(x) = sqrt(2 / R) [cos(w.x), sin(w.x)] of R / 2 vectors (paper eq. 5): xi(x).xi(y) estimates a Gaussian kernel."""

    def forward(self, x: Tensor, heads: Part | None = None, *, query: bool = False) -> Tensor:
        angles = self.projected(x, heads)
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * (2 / x.shape[-1]) ** 0.5).to(x.dtype)


class PositiveRandomFeatures(RandomFeatures):
    """xi(x) = exp(w.x - |x|^2 / (2 sqrt(R))) / sqrt(R) of R orthogonal vectors (FAVOR+, Choromanski et al., 2021).

    xi(q).xi(k) estimates exp(q.k / sqrt(R)), without bias over the draws. A query's features are divided by the largest of
    them, which cancels in paper eq. 4. A key's keep their scale, for a factor of its own would be a weight. They cannot grow
    with the key: their exponent is at most sqrt(R) |w|^2 / 2, about 32 for R = 64. Near overflow it is cut off.
    """

    def forward(self, x: Tensor, heads: Part | None = None, *, query: bool = False) -> Tensor:
        R, exponent = x.shape[-1], self.projected(x, heads)
        if query:
            exponent = exponent - exponent.detach().amax(dim=-1, keepdim=True)
        else:
            exponent = exponent - widened(x).square().sum(-1, keepdim=True) / (2 * R**0.5)
            exponent = exponent.clamp(max=0.7 * math.log(torch.finfo(x.dtype).max))  # 62 in bfloat16 and float32
        return (exponent.exp() * R**-0.5).to(x.dtype)


def feature_map(name: str, n_kv_heads: int, head_dim: int) -> FeatureMap | None:
    """The map `MixerConfig.feature_map`; None for `silu`, which `interdomain.features` computes. Raises: ValueError."""
    if name == "silu":
        return None
    if name == "rff":
        return RandomFourierFeatures(n_kv_heads, head_dim // 2, head_dim)
    if name == "favor":
        return PositiveRandomFeatures(n_kv_heads, head_dim, head_dim)
    if name in POINTWISE:
        return PointwiseFeatures(name)
    raise ValueError(f"there is no feature map {name!r}: use one of silu, rff, favor, {', '.join(POINTWISE)}.")


class InputNorm(LocalParameters):
    """Parameters of RMSNorm over R, scale shared by the heads, plus a bias per head (paper eq. 12): R + H R.

    The paper's text gives every head a scale of its own; its parameter counts leave no room for that.
    """

    def __init__(self, n_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.bias = nn.Parameter(torch.empty(n_heads, head_dim))
