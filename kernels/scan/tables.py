"""Small per-head tables: log-decay, input gain, mixing matrix, readout vector, powers of the decay.

Shapes: H heads, M basis functions, J exponents. Complex numbers are real pairs [..., 2], because
some parts of optimisers, FSDP and inductor do not handle complex dtypes. All functions but
`initial_A` are differentiable by autograd. They are cheap: they run once per training step for the
heads of all layers, not once per token. Inputs are fp32 or fp64, and outputs have the same dtype.
Derivation: docs/kernels.md.
"""

import math

import torch
from torch import Tensor

# The largest -Re(theta) per token: |Lambda| >= e^-1, so the shortest memory is about one token. It
# keeps every power that a chunk of 64 tokens needs below e^64, far from fp32 overflow (e^88). It is
# 20 times the fastest decay of the S4D-Inv initialisation (0.05).
MAX_DECAY_PER_TOKEN = 1.0

# Tokens of a chunk in plain PyTorch.
CHUNK = 64

# The query readouts: how the complex U and Gamma become a real output; see `mixing_matrix`.
READOUTS = ("complex", "hermitian", "real")


def initial_A(form: str, n_basis: int) -> tuple[Tensor, Tensor]:
    """Returns A of a new model as (log(-Re A), Im A), each [M] in float64.

    Args:
        form: `s4d-inv`, `s4d-lin` or `s4d-real`, as in `MixerConfig.a_init`, which has the
            formulas.
        n_basis: M, the number of basis functions.
    """
    # log(-Re A) is the logarithm of `decay`, and Im A is `frequency`.
    n = torch.arange(n_basis, dtype=torch.float64, device="cpu")
    decay, frequency = {
        "s4d-inv": (torch.full_like(n, 0.5), n_basis / math.pi * (n_basis / (2 * n + 1) - 1)),
        "s4d-lin": (torch.full_like(n, 0.5), math.pi * n),
        "s4d-real": (n + 1, torch.zeros_like(n)),
    }[form]
    return decay.log(), frequency


def decay_exponent(dt: Tensor, log_A_real: Tensor, A_imag: Tensor) -> Tensor:
    """Computes theta = log Lambda = dt * A per token (paper eq. 11), with a bound on the decay.

    A = -exp(log_A_real) + i A_imag. The bound is soft. With x = dt * exp(log_A_real) and b =
    MAX_DECAY_PER_TOKEN, Re(theta) = -x (1 + (x/b)^8)^(-1/8): x itself for small x (relative
    deviation (x/b)^8 / 8, below fp32 rounding for x <= 0.12), b for large x. Above the bound the
    gradient falls as (b/x)^9 and is not cut off, unlike that of a clamp.

    Args:
        dt: Delta, the step size, [H], > 0.
        log_A_real: log(-Re A), [H, M].
        A_imag: Im A, [H, M].

    Returns:
        log_decay, [H, M, 2] as (real < 0, imaginary part in radians), per token.
    """
    # x is the decay without the bound, [H, M].
    x = dt[:, None] * log_A_real.exp()
    bound = torch.full_like(x, MAX_DECAY_PER_TOKEN)
    # The function is symmetric in x and b. The quotient by the larger of the two is at most 1, so
    # that its eighth power cannot overflow.
    low = torch.minimum(x, bound)
    high = torch.maximum(x, bound)
    decay = low * (1 + (low / high) ** 8) ** -0.125
    return torch.stack((-decay, dt[:, None] * A_imag), dim=-1)


def input_gain(log_decay: Tensor, dt: Tensor) -> Tensor:
    """Computes the gain of the inputs by zero-order hold, beta = (Lambda - 1) / A.

    Lambda is exp(theta), and A = theta / dt the A that log_decay stands for, bound included. So
    beta = dt (exp(theta) - 1) / theta.

    Args:
        log_decay: theta = log Lambda per token as real pairs, [H, M, 2].
        dt: Delta, the step size, [H].

    Returns:
        beta as real pairs, [H, M, 2].
    """
    # Each variable is [H, M], the real or the imaginary part of theta or of the numerator (num).
    re, im = log_decay.unbind(-1)
    # The numerator Lambda - 1 = exp(theta) - 1 without cancellation: cos(im) - 1 = -2 sin(im/2)^2.
    num_re = torch.expm1(re) * torch.cos(im) - 2 * torch.sin(im / 2) ** 2
    num_im = torch.exp(re) * torch.sin(im)
    # Divide both by `scale`, so that |theta|^2 does not underflow. The quotient does not depend on
    # it, and so it needs no gradient.
    scale = torch.maximum(re.abs(), im.abs()).detach().clamp_min(torch.finfo(re.dtype).tiny)
    re = re / scale
    im = im / scale
    num_re = num_re / scale
    num_im = num_im / scale
    # dt (exp(theta) - 1) / theta, as a product with conj(theta) / |theta|^2.
    factor = dt[:, None] / (re * re + im * im)
    beta_re = (num_re * re + num_im * im) * factor
    beta_im = (num_im * re - num_re * im) * factor
    return torch.stack((beta_re, beta_im), dim=-1)


