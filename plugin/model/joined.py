"""Projections that read the same input as one product: at one token each is bound by reading its weights, and by its launch.

`join_projections(model)`, after loading, makes the weights views of one matrix per group: the same parameters under the same
names, no memory beyond them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Linear


class JoinedProjections(nn.Module):
    """A module whose linear layers `together` read the same input."""

    together: tuple[str, ...] = ()
    joined: Tensor | None = None  # their weights as one matrix [sum E, dim], which they are views of

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_parted)  # assign=True replaces parameters

    @torch.no_grad()
    def join(self) -> None:
        layers = self._layers()
        if any(type(layer) is not Linear for layer in layers):  # adapters, quantized weights
            return
        self.joined = torch.cat([layer.weight.detach() for layer in layers])
        self._at = []
        for layer, rows in zip(layers, self.joined.split([layer.out_features for layer in layers]), strict=True):
            layer.weight.data = rows
            self._at.append((layer, rows.data_ptr()))

    def project(self, x: Tensor) -> Tensor:
        """The layers' outputs one after the other, [..., sum E]."""
        if self._is_joined():
            return F.linear(x, self.joined)
        return torch.cat([layer(x) for layer in self._layers()], dim=-1)

    def _layers(self) -> list[nn.Module]:
        return [self._modules[name] for name in self.together if name in self._modules]

    def _is_joined(self) -> bool:
        """Whether `joined` still is the weights: what moves, copies or loads a model parts them, and so does what replaces a
        weight or a layer (as adapters do)."""
        if self.joined is None or torch.compiler.is_compiling():
            return self.joined is not None
        layers = zip(self._layers(), self._at, strict=True)
        return all(layer is was and layer._parameters["weight"].data_ptr() == at for layer, (was, at) in layers)

    def _apply(self, fn, recurse=True):
        was, self.joined = self.joined is not None, None
        super()._apply(fn, recurse)
        if was:
            self.join()
        return self

    def __getstate__(self) -> dict:
        # Copies of the weights are no views of a copy of the matrix.
        return {**self.__dict__, "joined": None, "_at": []}


def _parted(module: JoinedProjections, keys) -> None:
    module.joined = None


def join_projections(model: nn.Module) -> None:
    """Join every group of projections, one at a time."""
    for module in model.modules():
        if isinstance(module, JoinedProjections):
            module.join()
