"""Functions of queries and keys in plain PyTorch: rotary angles, feature maps, and the ratio that `normalize` asks for."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Shapes: B batch, T time, H heads, R head_dim.

MAX_GAIN = 16.0  # of the normalised readout: how much larger than the token's own value it may be


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


class KeptInFloat32(nn.Module):
    """A module whose parameters and buffers `half()`, `to(torch.bfloat16)` and the like move, but do not round."""

    def _apply(self, fn, recurse=True):
        def moved(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(moved, recurse)

    def check_float32(self) -> None:
        """Raises ValueError if a wrapper has rounded a parameter or buffer for this pass."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{type(self).__name__}.{name} is {tensor.dtype}, and must stay float32: bfloat16 rounds a decay of 0.999 "
                    "to 1. A wrapper's mixed precision has rounded it. With FSDP2, first shard these modules in groups of "
                    "their own, without a policy: `for module in float32_modules(model): fully_shard(module)`. The package "
                    "has this function in `interdomain.model`; an exported model has the method `float32_modules()`."
                )


def float32_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters must not be rounded: FSDP2 is to shard them before the layers, without a `param_dtype`."""
    return [
        m
        for m in model.modules()
        if isinstance(m, KeptInFloat32) and any(True for _ in m.parameters())
    ]


class FeatureMap(KeptInFloat32):
    """xi of paper eq. 3 as a function of R numbers, in plain PyTorch on every device. FEATURE_MAPS has all of them.

    Attributes of a class:
        about: a few words, for the help of `mixer.feature_map`.
        needs_ratio: a query's features have a factor that cancels only in the ratio of eq. 9 (`mixer.normalize`).
        vectors: random vectors of each head of keys, as a share of R.
    """

    about = ""
    needs_ratio = False
    vectors = 0.0

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        super().__init__()

    @staticmethod
    def drawn(normal: Tensor) -> Tensor:
        """The random vectors [H_kv, vectors, R], made of normal ones with variance R^(-1/2)."""
        return normal

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        """x [B, T, H, R], queries or keys -> [B, T, H, R] in x's dtype.

        heads: which part of the heads x has (`shard.Part`), where a model computes a part.
        """
        raise NotImplementedError


class PointwiseFeatures(FeatureMap):
    """xi(x) = f(x) / sqrt(R), of a positive function f of a number."""

    f: Any

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        return (self.f(widened(x)) * x.shape[-1] ** -0.5).to(x.dtype)


class EluFeatures(PointwiseFeatures):
    about = "elu + 1, positive"  # Katharopoulos et al., 2020
    f = staticmethod(
        lambda y: F.relu(y) + y.clamp(max=0).exp()
    )  # F.elu(y) + 1 would round to zero below -17


class SoftplusFeatures(PointwiseFeatures):
    about = "positive"
    f = staticmethod(F.softplus)


class RandomFeatures(FeatureMap):
    """Base of the maps by projections on random vectors w.

    The vectors are drawn once and fixed (a buffer, [H_kv, vectors, R]); query heads of a group use those of their keys, or the
    inner product would estimate nothing.
    """

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        super().__init__(n_kv_heads, head_dim)
        self.frequencies: Tensor
        shape = n_kv_heads, int(self.vectors * head_dim), head_dim
        self.register_buffer("frequencies", torch.empty(shape, dtype=torch.float32))

    def projected(self, x: Tensor, heads: Any) -> Tensor:
        """w.x, [B, T, H, vectors], of x [B, T, H, R] with H a multiple of H_kv, or `heads` of them."""
        self.check_float32()
        B, T, H, R = x.shape
        frequencies = (
            self.frequencies if heads is None else self.frequencies.chunk(heads.size)[heads.rank]
        )
        groups = widened(x).view(B, T, len(frequencies), -1, R)
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("bthgr,hfr->bthgf", groups, frequencies.to(groups.dtype)).reshape(
                B, T, H, -1
            )


class RandomFourierFeatures(RandomFeatures):
    """xi(x) = sqrt(2 / R) [cos(w.x), sin(w.x)] of R / 2 vectors (paper eq. 5): xi(x).xi(y) estimates a Gaussian kernel."""

    about = "random Fourier features; paper eq. 5"
    vectors = 0.5

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        angles = self.projected(x, heads)
        return (torch.cat([angles.cos(), angles.sin()], dim=-1) * (2 / x.shape[-1]) ** 0.5).to(
            x.dtype
        )


class PositiveRandomFeatures(RandomFeatures):
    """xi(x) = exp(w.x - |x|^2 / (2 sqrt(R))) / sqrt(R) of R orthogonal vectors (FAVOR+, Choromanski et al., 2021).

    xi(q).xi(k) estimates exp(q.k / sqrt(R)), without bias over the draws. A query's features are divided by the largest of
    them, which cancels in paper eq. 4. A key's keep their scale, for a factor of its own would be a weight. They cannot grow
    with the key: their exponent is at most sqrt(R) |w|^2 / 2, about 32 for R = 64. Near overflow it is cut off.
    """

    about = "softmax's kernel, positive"
    needs_ratio = True
    vectors = 1.0

    @staticmethod
    def drawn(normal: Tensor) -> Tensor:
        """Each still normal, those of a head orthogonal."""
        columns = normal.double().mT
        q, r = torch.linalg.qr(
            columns
        )  # q does not depend on the columns' lengths, which are those of r
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        return (q * columns.norm(dim=1, keepdim=True)).mT.float()

    def forward(self, x: Tensor, heads: Any = None, *, query: bool = False) -> Tensor:
        R = x.shape[-1]
        exponent = self.projected(x, heads)
        if query:
            exponent = exponent - exponent.detach().amax(dim=-1, keepdim=True)
        else:
            exponent = exponent - widened(x).square().sum(-1, keepdim=True) / (2 * R**0.5)
            exponent = exponent.clamp(
                max=0.7 * math.log(torch.finfo(x.dtype).max)
            )  # 62 in bfloat16 and float32
        return (exponent.exp() * R**-0.5).to(x.dtype)


# By name, the values of `mixer.feature_map`. None: SiLU with the l2 norm, within `interdomain.features`, before input norms.
FEATURE_MAPS: dict[str, type[FeatureMap] | None] = {
    "silu": None,
    "rff": RandomFourierFeatures,
    "elu": EluFeatures,
    "softplus": SoftplusFeatures,
    "favor": PositiveRandomFeatures,
}


def feature_map(name: str, n_kv_heads: int, head_dim: int) -> FeatureMap | None:
    """The map `MixerConfig.feature_map` of a layer; None for `silu`."""
    made = FEATURE_MAPS[name]
    return made and made(n_kv_heads, head_dim)


GATES = {"sigmoid": torch.sigmoid, "silu": F.silu}


def normed(o: Tensor, weight: Tensor, eps: float, soft: bool) -> Tensor:
    """The output norm over D of o [B, T, H, D], with w [D]: w o / sqrt(eps + mean(o^2)); soft: w o / sqrt(w^2 + mean(o^2))."""
    o32 = widened(o)
    w = widened(weight)
    floor = w.square() + 1e-12 if soft else eps  # a weight that is 0 gives 0
    return (o32 * w * torch.rsqrt(o32.square().mean(-1, keepdim=True) + floor)).to(o.dtype)


def divided(o: Tensor, v: Tensor) -> Tensor:
    """Numerator over the Nadaraya-Watson denominator, the last channel of o [B, T, H, D + 1] -> [B, T, H, D], of o's dtype.

    A kernel average lies between its values, but an estimate of one need not: its denominator can vanish. Where the quotient
    would be larger than MAX_GAIN times the token's own value v [B, T, G, D + 1], both as means of |x| over D, the denominator
    is as large as makes it just that, with its sign. The scales of v, of the features and of C cancel; no state is needed.
    """
    numerator = widened(o[..., :-1])
    denominator = widened(o[..., -1:])
    allowed = MAX_GAIN * widened(v[..., :-1]).abs().mean(-1, keepdim=True)
    allowed = allowed.repeat_interleave(o.shape[2] // v.shape[2], dim=2)
    sign = torch.where(denominator < 0, -1.0, 1.0)
    # Not with a quotient as the floor: a value of zeros gives an output of zeros.
    below = torch.maximum(denominator.abs() * allowed, numerator.abs().mean(-1, keepdim=True))
    return (numerator * (sign * allowed) / below.clamp_min(torch.finfo(below.dtype).tiny)).to(
        o.dtype
    )
