"""PyTorch's Embedding, Linear and RMSNorm as the model has them: the module that holds them draws their values."""

import torch
from torch import Tensor, nn


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

    def reset_parameters(self) -> None:
        """Likewise nothing."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        # Products read it: rounded here, it is rounded and kept for the backward pass once, not by each of them.
        rounded = autocast_dtype(x)
        return y if rounded is None else y.to(rounded)
