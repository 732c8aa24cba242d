"""Rotary angles, feature maps, gates, output norms and the ratio of eq. 9, in plain PyTorch."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Shapes: B batch, T tokens, H heads, H_kv heads of keys and state, R head_dim, D value width,
#         `vectors` random vectors of a head.

# The readout of `normalize` is at most this many times as large as the token's own value.
MAX_GAIN = 16.0


def widened(x: Tensor) -> Tensor:
    """Returns x in float32 for arithmetic that bf16 would spoil; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def rope_tables(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Computes cos and sin of the rotary angles, each [..., T, 1, R / 2].

    The angles are float64: float32 ones are off by 2e-4 radians at position 4096 and by 0.06 at a
    million.

    Args:
        positions: Integers, [T] or [B, T].
        head_dim: R.
        theta: The base of the rotary embedding.
        dtype: The dtype of the results.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None, None] * theta ** (-pairs / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class KeptInFloat32(nn.Module):
    """A module whose parameters and buffers stay float32.

    `half()`, `to(torch.bfloat16)` and their like move them to another device, but do not round
    them.
    """

    def _apply(self, fn, recurse=True):
        """Applies the function of `half()`, `to()` and such to all tensors, but undoes rounding.

        Args:
            fn: The function, which moves or casts one tensor. PyTorch passes it.
            recurse: True to treat the submodules, too. PyTorch passes it.
        """

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(moved.device)
            return moved

        return super()._apply(move, recurse)

    def check_float32(self) -> None:
        """Raises ValueError if a wrapper has rounded a parameter or buffer for this pass."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{type(self).__name__}.{name} is {tensor.dtype}, and must stay float32: "
                    "bfloat16 rounds a decay of 0.999 to 1. A wrapper's mixed precision has "
                    "rounded it. With FSDP2, first shard these modules in groups of their own, "
                    "without a policy: `for module in float32_modules(model): "
                    "fully_shard(module)`. The package has this function in `interdomain.model`; "
                    "an exported model has the method `float32_modules()`."
                )


def float32_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules whose parameters must not be rounded.

    FSDP2 must shard them before the layers, without a `param_dtype`.
    """
    found = []
    for module in model.modules():
        if isinstance(module, KeptInFloat32) and any(True for _ in module.parameters()):
            found.append(module)
    return found


class FeatureMap(KeptInFloat32):
    """Base of the feature maps, xi of paper eq. 3, as functions of R numbers (`FEATURE_MAPS`).

    Attributes:
        about: A few words for the help of `mixer.feature_map`.
        needs_ratio: True if a query's features have a factor that cancels only in the ratio of
            eq. 9 (`mixer.normalize`).
        vectors: The number of random vectors of each head of keys, as a share of R.
    """

    about = ""
    needs_ratio = False
    vectors = 0.0

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        """Makes the map. Only maps with random vectors read the arguments.

        Args:
            n_kv_heads: H_kv, the heads of keys on all tensor-parallel ranks.
            head_dim: R.
        """
        super().__init__()

    @staticmethod
    def drawn(normal: Tensor) -> Tensor:
        """Makes the random vectors, [H_kv, vectors, R], from normal ones with variance R^(-1/2).

        Args:
            normal: Normal numbers, [H_kv, vectors, R].
        """
        return normal

    def forward(
        self,
        x: Tensor,
        tp_rank: Any = None,
        *,
        query: bool = False,
    ) -> Tensor:
        """Maps queries or keys: x [B, T, H, R] -> [B, T, H, R] in x's dtype.

        Args:
            x: Queries or keys, after convolution and rotation.
            tp_rank: This rank's place in tensor parallelism (`parallel.GroupRank`): x has its part
                of the heads. None means all heads.
            query: True for queries, False for keys.
        """
        raise NotImplementedError


class PointwiseFeatures(FeatureMap):
    """Base of the maps xi(x) = f(x) / sqrt(R) by a positive function f of one number."""

    def forward(
        self,
        x: Tensor,
        tp_rank: Any = None,
        *,
        query: bool = False,
    ) -> Tensor:
        """Maps x [B, T, H, R]; `tp_rank` and `query` change nothing (`FeatureMap.forward`)."""
        return (self.f(widened(x)) * x.shape[-1] ** -0.5).to(x.dtype)

    def f(self, y: Tensor) -> Tensor:
        """Computes f of each number y of a tensor."""
        raise NotImplementedError


class EluFeatures(PointwiseFeatures):
    """f(x) = elu(x) + 1 (Katharopoulos et al., 2020)."""

    about = "elu + 1, positive"

    def f(self, y: Tensor) -> Tensor:
        # F.elu(y) + 1 would round to zero below -17.
        return F.relu(y) + y.clamp(max=0).exp()


class SoftplusFeatures(PointwiseFeatures):
    """f(x) = log(1 + exp(x))."""

    about = "positive"

    def f(self, y: Tensor) -> Tensor:
        return F.softplus(y)


class RandomFeatures(FeatureMap):
    """Base of the maps by projections on random vectors w, which are drawn once and fixed.

    Query heads use the vectors of their group's keys. With others, the inner product of a query's
    and a key's features would estimate nothing.

    Attributes:
        frequencies: The random vectors, a buffer, [H_kv, vectors, R].
    """

    def __init__(self, n_kv_heads: int, head_dim: int) -> None:
        """Makes the buffer `frequencies` for `n_kv_heads` heads of keys of width `head_dim`, R."""
        super().__init__(n_kv_heads, head_dim)
        self.frequencies: Tensor
        shape = n_kv_heads, int(self.vectors * head_dim), head_dim
        self.register_buffer("frequencies", torch.empty(shape, dtype=torch.float32))

    def projected(self, x: Tensor, tp_rank: Any) -> Tensor:
        """Computes w . x, [B, T, H, vectors], for x [B, T, H, R] with H a multiple of H_kv.

        Args:
            x: Queries or keys of this rank's heads.
            tp_rank: This rank's place in tensor parallelism. None means all heads.
        """
        self.check_float32()
        B, T, H, R = x.shape
        frequencies = self.frequencies
        if tp_rank is not None:
            frequencies = frequencies.chunk(tp_rank.size)[tp_rank.rank]
        groups = widened(x).view(B, T, len(frequencies), -1, R)
        with torch.autocast(x.device.type, enabled=False):
            products = torch.einsum("bthgr,hfr->bthgf", groups, frequencies.to(groups.dtype))
            return products.reshape(B, T, H, -1)


class RandomFourierFeatures(RandomFeatures):
    """xi(x) = sqrt(2 / R) [cos(w.x), sin(w.x)] with R / 2 vectors (paper eq. 5).

    xi(x).xi(y) estimates a Gaussian kernel.
    """

    about = "random Fourier features; paper eq. 5"
    vectors = 0.5

    def forward(
        self,
        x: Tensor,
        tp_rank: Any = None,
        *,
        query: bool = False,
    ) -> Tensor:
        """Maps x [B, T, H, R], queries and keys alike, whatever `query` is.

        Args:
            x: Queries or keys of this rank's heads.
            tp_rank: This rank's place in tensor parallelism. None means all heads.
            query: Ignored.
        """
        angles = self.projected(x, tp_rank)
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return (features * (2 / x.shape[-1]) ** 0.5).to(x.dtype)


class PositiveRandomFeatures(RandomFeatures):
    """xi(x) = exp(w.x - |x|^2 / (2 sqrt(R))) / sqrt(R) with R orthogonal vectors.

    These are FAVOR+ (Choromanski et al., 2021): xi(q).xi(k) estimates exp(q.k / sqrt(R)), without
    bias over the draws. A query's features are divided by the largest of them, which cancels in
    paper eq. 4. A key's features keep their scale, because a factor of its own would be a weight.
    They cannot grow with the key: their exponent is at most sqrt(R) |w|^2 / 2, about 32 for R = 64.
    """

    about = "softmax's kernel, positive"
    needs_ratio = True
    vectors = 1.0

    @staticmethod
    def drawn(normal: Tensor) -> Tensor:
        """Makes the vectors of a head orthogonal; each is still normal.

        Args:
            normal: Independent normal numbers, [H_kv, R, R].
        """
        columns = normal.double().mT
        # q does not depend on the columns' lengths, which are those of r: give them back. The signs
        # of q's columns are the library's choice: take those that make r's diagonal positive, so
        # that each direction is uniformly distributed.
        q, r = torch.linalg.qr(columns)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
        return (q * columns.norm(dim=1, keepdim=True)).mT.float()

    def forward(
        self,
        x: Tensor,
        tp_rank: Any = None,
        *,
        query: bool = False,
    ) -> Tensor:
        """Maps x [B, T, H, R]; the largest feature of each query is R^(-1/2).

        Args:
            x: Queries or keys of this rank's heads.
            tp_rank: This rank's place in tensor parallelism. None means all heads.
            query: True for queries, False for keys.
        """
        R = x.shape[-1]
        exponent = self.projected(x, tp_rank)
        if query:
            # Neither |x|^2 nor the largest exponent is needed: a factor of a query's own cancels.
            exponent = exponent - exponent.detach().amax(dim=-1, keepdim=True)
        else:
            square = widened(x).square().sum(-1, keepdim=True)
            exponent = exponent - square / (2 * R**0.5)
            # Cut off at 0.7 of the exponent that overflows: at 62 in bfloat16 and float32.
            exponent = exponent.clamp(max=0.7 * math.log(torch.finfo(x.dtype).max))
        return (exponent.exp() * R**-0.5).to(x.dtype)


# The values of `mixer.feature_map`. None is SiLU with the l2 norm (paper eq. 10): a kernel of
# `interdomain.features`, and the only map with input norms.
FEATURE_MAPS: dict[str, type[FeatureMap] | None] = {
    "silu": None,
    "rff": RandomFourierFeatures,
    "elu": EluFeatures,
    "softplus": SoftplusFeatures,
    "favor": PositiveRandomFeatures,
}


def feature_map(
    name: str,
    n_kv_heads: int,
    head_dim: int,
) -> FeatureMap | None:
    """Makes a layer's feature map; None for `silu`.

    Args:
        name: `MixerConfig.feature_map`.
        n_kv_heads: Heads of keys and state.
        head_dim: R.
    """
    map_class = FEATURE_MAPS[name]
    if map_class is None:
        return None
    return map_class(n_kv_heads, head_dim)


# The values of `mixer.gate_function`.
GATES = {"sigmoid": torch.sigmoid, "silu": F.silu}


def normed(
    o: Tensor,
    weight: Tensor,
    eps: float,
    soft: bool,
) -> Tensor:
    """Normalises each head's output over D: w o / sqrt(eps + mean(o^2)).

    Args:
        o: [B, T, H, D].
        weight: w, [D].
        eps: Ignored by the soft norm.
        soft: True for w o / sqrt(w^2 + mean(o^2)), which is o if o is small.
    """
    o32 = widened(o)
    w = widened(weight)
    floor: Any = eps
    if soft:
        floor = w.square() + 1e-12  # a weight of 0 gives 0
    mean_square = o32.square().mean(-1, keepdim=True)
    normalized = o32 * w * torch.rsqrt(mean_square + floor)
    return normalized.to(o.dtype)


def divided(o: Tensor, v: Tensor) -> Tensor:
    """Divides the readout by the Nadaraya-Watson denominator (paper eq. 9).

    A kernel average lies between its values, but an estimate of one need not: its denominator can
    vanish. If the quotient were larger than MAX_GAIN times the token's own value, both as means of
    |x| over D, the denominator is made just large enough, with its sign. The scales of v, of the
    features and of C cancel, and no state is needed.

    Args:
        o: The readout, [B, T, H, D + 1]; its last channel is the denominator.
        v: The token's own values with the ones channel, [B, T, H_kv, D + 1].
    Returns:
        [B, T, H, D] in o's dtype.
    """
    numerator = widened(o[..., :-1])
    denominator = widened(o[..., -1:])
    allowed = MAX_GAIN * widened(v[..., :-1]).abs().mean(-1, keepdim=True)
    allowed = allowed.repeat_interleave(o.shape[2] // v.shape[2], dim=2)  # [B, T, H, 1]
    sign = torch.where(denominator < 0, -1.0, 1.0)
    # max(|denominator| allowed, mean |numerator|), and not a quotient: zeros for v give zeros.
    size = numerator.abs().mean(-1, keepdim=True)
    scale = torch.maximum(denominator.abs() * allowed, size)
    scale = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    return (numerator * (sign * allowed) / scale).to(o.dtype)
