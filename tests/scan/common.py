"""Seeded problems, the ways to run them, and the one tolerance table.

Shapes: B batch, T time, H state heads, G query heads per state head, R key features, D value width, M basis functions.
"""

import contextlib
import functools
import math
from dataclasses import dataclass

import pytest
import torch

from interdomain import scan
from interdomain.scan import reference

BACKENDS = ("chunkwise", "fft", "reference")
TOKENS = ("q", "k", "v", "z")
linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])

# Bounds of the relative error: the RMS of the error over the RMS of the value.
TOLERANCES = {
    # Same function, other order of summation: what is left is rounding, 1e-16 times sums of thousands of terms.
    "float64": 1e-10,
    # fp32 arithmetic throughout. Measured: 3e-7 in `chunkwise`, in Triton too; 1e-6 in `fft`, 2.4e-6 in the loop over time.
    "float32": 3e-6,
    # Products in 3xTF32. No GPU has run them yet.
    "float32 on a GPU": 1e-5,
    # Tensors returned in bf16 are rounded once (1.7e-3 RMS); everything before it is fp32.
    "bfloat16": 6e-3,
    # All modes at |Lambda| = 1/e: an output is its own token and little else, summed over modes that cancel.
    "bfloat16 at the decay bound": 8e-3,
}
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def exact_values(x):
    return x.detach().cpu().double()


def error(got, expected):
    """Returns the RMS error of a tensor, relative to the expected one."""
    assert got.shape == expected.shape
    expected = exact_values(expected)
    distance = (exact_values(got) - expected).norm()
    return (distance / expected.norm().clamp_min(1e-300)).item()


def worst_number(got, expected):
    """Returns a sentence about the number that is farthest from the expected one."""
    distance = (exact_values(got) - exact_values(expected)).abs().nan_to_num(nan=torch.inf)
    position = torch.unravel_index(distance.argmax(), distance.shape)
    place = [index.item() for index in position]
    return f"the worst is {got[position]} for {expected[position]} at {place}"


def assert_within(got, expected, bound):
    """Compares tensors by name. A failure shows the worst number of each tensor that is beyond the bound."""
    assert got.keys() == expected.keys()
    problems = []
    for name, right in expected.items():
        relative = error(got[name], right)
        # `not <` instead of `>`: a NaN must fail.
        if not relative < bound:
            problems.append(f"{name}: {relative:.1e}, {worst_number(got[name], right)}")
    assert not problems, f"beyond {bound:.0e}:\n" + "\n".join(problems)


def assert_agree(got, expected, tolerance):
    """Compares tensors by name, to a tolerance of the table."""
    assert_within(got, expected, TOLERANCES[tolerance])


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
    decay: str = "middle"  # a key of DECAYS, or s4d
    state: bool = True


# Re(dt A) before the bound
DECAYS = {"middle": (1e-3, 0.3), "strong": (0.1, 50.0), "weak": (1e-8, 1e-6)}
CASES = (
    Case(T=1, B=2, R=4, D=6),
    Case(T=2, H=3, G=3, R=5, D=4, readout="hermitian", C="diagonal"),
    Case(T=63, B=2, R=8, D=12, readout="real", decay="strong", state=False),
    Case(T=64, G=3, R=8, D=8, M=24, C="identity", decay="weak"),
    Case(T=65, H=1, R=96, D=96, M=32, readout="hermitian"),
    Case(T=100, R=16, D=16, M=64, readout="real", C="diagonal", decay="s4d", state=False),
    Case(T=257, G=3, R=6, D=10),
)


def make(case, linear=False):
    """Makes the parameters of a layer and its tokens.

    Returns:
        The float64 leaves by name: q, k and v, or z and c; dt, log_A_real, A_imag; C and initial_state if there are some.
        The cotangents of the output and of the final state.
    """
    generator = torch.Generator().manual_seed(case.T)
    B, T, H, G, R, D, M = case.B, case.T, case.H, case.G, case.R, case.D, case.M

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def log_uniform(low, high, *shape):
        u = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return torch.exp(math.log(low) + u * (math.log(high) - math.log(low)))

    dt = log_uniform(1e-3, 1e-1, H)
    if case.decay == "s4d":
        # The initialisation; one head is at the largest step, 128 radians per token.
        dt[0] = 0.1
        log_A_real, A_imag = (x.repeat(H, 1) for x in scan.initial_A("s4d-inv", M))
    else:
        log_A_real = (log_uniform(*DECAYS[case.decay], H, M) / dt[:, None]).log()
        A_imag = 3 * normal(H, M) / dt[:, None]
    q = normal(B, T, H * G, R) / R**0.5
    k = normal(B, T, H, R)
    v = normal(B, T, H, D)
    c = normal(H, M) / M**0.5
    leaves = {"q": q, "k": k, "v": v}
    if linear:
        leaves = {"z": torch.cat((k, v), dim=-1), "c": c}
    leaves |= {"dt": dt, "log_A_real": log_A_real, "A_imag": A_imag}
    if case.C == "full":
        leaves["C"] = normal(H, M, M, 2) / M
    if case.C == "diagonal":
        leaves["C"] = normal(H, M, 2) / M
    if case.state:
        leaves["initial_state"] = normal(B, H, M, R + D, 2)
    d_o = normal(B, T, H * G, D)
    d_y = normal(B, T, H, R + D)
    d_state = normal(B, H, M, R + D, 2)
    for x in leaves.values():
        x.requires_grad_()
    if linear:
        return leaves, (d_y, d_state)
    return leaves, (d_o, d_state)


