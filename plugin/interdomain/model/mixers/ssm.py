"""The SSM parameters of a mixer, Delta, A, C (and c), and the two tensors that the scan reads.

The paper's equations read Lambda = exp(Delta A) (eq. 11) and U, Gamma from C x. They become
log_decay = log Lambda, and one matrix or vector per head that holds the input gain, C and the kind
of readout (`scan/tables.py`).

SSM parameters stay float32 under every mixed-precision policy: bf16 rounds a decay of 0.999 to
exactly 1. Complex numbers are stored as pairs of real ones. The paper's learned B has no parameters
here, as in the paper's counts: a diagonal B does what scaling the columns of C does.

The module takes no activations. A parallelisation can therefore keep its parameters whole and
float32 on every rank, and hand `discretize`'s result to the layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interdomain.scan.tables import decay_exponent, input_gain, mixing_matrix, readout_vector

from ..feature_maps import KeptInFloat32
from ..parallel import GroupRank, local_slice

# Shapes: H heads of the state, M basis functions, L layers.

# A basis function counts as bound if the bound on the decay takes more than this share of its
# decay.
BOUND_SHARE = 0.01
# Statistics of a layer: timescales 1 / |log|Lambda|| in tokens, the smallest 1 - |Lambda|, the
# median Delta, the share of basis functions at the bound on the decay, the root mean square of |C|.
SSM_STATISTICS = (
    "timescale_tokens_min",
    "timescale_tokens_median",
    "timescale_tokens_max",
    "one_minus_abs_lambda_min",
    "dt_median",
    "share_at_decay_bound",
    "c_rms",
)


class SSMParameters(NamedTuple):
    """The SSM parameters of H heads.

    Attributes:
        log_dt: log Delta, [H].
        log_A_real: log of -Re A, [H, M].
        A_imag: Im A, [H, M].
        C: Full [H, M, M, 2] or diagonal [H, M, 2]. None means the identity.
        c: The linear readout, [H, M]. None means the query readout.
    """

    log_dt: Tensor
    log_A_real: Tensor
    A_imag: Tensor
    C: Tensor | None
    c: Tensor | None

    @torch.no_grad()
    def decay(self) -> tuple[Tensor, Tensor]:
        """Returns log|Lambda| per token, and which basis functions count as bound (bool): [H, M].

        `decay_exponent` bounds the decay softly. A basis function counts as bound if that takes
        more than BOUND_SHARE of its decay.
        """
        dt = self.log_dt.exp()
        log_abs, _ = decay_exponent(dt, self.log_A_real, self.A_imag).unbind(-1)
        unbounded = dt[:, None] * self.log_A_real.exp()
        return log_abs, -log_abs < (1 - BOUND_SHARE) * unbounded

    @torch.no_grad()
    def c_rms(self) -> Tensor:
        """Returns the root mean square of |C_mn|, initially `mixer.c_scale`; 1 without C."""
        if self.C is None:
            return self.log_dt.new_ones(())
        # |C_mn|^2 is the sum of the squares of the real and the imaginary part.
        return self.C.square().sum(-1).mean().sqrt()

    @torch.no_grad()
    def ssm_statistics(self) -> Tensor:
        """Returns the layer's statistics in the order of SSM_STATISTICS, float32."""
        log_abs, at_bound = self.decay()
        timescale = -1 / log_abs
        statistics = [
            timescale.min(),
            timescale.median(),
            timescale.max(),
            -torch.expm1(log_abs.max()),
            self.log_dt.exp().quantile(0.5),
            at_bound.float().mean(),
            self.c_rms(),
        ]
        return torch.stack(statistics)


def scalars(signs: Tensor) -> dict[str, float]:
    """Names the statistics of all layers for a log.

    A layer whose row is zeros has no statistics. The host waits for the device once.

    Args:
        signs: `ssm_statistics` of each layer, [L, 7], in the order of SSM_STATISTICS.
    """
    named = {}
    for i, row in enumerate(signs.tolist()):
        if any(row):
            for name, value in zip(SSM_STATISTICS, row, strict=True):
                named[f"mixer/layer_{i:02d}/{name}"] = value
    return named