def mixing_matrix(gain: Tensor, C: Tensor | None, readout: str = "complex") -> Tensor:
    """Computes W = G(Cb^T) P G(Cb): gain, C and readout in one real matrix per head.

    With it, the readout Re(q^T U^T Gamma) (paper eq. 13) is Re(b^T X^v), where b = W a and a = X^k
    q. X^k and X^v are the channels of keys and values of the state with unit gain.

    Cb = C diag(gain), G(Z) = [[Re Z, -Im Z], [Im Z, Re Z]], and P = I (`complex`), diag(I, -I)
    (`hermitian`) or diag(I, 0) (`real`).

    Args:
        gain: beta, from `input_gain`, as real pairs, [H, M, 2].
        C: Projection onto the basis, [H, M, M, 2] full or [H, M, 2] diagonal. None means the
            identity.
        readout: One of READOUTS: how complex U and Gamma become real.

    Returns:
        W, [H, 2M, 2M], acting on stacked [Re a; Im a].

    Raises:
        ValueError: The readout is another one, or C has none of these shapes.
    """
    if readout not in READOUTS:
        raise ValueError(f"readout is {readout!r}; allowed: {', '.join(READOUTS)}")
    M = gain.shape[1]
    # Cb = C diag(gain) as real and imaginary parts, [2, H, M, M]: for C = I, diagonal C and full C.
    if C is None:
        cb = torch.diag_embed(gain.movedim(-1, 0))
    elif C.shape == gain.shape:
        cb = torch.diag_embed(multiply(C, gain).movedim(-1, 0))
    elif C.shape == (*gain.shape[:2], M, 2):
        cb = multiply(C, gain[:, None]).movedim(-1, 0)
    else:
        raise ValueError(
            _WRONG_SHAPE_OF_C.format(
                got=tuple(C.shape), full=(*gain.shape[:2], M, 2), diagonal=tuple(gain.shape)
            )
        )
    # The diagonal of P, [2M, 1].
    sign = {"complex": 1.0, "hermitian": -1.0, "real": 0.0}[readout]
    projection = torch.cat((cb.new_ones(M), cb.new_full((M,), sign)))[:, None]
    # G(Cb^T) P G(Cb). Autocast would round these products to bf16, and with them every weight of C.
    with torch.autocast(gain.device.type, enabled=False):
        return _real_form(cb.mT) @ (projection * _real_form(cb))


def readout_vector(gain: Tensor, C: Tensor | None, c: Tensor) -> Tensor:
    """Computes w = gain * (C^T c), the linear readout on unit-gain states.

    The output is y = Re(sum_m w_m X[m]) for a state X.

    Args:
        gain: beta, from `input_gain`, as real pairs, [H, M, 2].
        C: Projection onto the basis, [H, M, M, 2] full or [H, M, 2] diagonal. None means the
            identity.
        c: Real weights of the basis functions, [H, M].

    Returns:
        w, [H, 2M] as (Re w | Im w).

    Raises:
        ValueError: C has another shape.
    """
    # C^T c as real pairs, [H, M, 2]: for C = I, diagonal C and full C.
    if C is None:
        projected = torch.stack((c, torch.zeros_like(c)), dim=-1)
    elif C.shape == gain.shape:
        projected = C * c[..., None]
    elif C.shape == (*gain.shape[:2], gain.shape[1], 2):
        projected = (C * c[:, :, None, None]).sum(1)
    else:
        full = (*gain.shape[:2], gain.shape[1], 2)
        raise ValueError(
            _WRONG_SHAPE_OF_C.format(got=tuple(C.shape), full=full, diagonal=tuple(gain.shape))
        )
    # Pairs [H, M, 2] -> (Re | Im), [H, 2M].
    return multiply(gain, projected).movedim(-1, 1).flatten(1)


def powers(log_decay: Tensor, exponents: Tensor) -> Tensor:
    """Computes Lambda^j for every exponent j, negative ones included.

    The phase is multiplied and reduced in fp64: at M = 64 it reaches 128 radians per token, and
    fp32 would be off by 5e-4 radians after 64 tokens.

    Args:
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        exponents: J exponents, [J], integers of any dtype.

    Returns:
        The powers as real pairs, [H, J, M, 2], in log_decay's dtype.
    """
    # Lambda^j = exp(re j) (cos(im j) + i sin(im j)), [H, J, M].
    j = exponents.to(dtype=torch.float64, device=log_decay.device)[:, None]
    re, im = log_decay.double().unbind(-1)
    magnitude = torch.exp(re[:, None] * j)
    phase = torch.remainder(im[:, None] * j, 2 * math.pi)
    pairs = torch.stack((magnitude * torch.cos(phase), magnitude * torch.sin(phase)), dim=-1)
    return pairs.to(log_decay.dtype)


_WRONG_SHAPE_OF_C = (
    "C has shape {got}; allowed: {full} (full), {diagonal} (diagonal) or None (identity)"
)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies two complex tensors that are real pairs, [..., 2]."""
    x_re, x_im = x.unbind(-1)
    y_re, y_im = y.unbind(-1)
    return torch.stack((x_re * y_re - x_im * y_im, x_re * y_im + x_im * y_re), dim=-1)


def _real_form(z: Tensor) -> Tensor:
    """Returns G(Z) = [[Re Z, -Im Z], [Im Z, Re Z]], the real matrix of a complex product.

    Args:
        z: (Re Z, Im Z), [2, H, M, M]. The result is [H, 2M, 2M].
    """
    re, im = z.unbind(0)
    upper = torch.cat((re, -im), dim=-1)
    lower = torch.cat((im, re), dim=-1)
    return torch.cat((upper, lower), dim=-2)
