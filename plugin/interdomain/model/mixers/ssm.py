"""The complex-diagonal dynamics of a mixer: Delta, A, C (and c) per head, and the two tensors that the scan reads.

Parameters are float32 and stay so under every mixed-precision policy (bf16 rounds a decay of 0.999 to exactly 1.0), and
complex numbers are stored as real pairs. The paper's learned B has no parameters of its own, in its counts neither: a diagonal
one does what scaling the columns of C does. The module takes no activations, so that a parallelisation can keep its parameters
whole and float32 on every rank; `fold` makes of them what the blocks are handed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interdomain.scan.tables import decay_exponent, input_gain, mixing_matrix, readout_vector

from ..feature_maps import KeptInFloat32

# Shapes: H heads, M basis functions.

BINDS = (
    0.01  # a mode is at the bound on the decay if the bound takes more than this share of its decay
)
# Of a layer: timescales 1 / |log|Lambda||, the smallest 1 - |Lambda|, the median Delta, the share of modes at the bound on the
# decay, the root mean square of |C|.
LIFE_SIGNS = (
    *(f"timescale_tokens_{which}" for which in ("min", "median", "max")),
    "one_minus_abs_lambda_min",
    "dt_median",
    "share_at_decay_bound",
    "c_rms",
)


class Dynamics(NamedTuple):
    """The parameters of H heads: log_dt [H]; log_A_real, A_imag [H, M]; C [H, M, M, 2], [H, M, 2] or None; c for the linear
    readout, [H, M], else None."""

    log_dt: Any
    log_A_real: Any
    A_imag: Any
    C: Tensor | None
    c: Tensor | None

    @torch.no_grad()
    def decay(self) -> tuple[Tensor, Tensor]:
        """log|Lambda| per token, [H, M], and which modes are at the bound (`BINDS`; `decay_exponent`), bool [H, M]."""
        dt = self.log_dt.exp()
        log_abs = decay_exponent(dt, self.log_A_real, self.A_imag)[..., 0]
        return log_abs, -log_abs < (1 - BINDS) * dt[:, None] * self.log_A_real.exp()

    @torch.no_grad()
    def c_rms(self) -> Tensor:
        """Root mean square of |C_mn|, what `mixer.c_scale` sets at the start; 1 without C."""
        return self.log_dt.new_ones(()) if self.C is None else self.C.square().sum(-1).mean().sqrt()

    @torch.no_grad()
    def life_signs(self) -> Tensor:
        """LIFE_SIGNS of a layer, float32."""
        log_abs, bound = self.decay()
        timescale = -1 / log_abs
        return torch.stack(
            [
                timescale.min(),
                timescale.median(),
                timescale.max(),
                -torch.expm1(log_abs.max()),
                self.log_dt.exp().quantile(0.5),
                bound.float().mean(),
                self.c_rms(),
            ]
        )


def scalars(signs: Tensor) -> dict[str, float]:
    """LIFE_SIGNS of all layers, [L, 7], by name; those of a layer without any are zeros. One read of the device."""
    named = {}
    for i, row in enumerate(signs.tolist()):
        if any(row):
            named |= {
                f"mixer/layer_{i:02d}/{name}": x for name, x in zip(LIFE_SIGNS, row, strict=True)
            }
    return named


def copied(parameter: Tensor) -> Tensor:
    """A copy of a parameter; of a DTensor that is whole on every rank, whose gradient is then this rank's share (`Partial`).

    A copy: FSDP2 puts a hook on every tensor that a module returns. A hook on a parameter would stay there, and of a view FSDP2
    warns.
    """
    if hasattr(
        parameter, "placements"
    ):  # else DTensor's module, which takes a second to import, is not needed
        from torch.distributed.tensor import DTensor, Partial

        assert isinstance(parameter, DTensor)
        parameter = parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
    return parameter.clone()


class SSMDynamics(KeptInFloat32):
    """Called, it returns its parameters: whole, where a parallelisation shards them, for that gathers them around a call."""

    def __init__(self, n_heads: int, n_basis: int, *, c_form: str, linear: bool) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32))

        self.log_dt = parameter(n_heads)
        self.log_A_real = parameter(n_heads, n_basis)
        self.A_imag = parameter(n_heads, n_basis)
        shapes = {
            "full": (n_heads, n_basis, n_basis, 2),
            "diagonal": (n_heads, n_basis, 2),
            "identity": None,
        }
        self.C = parameter(*shapes[c_form]) if shapes[c_form] else None
        self.c = parameter(n_heads, n_basis) if linear else None

    def forward(self) -> Dynamics:
        self.check_float32()
        C = None if self.C is None else copied(self.C)
        c = None if self.c is None else copied(self.c)
        return Dynamics(copied(self.log_dt), copied(self.log_A_real), copied(self.A_imag), C, c)


def fold(layers: list[Dynamics], readout: str) -> list[tuple[Tensor, Tensor]]:
    """Tensors that the scan reads, by layer: Lambda = exp(Delta A), input gain beta by zero-order hold, and the readout.

    Computed for the heads of all layers at once: it is some two hundred operations, forward and backward, on small tensors, and
    layer by layer their launches were of the order of a percent of a training step.

    Args:
        readout: `complex`, `hermitian` or `real`, where the layers have no c.
    Returns: per layer (log_decay [H, M, 2], mixing [H, 2M, 2M]) for the query readout, or (log_decay, readout [H, 2M]) for the
        linear one; float32.
    """
    joined = Dynamics(
        *(None if parts[0] is None else torch.cat(parts) for parts in zip(*layers, strict=True))
    )
    with torch.autocast(joined.log_dt.device.type, enabled=False):
        dt = joined.log_dt.exp()
        log_decay = decay_exponent(dt, joined.log_A_real, joined.A_imag)
        gain = input_gain(log_decay, dt)
        c = joined.c
        table = (
            mixing_matrix(gain, joined.C, readout)
            if c is None
            else readout_vector(gain, joined.C, c)
        )
    # Copies: torch.compile cannot return the views that `split` makes (it builds them again from the wrong base).
    heads = [len(layer.log_dt) for layer in layers]
    decays: Any = torch.split_with_sizes_copy(log_decay, heads)
    tables: Any = torch.split_with_sizes_copy(table, heads)
    return list(zip(decays, tables, strict=True))
