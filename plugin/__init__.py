"""Interdomain Attention: kernels, model, and distributed pretraining under TorchTitan."""

__version__ = "0.1.0"
