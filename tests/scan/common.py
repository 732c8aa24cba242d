"""Seeded problems, the two ways to run them, and the one tolerance table.

Shapes: B batch, T time, H state heads, G query heads per state head, R key features, D value width, M basis functions.
"""

import functools
import math
from dataclasses import dataclass

import pytest
import torch

from interdomain import scan
from interdomain.scan import reference

BACKENDS = ("chunkwise", "fft", "reference")
linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])

# name: (bound, measure). `max`: largest error over largest value. `rms`: RMS of the error over RMS of the value.
TOLERANCES = {
    # Same function, other order of summation: what is left is rounding, 1e-16 times sums of thousands of terms.
    "float64": (1e-10, "max"),
    # fp32 arithmetic throughout, accumulated over chunks; measured up to 6e-6 (the loop over time).
    "float32": (1e-5, "rms"),
    # Tensors returned in bf16 are rounded once (1.7e-3 RMS); everything before it is fp32.
    "bfloat16": (6e-3, "rms"),
    # All modes at |Lambda| = 1/e: an output is its own token and little else, summed over modes that cancel.
    "bfloat16 at the decay bound": (8e-3, "rms"),
}


def error(got, expected, measure):
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    if measure == "max":
        return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()
    return (
        (got - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-300)
    ).item()


def assert_agree(got, expected, tolerance):
    bound, measure = TOLERANCES[tolerance]
    errors = {name: error(got[name], expected[name], measure) for name in expected}
    assert got.keys() == expected.keys()
    # `not <` instead of `>`: a NaN must fail.
    wrong = {name: f"{value:.1e}" for name, value in errors.items() if not value < bound}
    assert not wrong, (
        f"beyond {bound:.0e} ({measure}): {wrong}; all: { {n: f'{e:.1e}' for n, e in errors.items()} }"
    )


@dataclass(frozen=True)
class Case:
    T: int
    B: int = 1
    H: int = 2
    G: int = 1
    R: int = 6
    D: int = 6
    M: int = 16
    readout: str = "complex"
    C: str = "full"
    decay: str = "middle"  # Re(dt A) before the bound: middle 1e-3..0.3, strong 0.1..50, weak 1e-8..1e-6, s4d
    state: bool = True


CASES = (
    Case(T=1, B=2, R=4, D=6),
    Case(T=2, H=3, G=3, R=5, D=4, readout="hermitian", C="diagonal"),
    Case(T=63, B=2, R=8, D=12, readout="real", decay="strong", state=False),
    Case(T=64, G=3, R=8, D=8, M=24, C="identity", decay="weak"),
    Case(T=65, H=1, R=96, D=96, M=32, readout="hermitian"),
    Case(T=100, R=16, D=16, M=64, readout="real", C="diagonal", decay="s4d", state=False),
    Case(T=257, G=3, R=6, D=10),
)


def make(case):
    """float64 leaves (dt, log_A_real, A_imag, C, c, q, k, v, initial_state) and cotangents."""
    g = torch.Generator().manual_seed(case.T)
    B, T, H, G, R, D, M = case.B, case.T, case.H, case.G, case.R, case.D, case.M

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def log_uniform(low, high, *shape):
        u = torch.rand(*shape, generator=g, dtype=torch.float64)
        return torch.exp(math.log(low) + u * (math.log(high) - math.log(low)))

    dt = log_uniform(1e-3, 1e-1, H)
    if (
        case.decay == "s4d"
    ):  # the initialisation; one head at the largest step, 128 radians per token
        dt[0] = 0.1
        log_A_real = torch.full((H, M), math.log(0.5), dtype=torch.float64)
        n = torch.arange(M, dtype=torch.float64)
        A_imag = (M / math.pi * (M / (2 * n + 1) - 1)).expand(H, M).clone()
    else:
        low, high = {"middle": (1e-3, 0.3), "strong": (0.1, 50.0), "weak": (1e-8, 1e-6)}[case.decay]
        log_A_real = (log_uniform(low, high, H, M) / dt[:, None]).log()
        A_imag = 3 * normal(H, M) / dt[:, None]
    shape = {"full": (H, M, M, 2), "diagonal": (H, M, 2), "identity": None}[case.C]
    leaves = {
        "q": normal(B, T, H * G, R) / R**0.5,
        "k": normal(B, T, H, R),
        "v": normal(B, T, H, D),
        "dt": dt,
        "log_A_real": log_A_real,
        "A_imag": A_imag,
        "c": normal(H, M) / M**0.5,
    }
    if shape is not None:
        leaves["C"] = normal(*shape) / M
    if case.state:
        leaves["initial_state"] = normal(B, H, M, R + D, 2)
    cotangents = {
        "o": normal(B, T, H * G, D),
        "y": normal(B, T, H, R + D),
        "state": normal(B, H, M, R + D, 2),
    }
    return leaves, cotangents


