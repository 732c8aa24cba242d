"""The Triton kernels of the input features against the literal float64 reference.

On a machine with a GPU these tests run there. Elsewhere tests/scan/test_triton_gpu.py runs this file in a process of its own.
"""

from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from interdomain.features import input_features, input_features_step, ops

from ..scan.common import assert_equal, assert_within, saved_tensors
from ..scan.devices import DEVICE, on_kernels, use_kernels
from .common import EPS, MIXES, TOLERANCES, Case, literal, make, op_arguments, run

pytest.importorskip("triton")
pytestmark = on_kernels
K = MIXES["k"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)


# 16 tokens to a program at these sizes: T = 19 leaves three to the second, all of which add to the first one's gradients.
CASES = []
for mix in MIXES.values():
    CASES.append((Case(T=19, B=1, H=1, past=mix.get("W") != 0, **mix), torch.bfloat16))
CASES += [
    # Shorter than the filter; one program; three.
    (Case(T=2, B=1, H=2, **K), torch.float32),
    (Case(T=16, B=1, H=2, **K), torch.float32),
    (Case(T=33, B=1, H=2, **K), torch.float32),
    (Case(T=1, past=True, strided=True, **K), torch.float32),
    (Case(T=17, past=True, strided=True, **K), torch.float32),
    # Documents that start in either program, one and two tokens before its end among them.
    (Case(T=4, B=4, documents=True, past=True, **K), torch.float32),
    (Case(T=33, B=4, documents=True, past=True, **K), torch.float32),
    # Angles that differ by row.
    (Case(T=18, W=2, past=True, rope="rows", **MIXES["a"]), torch.float32),
    # Tiles that are not full.
    (Case(T=5, B=3, H=5, R=2, strided=True, **K), torch.float32),
    (Case(T=5, B=3, H=5, R=96, strided=True, **K), torch.float32),
    (Case(T=3, B=1, H=5, R=256, W=3, **MIXES["q"]), torch.float16),
]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_by_the_letter(case, dtype):
    leaves, rope, dy = make(case, dtype, device=DEVICE)
    got = run(case, leaves, rope, dy, backend="triton")
    assert got["y"].is_contiguous()
    for name, leaf in leaves.items():
        assert got[f"d{name}"].dtype == leaf.dtype
    assert_within(got, literal(case, leaves, rope, dy), TOLERANCES[dtype])


def test_mixed_dtypes():
    """bf16 activations with fp32 parameters and past, as without FSDP's casts. The backward needs the inputs, nothing else."""
    case = Case(T=6, past=True, **K)
    leaves, rope, dy = make(case, torch.bfloat16, torch.float32, DEVICE)
    leaves["past"] = leaves["past"].detach().float().requires_grad_()
    with saved_tensors() as saved:
        got = run(case, leaves, rope, dy, backend="triton")
    inputs = *leaves.values(), *rope
    assert sorted(x.numel() for x in saved) == sorted(x.numel() for x in inputs)
    assert got["dpast"].dtype == torch.float32
    assert_within(got, literal(case, leaves, rope, dy), TOLERANCES[torch.bfloat16])


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
    case = Case(T=5, past=mix == "k", documents=mix == "k", **MIXES[mix])
    leaves, rope, dy = make(case, torch.bfloat16, device=DEVICE)
    args = op_arguments(case, leaves, rope)
    tests = ["test_schema", "test_faketensor"]
    forward = *args, leaves.get("shift"), EPS
    torch.library.opcheck(ops.features, forward, test_utils=[*tests, "test_autograd_registration"])
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    torch.library.opcheck(ops.features_backward, (dy, *args, EPS, case.past), test_utils=tests)


@pytest.mark.parametrize(
    ("policy", "calls"),
    [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)],
)
def test_under_autocast_and_checkpointing(policy, calls, monkeypatch):
    """Autocast does not reach in; a policy that lists the op by its name saves it, one that does not repeats it."""
    from interdomain.features import triton_launch

    case = Case(T=6, **K)
    problem = make(case, torch.bfloat16, torch.float32, DEVICE)
    expected = run(case, *problem, backend="triton")
    forward = mock.Mock(wraps=triton_launch.forward)
    monkeypatch.setattr(triton_launch, "forward", forward)

    def policy_of(ctx, op, *args, **kwargs):
        if op is torch.ops.interdomain.features.default:
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy_of)

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
