"""Small modules of the model: linear layers, norms, and parameters of what precedes the scan.

`interdomain.features` and `feature_maps.py` compute with these parameters. No module here draws its
initial values: the module that holds it does (`initialize`).

Shapes: B batch, T time, H heads, R key features, D value width, W convolution width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .feature_maps import normed, rope_tables
from .parallel import GroupRank


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast rounds x for a matrix product.

    It is None if autocast is off or x is float64.

    Args:
        x: An input of the product. Only its device and dtype are read.
    """
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class LocalParameters(nn.Module):
    """Base of the modules whose parameters tensor parallelism makes DTensors.

    They compute with `local()` of a parameter.

    Attributes:
        local_weight, local_bias: This rank's slice of a parameter that is a DTensor, as a plain
            tensor; set before each forward pass. None: the parameter is a plain tensor. They are
            buffers because torch.compile takes buffers' shapes as fixed.
        whole: True if every rank has all of a matrix that `parallel.split_dimension` would divide
            by its name.
    """

    whole: bool = False
    weight: nn.Parameter
    local_weight: Tensor | None
    local_bias: Tensor | None

    def __init__(self, *sizes: Any, **options: Any) -> None:
        """Calls the PyTorch module beside this base class with its own arguments."""
        super().__init__(*sizes, **options)
        self.register_buffer("local_weight", None, persistent=False)
        self.register_buffer("local_bias", None, persistent=False)

    def reset_parameters(self) -> None:
        """Does nothing: the module that holds this one draws its values (`initialize`)."""

    def local(self, name: str = "weight") -> Any:
        """Returns the plain tensor of a parameter to compute with: "weight" or "bias"."""
        local = getattr(self, f"local_{name}", None)
        return getattr(self, name) if local is None else local


class Embedding(LocalParameters, nn.Embedding):
    """The embedding: tokens [B, T] -> [B, T, dim].

    With tensor parallelism this rank has a part of the rows, and returns its part of the tokens,
    [B, T / size, dim].

    Attributes:
        tp_rank: This rank's place in tensor parallelism. None: the module has all rows.
    """

    tp_rank: "GroupRank | None" = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up the rows of `tokens`, [B, T] integers; see the class for ranks."""
        rows = self.local()
        if self.tp_rank is None:
            return F.embedding(tokens, rows)
        # Tokens whose row another rank has give zeros; the sum over the ranks has each token once.
        tokens = tokens - self.tp_rank.rank * len(rows)
        elsewhere = (tokens < 0) | (tokens >= len(rows))
        embedded = F.embedding(tokens.masked_fill(elsewhere, 0), rows)
        embedded = embedded.masked_fill(elsewhere[..., None], 0)
        return self.tp_rank.scatter_tokens(embedded)


class Linear(LocalParameters, nn.Linear):
    """A linear layer without bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.local())


class RMSNorm(LocalParameters, nn.RMSNorm):
    """RMSNorm, whose result has the dtype of autocast's products."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x over its last dimension."""
        y = F.rms_norm(x, self.normalized_shape, self.local(), self.eps)
        # Several products read it. Rounded here, it is rounded and kept for the backward pass only
        # once.
        dtype = autocast_dtype(x)
        return y if dtype is None else y.to(dtype)


class ShortConv(LocalParameters):
    """Parameters of a causal depthwise convolution over time (paper eq. 10, SC): W + 1 per channel.

    A call returns (weight, bias), [channels, 1, W] and [channels]. It is a call because accelerate,
    which offloads parameters, brings them back around one.

    Args:
        channels: The channels of the projection that is convolved.
        width: W, the taps: the token itself and W - 1 before it.
        bias: False for no bias; the call then returns None for it.
    """

    def __init__(self, channels: int, width: int, bias: bool = True) -> None:
        """Makes `width` weights for each of `channels` channels, and a bias if `bias`."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias: Any = None
        if bias:
            self.bias = nn.Parameter(torch.empty(channels))

    def forward(self) -> tuple[Tensor, Any]:
        return self.local(), self.local("bias")


def rope_of(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the rotary tables of a model.

    Args:
        config: The model.
        positions: The place of each token in its document, [T] or [B, T].
        dtype: The dtype of the hidden states. The tables are float32, or float64 for float64.
    Returns:
        Cosines and sines, each [T, 1, head_dim / 2] or [B, T, 1, head_dim / 2].
    """
    table_dtype = torch.promote_types(dtype, torch.float32)
    return rope_tables(positions, config.head_dim, config.rope_theta, table_dtype)


class InputNorm(LocalParameters):
    """Parameters of the norm N+b (paper eq. 12).

    It is an RMSNorm over R whose scale the heads share, plus a bias per head.

    A call returns (weight, bias), [R] and [H, R], as that of ShortConv. The paper's text gives
    every head a scale of its own; its parameter counts leave no room for that.

    Args:
        n_heads: H, the heads of keys or of values.
        head_dim: R.
        eps: Epsilon of the norm.
    """

    def __init__(self, n_heads: int, head_dim: int, eps: float) -> None:
        """Makes a weight, [head_dim], and a bias, [n_heads, head_dim]; `eps` is the norm's."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.bias = nn.Parameter(torch.empty(n_heads, head_dim))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.local(), self.local("bias")


class OutputNorm(LocalParameters):
    """The norm of each head's output (`MixerConfig.output_norm`), [B, T, H, D] -> [B, T, H, D].

    The heads share its scale.

    Args:
        head_dim: D.
        eps: Epsilon of the norm.
        soft: True for output_norm = soft, False for rms.
    """

    def __init__(self, head_dim: int, eps: float, *, soft: bool) -> None:
        """Makes a weight, [head_dim]; `eps` is the norm's, and `soft` chooses its kind."""
        super().__init__()
        self.eps = eps
        self.soft = soft
        self.weight = nn.Parameter(torch.empty(head_dim))

    def forward(self, o: Tensor) -> Tensor:
        return normed(o, self.local(), self.eps, self.soft)
