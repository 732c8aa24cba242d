"""The T x T attention maps of a model's layers for one text, for `inspect-model`.

A mixer's output is linear in its values v if all else is fixed: o_t = sum_j w_tj v_j. A forward
pass records the call of a mixer's core (the scan, or softmax attention). The same call with the
identity in the place of v returns the weights w. For the interdomain mixer w_tj = Re(b_t^T
Lambda^(t-j)), and b_t is the query's readout of the state (paper eqs. 11 and 13). No formula is
written a second time, so windows, grouped heads and every readout are what the model computes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from .feature_maps import GATES
from .mixers.kernels import interdomain_scan, linear_scan, recurrence
from .mixers.softmax import _attention, _in_blocks
from .pairing import pairing
from .transformer import Transformer

# Shapes: T tokens, H query heads, G heads of values, D value width.


@dataclass(frozen=True)
class Core:
    """A function that mixers call, linear in one of its arguments, v.

    Attributes:
        kind: The mixer's name for the reader. None means the name of its class.
        v: The place of v among the arguments.
        heads: The dimension of the heads in v and in the output, 1 or 2; time is the other.
    """

    kind: str | None
    v: int = 2
    heads: int = 2


CORES: dict[Any, Core] = {
    interdomain_scan: Core("interdomain"),
    linear_scan: Core("linear readout", v=0),
    _attention: Core("softmax", heads=1),
    _in_blocks: Core("softmax", heads=1),
    recurrence: Core(None),
}


@dataclass(frozen=True)
class Call:
    """A recorded call of a core for one text."""

    core: Core
    function: Any
    args: tuple
    kwargs: dict

    def __call__(self, v: Tensor) -> Tensor:
        """Calls the core with other values: v [G, T, D] -> the output [H, T, D]."""
        args = list(self.args)
        args[self.core.v] = v.movedim(0, self.core.heads - 1)[None].contiguous()
        output = self.function(*args, **self.kwargs)
        if isinstance(output, tuple):
            output = output[0]  # without the state
        return output[0].movedim(self.core.heads - 1, 0)

    @property
    def v(self) -> Tensor:
        """The values of the text, [G, T, D]."""
        return self.args[self.core.v][0].movedim(self.core.heads - 1, 0)


@dataclass
class Layer:
    """Attention of one layer over a text.

    Attributes:
        kind: The name of its core, or of the class of a mixer that calls none of `CORES`.
        mixer: The mixer.
        weights: [H, T, T], the query's position before the key's; None without a core. With
            `mixer.normalize` they are divided by the denominator (paper eq. 9). They then sum to 1,
            except where the mixer holds the denominator away from zero.
        error: The largest |weights @ v - o|, relative to the largest |o|.
        output_rms: The root mean square of the output projection's input; None without one.
        pairing: The values that the heads of interdomain attention pair with a key
            (`pairing.pairing`).
    """

    kind: str
    mixer: Any
    weights: Tensor | None = None
    error: float | None = None
    output_rms: float | None = None
    pairing: Tensor | None = None


@torch.no_grad()
def read_layers(
    model: Transformer,
    tokens: Tensor,
    wanted: list[int],
) -> dict[int, Layer]:
    """Reads a text with a model and returns the wanted layers.

    Args:
        model: The model, which computes in its own dtype.
        tokens: [T].
        wanted: Numbers of layers, from 0.
    """
    # One pass records the inputs of every module.
    inputs: dict[Any, tuple] = {}

    def record(module: Any, args: tuple) -> None:
        inputs[module] = args

    with register_module_forward_pre_hook(record):
        model(tokens[None])

    # A second pass through each wanted mixer records the call of its core.
    layers = {}
    for i in wanted:
        attention: Any = model.layers[str(i)].attention
        layer = Layer(type(attention).__name__, attention)
        layers[i] = layer
        output_projection = getattr(attention, "wo", None)
        if output_projection is not None:
            layer.output_rms = inputs[output_projection][0].square().mean().sqrt().item()
        call = _core_call(attention, inputs[attention])
        if call is not None:
            layer.kind = call.core.kind or layer.kind
            layer.weights, layer.error = _weights(call, attention, inputs)
        if layer.kind == "interdomain":
            layer.pairing = pairing(attention)
    return layers


def _weights(
    call: Call,
    attention: Any,
    inputs: dict[Any, tuple],
) -> tuple[Tensor, float]:
    """Computes a layer's weights and their error (`Layer`).

    Args:
        call: The call of the mixer's core.
        attention: The mixer.
        inputs: The inputs of every module in the forward pass.
    """
    v = call.v
    G, T, _ = v.shape
    weights = call(torch.eye(T, dtype=v.dtype, device=v.device).expand(G, T, T))
    o = call(v)
    v = v.repeat_interleave(len(weights) // G, dim=0)  # [H, T, D]
    if call.core.kind == "interdomain" and attention.config.normalize:
        # The core gave the numerators. The mixer's own output is before the gate and `wo`.
        (x,) = inputs[attention][0]
        (o,) = inputs[attention.wo][0]
        if attention.wg is not None:
            o = o / GATES[attention.config.gate_function](attention.wg(x))
        o = o.unflatten(-1, (len(weights), -1)).movedim(1, 0)
        v = v[..., :-1]
        # The denominator is one number per token and head: the ratio of o to the numerators.
        numerator = weights @ v
        overlap = (o * numerator).sum(-1, keepdim=True)
        weights = weights * overlap / numerator.square().sum(-1, keepdim=True)
    error = (weights @ v - o).abs().max() / o.abs().max()
    return weights, error.item()


def _core_call(attention: Any, inputs: tuple) -> Call | None:
    """Returns the call of the mixer's core for these inputs; None if it calls none of `CORES`.

    Args:
        attention: The mixer, a `Mixer`.
        inputs: The positional arguments of its forward pass, with a batch of one text.
    """
    calls: list[Call] = []

    def call_core(
        function: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if function in CORES:
            calls.append(Call(CORES[function], function, args, kwargs))
        return function(*args, **kwargs)

    attention.call_core = call_core
    try:
        attention(*inputs)
    finally:
        del attention.call_core
    return calls[0] if calls else None


def share(weights: Tensor) -> Tensor:
    """Returns |w_tj| / sum_j |w_tj|, [H, T, T]; for softmax these are the weights.

    Args:
        weights: w_tj, [H, T, T], the query's position before the key's.
    """
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def by_head(weights: Tensor) -> dict[str, list[float]]:
    """Summarises the weights [H, T, T] of each head by means over the queries.

    Args:
        weights: w_tj, the query's position before the key's.
    Returns:
        "own token": The share of the token itself.
        "distance": How far back the head looks, in tokens.
        "spread": Over how many tokens the weight is spread (exp of the entropy of the shares).
        "negative": The share of negative weights.
    """
    shares = share(weights)
    position = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
    # Tokens from each key to the query, [T, T]. Later keys have weight 0, so their lag is not read.
    lag = (position[:, None] - position).clamp_min(0)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    own = shares.diagonal(dim1=1, dim2=2)
    distance = (shares * lag).sum(-1)
    negative = (shares * (weights < 0)).sum(-1)
    return {
        "own token": own.mean(-1).tolist(),
        "distance": distance.mean(-1).tolist(),
        "spread": entropy.exp().mean(-1).tolist(),
        "negative": negative.mean(-1).tolist(),
    }
