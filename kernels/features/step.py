"""One token's features on a CPU, over and over: views and buffers are made once, for at one sequence a view costs as much as an
operation. Shapes: B batch, H heads of all projections, R head_dim, C channels of the convolution, W its width."""

import torch
from torch import Tensor
from torch.nn import functional as F


class InPlace:
    """`input_features_step` in plain PyTorch, over one past, which every call overwrites as it does `out`.

    Args as there; dtype: of x.
    """

    @torch.inference_mode(False)  # buffers of an inference mode could not be written outside of it
    @torch.no_grad()
    def __init__(self, B, H, R, dtype, conv, past, rotated, silu, norm, eps) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.x = torch.zeros(B, H * R, dtype=wide)  # becomes y, in place
        self.y = self.x.view(B, H, R)
        self.out = self.y if dtype == wide else self.y.to(dtype)
        self.past, self.rope, self.silu = past, rotated > 0, silu > 0
        if past is not None:
            self._prepare_conv(*(t.to(wide) for t in conv))
        if rotated:
            self.pairs = self.y[:, :rotated].unflatten(2, (2, -1))  # the halves
            self.other = torch.empty_like(self.pairs)
            self.first, self.second = self.pairs.unbind(2)
            self.other_first, self.other_second = self.other.unbind(2)
        self.mapped = self.y[:, :silu]
        self.factor = silu > 0 or norm is not None
        normed = 0 if norm is None else len(norm[0])
        if self.factor:
            self._prepare_factor(torch.arange(H) < silu, torch.arange(H) >= H - normed, eps)
        self.scale = None
        if normed:
            self.scale, self.shift = (t.to(wide) for t in norm)
            self.normed = self.y[:, H - normed :]

    def _prepare_conv(self, weight: Tensor, bias: Tensor) -> None:
        W, C = weight.shape
        B = len(self.x)
        self.u = self.x[:, :C]
        self.token = self.u[:, None]
        self.weight = torch.cat([weight, bias[None]])  # the bias by a row of ones
        self.window = self.x.new_ones(B, W + 1, C)
        self.inputs, self.recent, self.products = self.window[:, :W], self.window[:, 1:W], torch.empty_like(self.window)

    def _prepare_factor(self, mapped: Tensor, normed: Tensor, eps: float) -> None:
        """y / max(n, 1e-6) of heads that are mapped, y / sqrt(n^2 / R + eps) of those that are normed, the one after the other
        of those that are both: in each case y / sqrt(max(a s, b s + c)) with s = n^2."""
        B, H, R = self.y.shape
        mapped, normed = (t.to(self.y.dtype)[:, None] for t in (mapped, normed))
        weight = torch.where(normed > 0, eps, torch.ones_like(normed))
        self.b = normed / R
        self.a, self.c = self.b + mapped * weight, weight * torch.where(mapped > 0, 1e-12, torch.ones_like(mapped))
        self.s, self.high, self.low = (self.y.new_empty(B, H, 1) for _ in "abc")

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        self.x.copy_(x)
        if self.past is not None:
            torch.cat([self.past, self.token], dim=1, out=self.inputs)
            self.past.copy_(self.recent)
            torch.mul(self.window, self.weight, out=self.products)
            torch.sum(self.products, 1, out=self.u)
        if self.rope:
            cos, sin = rope
            torch.neg(self.second, out=self.other_first)
            self.other_second.copy_(self.first)
            self.pairs.mul_(cos).addcmul_(self.other, sin)
        if self.silu:
            F.silu(self.mapped, inplace=True)
        if self.factor:
            torch.linalg.vector_norm(self.y, dim=-1, keepdim=True, out=self.s)
            self.s.square_()
            torch.mul(self.s, self.a, out=self.high)
            torch.addcmul(self.c, self.s, self.b, out=self.low)
            torch.maximum(self.high, self.low, out=self.s)
            self.y.mul_(self.s.rsqrt_())
        if self.scale is not None:
            torch.addcmul(self.shift, self.normed, self.scale, out=self.normed)
        return self.y if self.out is self.y else self.out.copy_(self.y)
