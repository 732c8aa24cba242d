"""The SSM tensors of a model's layers, computed once for several micro-batches."""

import torch
from torch import Tensor


class SharedSSMTensors:
    """SSM tensors that many forward passes read. Their gradients are added up until `backward`.

    The passes read detached copies, so that each backward pass ends there. The operations between
    the parameters and the SSM tensors, which all passes share, are differentiated once.

    Attributes:
        layers: The copies by layer, for `Transformer.forward` to read.
    """

    def __init__(self, layers: list[tuple[Tensor, ...]]) -> None:
        """Takes the result of `Transformer.ssm_tensors`."""
        self.layers: list[tuple[Tensor, ...]] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []  # (tensor, its detached copy)
        for tensors in layers:
            copies = []
            for tensor in tensors:
                copy = tensor.detach().requires_grad_(tensor.requires_grad)
                copies.append(copy)
                self.pairs.append((tensor, copy))
            self.layers.append(tuple(copies))

    def backward(self) -> None:
        """Backpropagates the summed gradients from the SSM tensors to the parameters."""
        tensors = []
        gradients = []
        for tensor, copy in self.pairs:
            if copy.grad is not None:
                tensors.append(tensor)
                gradients.append(copy.grad)
        torch.autograd.backward(tensors, gradients)