def gradients(outputs, cotangents, leaves):
    total = sum((out * cotangent).sum() for out, cotangent in zip(outputs, cotangents, strict=True))
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def leaves_of(case, *names):
    leaves, cotangents = make(case)
    wanted = (*names, "dt", "log_A_real", "A_imag", "C", "initial_state")
    return {n: x.requires_grad_() for n, x in leaves.items() if n in wanted}, cotangents


def paper_A(dt, log_A_real, A_imag):
    """A with the bound on the decay written out a second time."""
    x = dt[:, None] * log_A_real.exp()
    return torch.complex(-x / (1 + x**8) ** 0.125 / dt[:, None], A_imag)


def paper_C(leaves, like):
    C = leaves.get("C")
    if C is None:
        return torch.eye(like.shape[1], dtype=torch.complex128).expand(like.shape[0], -1, -1)
    C = torch.complex(C[..., 0], C[..., 1])
    return C if C.ndim == 3 else torch.diag_embed(C)


@functools.cache
def paper(case, linear):
    """Values and every gradient of the paper's loop."""
    leaves, cotangents = leaves_of(case, "k", "v", "c" if linear else "q")
    A = paper_A(leaves["dt"], leaves["log_A_real"], leaves["A_imag"])
    dynamics = leaves["dt"], A, paper_C(leaves, A)
    state = leaves.get("initial_state")
    if linear:
        z = torch.cat((leaves["k"], leaves["v"]), dim=-1)
        outputs = reference.paper_linear(z, *dynamics, leaves["c"], initial_state=state)
    else:
        tokens = (leaves[n] for n in "qkv")
        outputs = reference.paper_scan(
            *tokens, *dynamics, readout=case.readout, initial_state=state
        )
    return results(outputs, cotangents, leaves, linear)


def run_case(case, linear, run):
    """The same of `run(*tokens, log_decay, mixing or readout, initial_state)`."""
    leaves, cotangents = leaves_of(case, "k", "v", "c" if linear else "q")
    tokens = (
        [torch.cat((leaves["k"], leaves["v"]), dim=-1)] if linear else [leaves[n] for n in "qkv"]
    )
    outputs = run(*tokens, *tables(leaves, case.readout), leaves.get("initial_state"))
    return results(outputs, cotangents, leaves, linear)


def results(outputs, cotangents, leaves, linear):
    grads = gradients(outputs, (cotangents["y" if linear else "o"], cotangents["state"]), leaves)
    return {"out": outputs[0], "state": outputs[1], **grads}


def tables(leaves, readout):
    theta = scan.decay_exponent(leaves["dt"], leaves["log_A_real"], leaves["A_imag"])
    gain = scan.input_gain(theta, leaves["dt"])
    if "c" in leaves:
        return theta, scan.readout_vector(gain, leaves.get("C"), leaves["c"])
    return theta, scan.mixing_matrix(gain, leaves.get("C"), readout)


def function(linear):
    return scan.linear_scan if linear else scan.interdomain_scan


def step_of(linear):
    return scan.linear_step if linear else scan.interdomain_step


def op_inputs(case, dtype, activations=None, linear=False):
    """The op's own inputs as leaves, rounded to dtype (activations: q, k, v, cotangent of the output), and cotangents."""
    leaves, cotangents = make(case)
    activations = activations or dtype
    if not linear:
        leaves.pop("c")
    theta, table = tables(leaves, case.readout)
    if linear:
        inputs = {"z": torch.cat((leaves["k"], leaves["v"]), dim=-1).to(activations)}
    else:
        inputs = {n: leaves[n].to(activations) for n in ("q", "k", "v")}
    inputs |= {"log_decay": theta.to(dtype), "readout" if linear else "mixing": table.to(dtype)}
    if case.state:
        inputs["initial_state"] = leaves["initial_state"].to(dtype)
    out = cotangents["y" if linear else "o"].to(activations), cotangents["state"].to(dtype)
    return {n: x.requires_grad_() for n, x in inputs.items()}, out


def run_op(inputs, cotangents, linear=False, **kwargs):
    """Forward and backward of the public function; dict of outputs and gradients."""
    out, state = function(linear)(**inputs, **kwargs)
    return {"out": out, "state": state, **gradients((out, state), cotangents, inputs)}


def exact(inputs, cotangents, linear=False):
    """The same rounded inputs, run in float64 by the loop over time."""
    inputs = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    return run_op(inputs, tuple(x.double() for x in cotangents), linear, backend="reference")
