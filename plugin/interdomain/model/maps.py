"""The T x T attention maps of a model's layers for one text, for `inspect-model` and for samples during training.

A mixer's output is linear in its values v, with all else fixed: o_t = sum_j w_tj v_j. The call of a mixer's core (the scan, or
softmax attention) is recorded in a forward pass. The same call with the identity in the place of v returns the weights w: of
the interdomain mixer w_tj = Re(b_t^T Lambda^(t-j)), where b_t is the query's readout of the state (paper eqs. 11 and 13). No
formula is written a second time, so windows, grouped heads and every readout are what the model computes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from .feature_maps import GATES
from .mixers.kernels import interdomain_scan, linear_scan, recurrence
from .mixers.softmax import _attention, _in_blocks
from .pairing import pairing
from .transformer import Transformer

# Shapes: T time, H query heads, G heads of values, D value width.


class Core(NamedTuple):
    """A function that mixers call, linear in one argument v.

    kind: the mixers' name for the reader; None for their class. v: the place of v among the arguments. heads: the dimension of
    heads in v and in the output; time is the other of 1 and 2.
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


class Call(NamedTuple):
    core: Core
    function: Any
    args: tuple
    kwargs: dict

    def __call__(self, v: Tensor) -> Tensor:
        """The output [H, T, D] for v [G, T, D]."""
        args = list(self.args)
        args[self.core.v] = v.movedim(0, self.core.heads - 1)[None].contiguous()
        out = self.function(*args, **self.kwargs)
        return (out[0] if isinstance(out, tuple) else out)[0].movedim(self.core.heads - 1, 0)

    @property
    def v(self) -> Tensor:
        """[G, T, D]."""
        return self.args[self.core.v][0].movedim(self.core.heads - 1, 0)


@dataclass
class Layer:
    """Attention of one layer over a text.

    Attributes:
        kind: its core's, or the class of a mixer that calls none of `CORES`.
        weights: [H, T, T], query's position before key's; None without a core. With mixer.normalize over the
            denominator (paper eq. 9): they sum to 1 but where the mixer holds it away from zero.
        error: the largest |weights @ v - o|, relative to the largest |o|.
        output_rms: root mean square of what the output projection reads; None for a mixer without one.
        pairing: of interdomain attention, which values its heads pair with a key: `pairing.pairing`.
    """

    kind: str
    mixer: Any
    weights: Tensor | None = None
    error: float | None = None
    output_rms: float | None = None
    pairing: Tensor | None = None


@torch.no_grad()
def read_layers(model: Transformer, tokens: Tensor, wanted: list[int]) -> dict[int, Layer]:
    """The wanted layers of a model that reads tokens [T], in the model's dtype."""
    inputs: dict[Any, tuple] = {}
    with register_module_forward_pre_hook(lambda module, args: inputs.update({module: args})):
        model(tokens[None])
    layers = {}
    for i in wanted:
        attention: Any = model.layers[str(i)].attention
        call = _core_call(attention, inputs[attention])
        layer = Layer(type(attention).__name__, attention)
        layers[i] = layer
        if wo := getattr(attention, "wo", None):
            layer.output_rms = inputs[wo][0].square().mean().sqrt().item()
        if call is not None:
            layer.kind = call.core.kind or layer.kind
            layer.weights, layer.error = _weights(call, attention, inputs)
        if layer.kind == "interdomain":
            layer.pairing = pairing(attention)
    return layers


def _weights(call: Call, attention: Any, inputs: dict[Any, tuple]) -> tuple[Tensor, float]:
    """([H, T, T], their error). inputs: of every module."""
    G, T, _ = call.v.shape
    weights = call(torch.eye(T, dtype=call.v.dtype, device=call.v.device).expand(G, T, T))
    v = call.v.repeat_interleave(len(weights) // G, dim=0)
    o = call(call.v)
    if call.core.kind == "interdomain" and attention.config.normalize:
        (x,) = inputs[attention][0]
        (o,) = inputs[attention.wo][0]
        if attention.wg is not None:
            o = o / GATES[attention.config.gate_function](attention.wg(x))
        o = o.unflatten(-1, (len(weights), -1)).movedim(1, 0)
        v = v[..., :-1]
        # The denominator is a number per token and head, so it is what makes o of the numerators.
        numerator = weights @ v
        weights = (
            weights
            * (o * numerator).sum(-1, keepdim=True)
            / numerator.square().sum(-1, keepdim=True)
        )
    return weights, ((weights @ v - o).abs().max() / o.abs().max()).item()


def _core_call(attention: Any, inputs: tuple) -> Call | None:
    """The call of the mixer's core in a forward pass; None for a mixer that calls none of `CORES`."""
    calls: list[Call] = []

    def call_core(function: Any, *args: Any, **kwargs: Any) -> Any:
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
    """|w_tj| / sum_j |w_tj|, [H, T, T]: of softmax the weights themselves."""
    return weights.abs() / weights.abs().sum(-1, keepdim=True).clamp_min(
        torch.finfo(weights.dtype).tiny
    )


def by_head(weights: Tensor) -> dict[str, list[float]]:
    """Numbers of each head, means over the queries: the share of the token itself; how far back it looks, in tokens; over how
    many tokens the weight is spread (exp of the entropy of the shares); the share of negative weights."""
    shares = share(weights)
    position = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
    lag = (position[:, None] - position).clamp_min(0)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    summary = {
        "own token": shares.diagonal(dim1=1, dim2=2),
        "distance": (shares * lag).sum(-1),
        "spread": entropy.exp(),
        "negative": (shares * (weights < 0)).sum(-1),
    }
    return {name: values.mean(-1).tolist() for name, values in summary.items()}
