"""The complex-diagonal dynamics of a mixer: Delta, A, C (and c) per head, and the two tensors that the scan reads.

Parameters are float32 and stay so under every mixed-precision policy (bf16 rounds a decay of 0.999 to exactly 1.0), and
complex numbers are stored as real pairs. The module takes no activations, so that a parallelisation can group the dynamics
of all layers under a float32 policy of their own and hand the results to the blocks.
"""

import math

import torch
from torch import Tensor, nn

from interdomain.scan import tables

# Shapes: H heads, M basis functions.
DT_MIN, DT_MAX = 1e-3, 1e-1


class SSMDynamics(nn.Module):
    """Lambda = exp(Delta A), input gain beta by zero-order hold, and the readout, folded for the scan.

    `forward()` returns (log_decay [H, M, 2], mixing [H, 2M, 2M]) for the query readout, or (log_decay, readout [H, 2M]) for
    the linear one; both float32.
    """

    def __init__(self, n_heads: int, n_basis: int, *, c_form: str, readout: str, linear: bool) -> None:
        super().__init__()
        self.readout = readout

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32))

        self.log_dt = parameter(n_heads)
        self.log_A_real = parameter(n_heads, n_basis)
        self.A_imag = parameter(n_heads, n_basis)
        shapes = {"full": (n_heads, n_basis, n_basis, 2), "diagonal": (n_heads, n_basis, 2), "identity": None}
        self.C = parameter(*shapes[c_form]) if shapes[c_form] else None
        self.c = parameter(n_heads, n_basis) if linear else None

    def _apply(self, fn, recurse=True):
        return super()._apply(in_float32(fn), recurse)

    def forward(self) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.log_dt.device.type, enabled=False):
            dt = self.log_dt.exp()
            log_decay = tables.decay_exponent(dt, self.log_A_real, self.A_imag)
            gain = tables.input_gain(log_decay, dt)
            if self.c is not None:
                return log_decay, tables.readout_vector(gain, self.C, self.c)
            return log_decay, tables.mixing_matrix(gain, self.C, self.readout)


def in_float32(fn):
    """A function of `Module._apply` (to, half, bfloat16, cuda, ...) that moves tensors but rounds none to half precision."""

    def moved(t: Tensor) -> Tensor:
        out = fn(t)
        return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

    return moved


def s4d_inv_frequencies(n_basis: int) -> Tensor:
    """Imaginary part of A at initialisation, [M]: M/pi * (M/(2n+1) - 1) (S4D-Inv; paper, recurrent basis projection)."""
    n = torch.arange(n_basis, dtype=torch.float64, device="cpu")
    return (n_basis / math.pi * (n_basis / (2 * n + 1) - 1)).float()