def gradients(outputs, cotangents, leaves):
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def results(outputs, cotangents, leaves):
    """Returns the output, the final state and every gradient, by name."""
    out, state = outputs
    return {"out": out, "state": state, **gradients(outputs, cotangents, leaves)}


def paper_A(leaves):
    """Returns A, with the bound on the decay written out a second time."""
    dt = leaves["dt"][:, None]
    x = dt * leaves["log_A_real"].exp()
    return torch.complex(-x / (1 + x**8) ** 0.125 / dt, leaves["A_imag"])


def paper_C(leaves):
    if "C" not in leaves:
        H, M = leaves["A_imag"].shape
        return torch.eye(M, dtype=torch.complex128).expand(H, M, M)
    C = torch.view_as_complex(leaves["C"])
    if C.ndim == 2:
        return torch.diag_embed(C)
    return C


@functools.cache
def paper(case, linear):
    """Returns the values and every gradient of the paper's loop."""
    leaves, cotangents = make(case, linear)
    dynamics = leaves["dt"], paper_A(leaves), paper_C(leaves)
    state = leaves.get("initial_state")
    if linear:
        outputs = reference.paper_linear(leaves["z"], *dynamics, leaves["c"], initial_state=state)
    else:
        tokens = leaves["q"], leaves["k"], leaves["v"]
        outputs = reference.paper_scan(
            *tokens, *dynamics, readout=case.readout, initial_state=state
        )
    return results(outputs, cotangents, leaves)


def run_case(case, linear, run):
    """Returns the same of a function that takes the arguments of the scan."""
    leaves, cotangents = make(case, linear)
    return results(run(**arguments(leaves, case.readout)), cotangents, leaves)


def arguments(leaves, readout):
    """Returns the arguments of the scan: tokens, tables and the state."""
    inputs = {name: leaves[name] for name in TOKENS if name in leaves}
    theta = scan.decay_exponent(leaves["dt"], leaves["log_A_real"], leaves["A_imag"])
    gain = scan.input_gain(theta, leaves["dt"])
    inputs["log_decay"] = theta
    if "c" in leaves:
        inputs["readout"] = scan.readout_vector(gain, leaves.get("C"), leaves["c"])
    else:
        inputs["mixing"] = scan.mixing_matrix(gain, leaves.get("C"), readout)
    if "initial_state" in leaves:
        inputs["initial_state"] = leaves["initial_state"]
    return inputs


def op_inputs(case, dtype, activations=None, linear=False, device="cpu"):
    """Returns the arguments of the scan as leaves of their own, and cotangents.

    Args:
        case: The problem.
        dtype: They are rounded to this dtype.
        activations: The dtype of tokens and of the output's cotangent, if it is another.
        linear: True for the linear readout.
        device: Where they are.
    """
    leaves, (d_out, d_state) = make(case, linear)
    activations = activations or dtype
    dtypes = dict.fromkeys(TOKENS, activations)
    inputs = {}
    for name, x in arguments(leaves, case.readout).items():
        x = x.detach().to(device, dtypes.get(name, dtype))
        inputs[name] = x.requires_grad_()
    return inputs, (d_out.to(device, activations), d_state.to(device, dtype))


def part_of_time(inputs, times):
    """Returns inputs whose tokens are those of these times (of one time, without the axis)."""
    part = dict(inputs)
    for name in TOKENS:
        if name in part:
            part[name] = part[name][:, times]
    return part


def run_scan(**inputs):
    """Calls the scan whose readout the inputs have."""
    if "z" in inputs:
        return scan.linear_scan(**inputs)
    return scan.interdomain_scan(**inputs)


def run_step(**inputs):
    """Calls the step whose readout the inputs have."""
    if "z" in inputs:
        return scan.linear_step(**inputs)
    return scan.interdomain_step(**inputs)


def run_op(inputs, cotangents, **options):
    """Returns the output, the final state and every gradient of the scan."""
    return results(run_scan(**inputs, **options), cotangents, inputs)


def as_float64(inputs):
    """Returns the same numbers in float64 on the CPU, as leaves."""
    return {name: exact_values(x).requires_grad_() for name, x in inputs.items()}


def exact(inputs, cotangents, documents=None):
    """Returns the results for the same rounded inputs, run in float64 by the loop over time."""
    if documents is not None:
        documents = documents.cpu()
    cotangents = [exact_values(x) for x in cotangents]
    return run_op(as_float64(inputs), cotangents, backend="reference", documents=documents)


@contextlib.contextmanager
def saved_tensors():
    """Yields a list that gets every tensor that autograd saves."""
    saved = []

    def pack(x):
        saved.append(x)
        return x

    def unpack(x):
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield saved
