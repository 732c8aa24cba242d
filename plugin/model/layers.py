"""PyTorch's Embedding, Linear and RMSNorm, the last two with forms of their own for a token or a few in float32 on a CPU.

There PyTorch's RMSNorm is ten operations, whose launches are all of its time; and its product of a matrix and a vector, MKL's,
reads the weight at less than half the speed of memory on AMD's CPUs: decoding took twice as long (benchmarks/README.md,
"Results"). On Intel's the form here would take twice as long.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IN_CACHE = 4096  # numbers of x, half of a usual L1 cache: beyond them the batch of products below is the slower way


def _amd() -> bool:
    """Whether this is a CPU of AMD's, as far as Linux says."""
    try:
        with open("/proc/cpuinfo") as f:
            return "AuthenticAMD" in f.read(1000)  # of the first core
    except OSError:
        return False


AMD = _amd()


def _one_token(x: Tensor) -> bool:
    """Whether x [..., K] is few rows, in float32 on a CPU, and no gradient is recorded."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    return x.numel() <= IN_CACHE


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]: `F.linear`."""
    N, K = weight.shape
    if not AMD or not _one_token(x) or weight.dtype != x.dtype or N % 4 or not x.numel():
        return F.linear(x, weight)
    # Four products in a batch, each of a quarter of the weight: another routine, which keeps up with the memory.
    rows = x.numel() // K
    columns = x.contiguous().as_strided((4, K, rows), (0, 1, K))
    y = torch.bmm(weight.view(4, N // 4, K), columns)
    return (y if rows == 1 else y.view(N, rows).t().contiguous()).view(*x.shape[:-1], N)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast rounds x to for a product; None where it is off, or x float64."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: the module that holds it draws its values (`initialize`)."""


class Linear(nn.Linear):
    """Without a bias."""

    reset_parameters = Embedding.reset_parameters

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class RMSNorm(nn.RMSNorm):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps=eps)
        # A number would become a tensor in every call.
        self._eps = torch.full((1,), eps, dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        if not _one_token(x):
            y = super().forward(x)
            # Products read it: rounded here, it is rounded and kept for the backward pass once, not by each of them.
            rounded = autocast_dtype(x)
            return y if rounded is None else y.to(rounded)
        n = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._eps, n, n, value=1 / x.shape[-1]).rsqrt_()).mul_(self.weight)
