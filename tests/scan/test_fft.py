"""What is particular to backend="fft": slow decays over long sequences; no rounding of a transform stays in a state."""

import pytest
import torch

from interdomain import scan

from .common import Case, assert_agree, error, exact, op_inputs, run_op

QUERY_OR_LINEAR = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])


@QUERY_OR_LINEAR
@pytest.mark.parametrize(("T", "decay"), [(2048, -1e-6), (257, -scan.MAX_DECAY_PER_TOKEN)], ids=["slow", "bound"])
def test_float32_at_both_ends_of_the_decay(T, decay, linear):
    """At 1e-6 nothing is forgotten: every kernel is a tone of 2048 tokens, and a gradient of theta sums lags up to T."""
    inputs, cotangents = op_inputs(Case(T=T, H=1, G=2, R=2, D=3, M=3), torch.float32, linear=linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = decay
    got, expected = run_op(inputs, cotangents, linear, backend="fft"), exact(inputs, cotangents, linear)
    assert_agree(got, expected, "float32")
    assert max(error(got[n], expected[n], "rms") for n in got) < 2e-6  # measured: 3e-7, and 1e-6 in dw at the bound


def test_the_final_state_takes_no_rounding_from_the_transforms():
    """An outlier at the start is long forgotten by the fast modes; the error of a transform stays as large as it was."""
    inputs, _ = op_inputs(Case(T=257, R=4, D=4, M=8, state=False), torch.float32)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -0.2
        inputs["k"][:, 5] *= 1e6
    _, state = scan.interdomain_scan(**inputs, backend="fft")
    _, expected = scan.interdomain_scan(**{n: x.double() for n, x in inputs.items()}, backend="reference")
    assert error(state, expected, "rms") < 1e-6
