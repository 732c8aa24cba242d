"""The Triton kernels of the input features against the literal float64 reference.

On a machine with a GPU these tests run there. Elsewhere tests/scan/test_triton_gpu.py runs this file in a process of its own.
"""

import functools
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from interdomain.features import input_features, input_features_step, ops

from ..scan.common import assert_equal, assert_within, saved_tensors
from ..scan.devices import DEVICE, on_kernels, use_kernels
from .common import CASES, MIXES, TOLERANCES, Case, literal, make, run

pytest.importorskip("triton")
pytestmark = on_kernels
K = MIXES["k"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_by_the_letter(case, dtype):
    """Parameters and past inputs are fp32 beside bf16 activations, as without FSDP's casts, or have their dtype.

    The backward needs the inputs, nothing else.
    """
    parameters = torch.float32 if case.past else dtype
    leaves, rope, dy = make(case, dtype, parameters, DEVICE)
    with saved_tensors() as saved:
        got = run(case, leaves, rope, dy, backend="triton")
    assert len(saved) == len(leaves) + len(rope or ()) + case.documents
    assert got["y"].is_contiguous()
    for name, leaf in leaves.items():
        assert got[f"d{name}"].dtype == leaf.dtype
    assert_within(got, literal(case, leaves, rope, dy), TOLERANCES[dtype])


@pytest.mark.parametrize("mix", ["q", "k", "a"])
def test_zeros_have_no_direction_and_no_nan(mix):
    """Rows of zeros, where plain PyTorch and the kernels take the same one-sided derivative."""
    case = Case(T=4, **MIXES[mix] | dict(W=0))
    leaves, rope, dy = make(case, torch.float32, device=DEVICE)
    x = leaves["x"].data
    x[:, :2] = 0
    x[:, 2] *= 1e-7  # below the smallest norm that SiLU's features are divided by
    got = run(case, leaves, rope, dy, backend="triton")
    assert_within(got, run(case, leaves, rope, dy, backend="torch"), 2e-6)
    tokens = x[:, 1:3].flatten(0, 1)
    options = dict(head_dim=case.R, silu=case.H)
    y = input_features_step(tokens.clone(), **options, backend="triton")
    torch.testing.assert_close(y, input_features_step(tokens, **options, backend="torch"))


@pytest.mark.parametrize("mix", ["k", "v"])
def test_opcheck(mix):
    """The ops with the arguments that a forward and a backward give them."""
    case = Case(T=5, past=mix == "k", documents=mix == "k", **MIXES[mix])
    forward = mock.Mock(wraps=ops.features)
    backward = mock.Mock(wraps=ops.features_backward)
    with mock.patch.multiple(ops, features=forward, features_backward=backward):
        run(case, *make(case, torch.bfloat16, device=DEVICE), backend="triton")
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(ops.features_backward, backward.call_args.args, test_utils=tests)
    tests.append("test_autograd_registration")
    torch.library.opcheck(ops.features, forward.call_args.args, test_utils=tests)


@pytest.mark.parametrize(
    ("saved", "calls"), [([torch.ops.interdomain.features.default], 1), ([], 2)]
)
def test_under_autocast_and_checkpointing(saved, calls, monkeypatch):
    """Autocast does not reach in; a policy that lists the op by its name saves it, one that does not repeats it."""
    from interdomain.features import triton_launch

    case = Case(T=6, **K)
    problem = make(case, torch.bfloat16, torch.float32, DEVICE)
    expected = run(case, *problem, backend="triton")
    forward = mock.Mock(wraps=triton_launch.forward)
    monkeypatch.setattr(triton_launch, "forward", forward)
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)

    def block(*args, **kwargs):
        return input_features(*args, **kwargs) * 1.0

    def checkpointed(*args, **kwargs):
        with torch.autocast(DEVICE, torch.bfloat16):
            return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    assert_equal(run(case, *problem, function=checkpointed, backend="triton"), expected)
    assert forward.call_count == calls


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_offsets_beyond_int32():
    """2^31 numbers and more in x, the last tokens against those tokens alone."""
    T, E = 70_001, 32_768
    period = 1009  # a prime: no wrapped offset lands on the same numbers
    torch.manual_seed(0)
    x = torch.randn(1, period, E).bfloat16().cuda()[:, torch.arange(T) % period]
    options = dict(conv=(torch.randn(E, 4).cuda(), torch.randn(E).cuda()), silu=True)
    y = input_features(x, 64, **options, backend="triton")
    past = x[:, -103:-100]
    tail = input_features(x[:, -100:], 64, **options, past=past, backend="triton")
    assert torch.equal(y[:, -100:], tail)