def copied(parameter: Tensor) -> Tensor:
    """Copies a parameter for a module to return.

    A DTensor must be whole on every rank; its gradient is then this rank's share. FSDP2 puts a hook
    on every tensor that a module returns. On a parameter the hook would stay, and for a view FSDP2
    warns.

    Args:
        parameter: A parameter, or a DTensor.
    """
    # A DTensor is known by this attribute: importing its class takes a second. `Partial` says that
    # the gradient of each rank is its share of a sum.
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import DTensor, Partial

        assert isinstance(parameter, DTensor)
        parameter = parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
    return parameter.clone()


class SSM(KeptInFloat32):
    """The SSM parameters of a layer as a module.

    Called, it returns copies of them (`SSMParameters`). Around a call, a parallelisation that
    shards the parameters gathers them.

    Args:
        n_heads: Heads of the state, H.
        n_basis: Basis functions, M.
        c_form: `full`, `diagonal` or `identity`.
        linear: True for the linear readout.
    """

    def __init__(
        self,
        n_heads: int,
        n_basis: int,
        *,
        c_form: str,
        linear: bool,
    ) -> None:
        """Makes the parameters for `n_heads` heads of `n_basis` basis functions, without values."""
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32))

        self.log_dt = parameter(n_heads)
        self.log_A_real = parameter(n_heads, n_basis)
        self.A_imag = parameter(n_heads, n_basis)
        self.C = None
        if c_form == "full":
            self.C = parameter(n_heads, n_basis, n_basis, 2)
        elif c_form == "diagonal":
            self.C = parameter(n_heads, n_basis, 2)
        self.c = parameter(n_heads, n_basis) if linear else None

    def forward(self) -> SSMParameters:
        """Returns copies of the parameters. C and c are None if the layer has none."""
        self.check_float32()
        C = None if self.C is None else copied(self.C)
        c = None if self.c is None else copied(self.c)
        return SSMParameters(
            copied(self.log_dt),
            copied(self.log_A_real),
            copied(self.A_imag),
            C,
            c,
        )


def local_parameters(
    ssm: nn.Module,
    tp_rank: "GroupRank | None",
    dtype: torch.dtype,
) -> list[Any]:
    """Returns the parameters that a module returns when called, for this rank's heads.

    Args:
        ssm: A module whose parameters have the heads as their first dimension.
        tp_rank: This rank's place in tensor parallelism. None means all heads.
        dtype: The least precise dtype of the result.
    """
    parameters = []
    for parameter in ssm():
        if parameter is not None:
            exact = parameter.to(torch.promote_types(parameter.dtype, dtype))
            parameter = local_slice(exact, tp_rank)
        parameters.append(parameter)
    return parameters


def discretize(layers: list[SSMParameters], readout: str) -> list[tuple[Tensor, Tensor]]:
    """Computes the two tensors that the scan reads, for each layer.

    Lambda = exp(Delta A), the input gain is the zero-order hold's, and the gain, C and the readout
    become one matrix or vector. The heads of all layers are computed at once: these are some two
    hundred small operations, and their launches layer by layer took about 1 % of a training step.

    Args:
        layers: The SSM parameters of layers with the same settings.
        readout: `complex`, `hermitian` or `real`, for layers without c.
    Returns:
        For each layer (log_decay [H, M, 2], mixing [H, 2M, 2M]), or (log_decay, readout [H, 2M])
        for the linear readout.
    """
    joined = []
    for tensors in zip(*layers, strict=True):
        joined.append(None if tensors[0] is None else torch.cat(tensors))
    log_dt, log_A_real, A_imag, C, c = joined
    with torch.autocast(log_dt.device.type, enabled=False):
        dt = log_dt.exp()
        log_decay = decay_exponent(dt, log_A_real, A_imag)
        gain = input_gain(log_decay, dt)
        if c is None:
            table = mixing_matrix(gain, C, readout)
        else:
            table = readout_vector(gain, C, c)
    # Copies: torch.compile rebuilds the views that `split` makes from the wrong base.
    heads = [len(layer.log_dt) for layer in layers]
    decays: Any = torch.split_with_sizes_copy(log_decay, heads)
    tables: Any = torch.split_with_sizes_copy(table, heads)
    return list(zip(decays, tables, strict=True))
