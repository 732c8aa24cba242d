"""The Triton kernels of `chunkwise` against the fp64 loop: values, final state, every gradient.

On a machine with a GPU these tests run there. Elsewhere test_triton_gpu.py runs this file in a process of its own.
Chunks are of 64 tokens in bf16 and of 16 in fp32, unless `small_chunks` makes them 16.
"""

import functools
from unittest import mock

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops

from .common import (
    Case,
    assert_agree,
    assert_equal,
    error,
    exact,
    gradients,
    linear_or_query,
    op_inputs,
    part_of_time,
    results,
    run_op,
    run_scan,
    saved_tensors,
)
from .devices import DEVICE, on_kernels, use_kernels
from .test_documents import STARTS, packed

pytest.importorskip("triton")
pytestmark = on_kernels
FP32, BF16 = torch.float32, torch.bfloat16
FLOAT32 = "float32 on a GPU" if DEVICE == "cuda" else "float32"
BOUNDS = {FP32: FLOAT32, BF16: "bfloat16"}
run_kernels = functools.partial(run_op, backend="chunkwise")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)
    from interdomain.scan import triton_chunkwise

    return triton_chunkwise


def replace_plan(kernels, monkeypatch, **changes):
    make_plan = kernels.make_plan

    def changed(*args):
        return make_plan(*args)._replace(**changes)

    monkeypatch.setattr(kernels, "make_plan", changed)


@pytest.fixture
def small_chunks(kernels, monkeypatch):
    replace_plan(kernels, monkeypatch, chunk=16)


def cut_time(module, segments, monkeypatch):
    monkeypatch.setattr(module, "segment_count", mock.Mock(return_value=segments))


def problem(case, dtype, linear=False):
    """Returns inputs and cotangents on DEVICE, tokens of this dtype and all else in fp32."""
    return op_inputs(case, FP32, dtype, linear, DEVICE)


def check(case, dtype, linear, documents=None):
    inputs, cotangents = problem(case, dtype, linear)
    got = run_kernels(inputs, cotangents, documents=documents)
    tokens = {"out", "dq", "dk", "dv", "dz"}
    for name, x in got.items():
        assert x.dtype == (dtype if name in tokens else FP32)
    assert_agree(got, exact(inputs, cotangents, documents), BOUNDS[dtype])


@pytest.mark.parametrize(
    ("case", "dtype", "linear"),
    [
        # One token: nearly all of every tile is masked.
        (Case(T=1, B=2, H=1, R=16, D=16), BF16, False),
        # No pointer to a state; W's lower half.
        (Case(T=33, H=2, R=4, D=5, readout="hermitian", state=False), FP32, False),
        # A chunk of one token; heads that share a state.
        (Case(T=65, B=2, H=1, G=2, R=16, D=17, readout="real"), BF16, False),
        # Whole chunks and full tiles: compiled without masks. Sums over all of time: bf16 sums would show.
        (Case(T=128, H=1, G=2, R=16, D=16, decay="weak"), BF16, False),
        # Widths that are no powers of two.
        (Case(T=20, H=1, R=96, D=96), FP32, False),
        # 128 radians per token; R is not D.
        (Case(T=70, H=1, R=40, D=70, M=64, decay="s4d"), BF16, False),
        # The largest M has plans of its own.
        (Case(T=20, H=1, R=32, D=24, M=128, decay="s4d"), FP32, False),
        # The linear readout. 73 channels: two blocks of them in the readout's gradient.
        (Case(T=33, H=2, R=40, D=33, state=False), FP32, True),
        (Case(T=130, H=1, R=16, D=16, M=32), BF16, True),
    ],
    ids=str,
)
def test_values_and_gradients(case, dtype, linear):
    check(case, dtype, linear)


@linear_or_query
def test_phases_of_thousands_of_radians(linear, kernels, monkeypatch):
    """In fp32 a phase would be off by 1e-3. Chunks are of 16 tokens; segments of 48 and of 42."""
    cut_time(kernels, 2, monkeypatch)
    inputs, cotangents = problem(Case(T=90, H=1, R=4, D=5, decay="weak"), FP32, linear)
    inputs["log_decay"].data[..., 1] = torch.linspace(1200, 1280, 16)
    assert_agree(run_kernels(inputs, cotangents), exact(inputs, cotangents), FLOAT32)


@linear_or_query
def test_at_the_decay_bound(linear):
    """Tables span |Lambda|^-32 to |Lambda|^32; what lies above the diagonal holds up to e^63 and must not be read."""
    inputs, cotangents = problem(Case(T=70, H=1, G=2, R=16, D=16), BF16, linear)
    inputs["log_decay"].data[..., 0] = -scan.MAX_DECAY_PER_TOKEN
    got = run_kernels(inputs, cotangents)
    assert_agree(got, exact(inputs, cotangents), "bfloat16 at the decay bound")


@pytest.mark.parametrize(
    ("segments", "case", "dtype", "linear", "documents"),
    [
        # Whole chunks take no masks along time.
        (2, Case(T=64, H=1, R=4, D=5, state=False), FP32, False, False),
        # The last segment is shorter and ragged, in parts of dW, too.
        (3, Case(T=70, H=1, G=2, R=4, D=5), BF16, False, False),
        # More than the 16 that the scan over segments takes at once.
        (18, Case(T=288, H=1, R=4, D=5, state=False), FP32, True, False),
        # Documents that end within chunks, with them, and with segments of one chunk.
        (1, Case(T=70, B=2, H=1, G=2, R=4, D=5), BF16, False, True),
        (1, Case(T=70, B=2, H=1, R=4, D=5), FP32, True, True),
        (3, Case(T=40, B=2, H=1, G=2, R=4, D=5), FP32, False, True),
    ],
    ids=str,
)
def test_segments_and_documents(
    segments, case, dtype, linear, documents, kernels, small_chunks, monkeypatch
):
    from interdomain.scan import triton_launch

    cut_time(kernels, segments, monkeypatch)
    cut_time(triton_launch, segments, monkeypatch)
    check(case, dtype, linear, packed(case.T, STARTS[: case.B], DEVICE) if documents else None)


@pytest.mark.parametrize(("name", "scale"), [("state", 1000), ("dinitial_state", 0.1)])
def test_states_and_their_gradients_are_summed_in_fp32(name, scale, small_chunks):
    """Four chunks add to one of hundreds of times their size; bf16 would round their sum away."""
    inputs, cotangents = problem(Case(T=64, H=1, R=16, D=16, decay="weak"), BF16)
    start = inputs["initial_state"] if name == "state" else cotangents[1]
    start.data *= scale
    got = run_kernels(inputs, cotangents)[name].cpu()
    expected = exact(inputs, cotangents)[name]
    for token in ("q", "k", "v"):
        inputs[token] = torch.zeros_like(inputs[token])
    carried = exact(inputs, cotangents)[name]
    assert error(got - carried, expected - carried) < 6e-3


@pytest.mark.parametrize(
    ("name", "linear", "decay", "unread"),
    [
        ("dmixing", False, None, slice(0)),
        ("dreadout", True, None, slice(0)),
        # Within chunks: over one that nobody reads, all is forgotten.
        ("dlog_decay", False, -1.0, slice(16, 32)),
        # Of the initial state alone: the costate and its derivative.
        ("dlog_decay", False, -1e-6, slice(48)),
    ],
    ids=str,
)
def test_gradients_are_summed_in_fp32(name, linear, decay, unread, small_chunks):
    """The last of three chunks has a cotangent a thousand times as large. Without its part that of the others is left."""
    inputs, (d_out, d_state) = problem(Case(T=48, H=1, R=16, D=16), BF16, linear)
    if decay is not None:
        inputs["log_decay"].data[..., 0] = decay
        inputs["k"].data[:, unread] = 0
        inputs["v"].data[:, unread] = 0
    nothing = torch.zeros_like(d_state)
    small = d_out.clone()
    small[:, 32:] = 0
    large = 1000 * d_out
    large[:, :32] = 0
    both = run_kernels(inputs, (small + large, nothing))[name].double()
    large_part = run_kernels(inputs, (large, nothing))[name]
    expected = exact(inputs, (small, nothing))[name]
    assert error(both - large_part, expected) < 6e-3


def test_held_operands_give_the_same_gradients(kernels, monkeypatch):
    """Slow modes and tokens of one sign: lags add up in dlog_decay, and roundings do not."""
    case = Case(T=128, H=1, R=16, D=16, M=32, decay="weak", state=False)
    inputs, (d_out, d_state) = problem(case, BF16)
    for token in ("q", "k", "v"):
        inputs[token].data.abs_()
    inputs["log_decay"].data[..., 1] /= 100
    cotangents = d_out.abs(), torch.zeros_like(d_state)
    replace_plan(kernels, monkeypatch, operands_in_registers=True)
    got = run_kernels(inputs, cotangents)
    replace_plan(kernels, monkeypatch, operands_in_registers=False)
    expected = run_kernels(inputs, cotangents)
    assert error(got.pop("dlog_decay"), expected.pop("dlog_decay")) < 1e-3
    assert_equal(got, expected)


@pytest.fixture
def shards(monkeypatch):
    """Shards that run one after the other: the state that one leaves enters the next, whose gradient of it goes back."""
    handed = {}

    def send(local, *_, reverse=False, **others):
        before = handed.get(reverse, torch.zeros_like(local))
        handed[reverse] = local
        return before

    def receive(sent, shape):
        return sent.clone()

    monkeypatch.setattr(ops.context_parallel, "send", send)
    monkeypatch.setattr(ops.context_parallel, "receive", receive)


@pytest.mark.parametrize(
    ("segments", "dtype", "linear", "documents"),
    [
        (1, BF16, False, None),
        (3, FP32, False, packed(80, ((0, 20, 45), (0, 33, 64)), DEVICE)),
        (3, FP32, True, packed(80, ((0, 20, 45), (0, 33, 64)), DEVICE)),
    ],
    ids=["query-bf16", "query-documents", "linear-documents"],
)
def test_shards(segments, dtype, linear, documents, kernels, shards, small_chunks, monkeypatch):
    cut_time(kernels, segments, monkeypatch)
    B = 1 if documents is None else 2
    inputs, (d_out, d_state) = problem(
        Case(T=80, B=B, H=1, G=2, R=4, D=5, state=False), dtype, linear
    )
    expected = exact(inputs, (d_out, torch.zeros_like(d_state)), documents)

    first = part_of_time(inputs, slice(40))
    second = part_of_time(inputs, slice(40, 80))
    if documents is not None:
        first["documents"] = documents[:, :40]
        # Document 0 goes on from the shard before.
        second["documents"] = documents[:, 40:] - documents[:, 39:40]
    first_out, _ = run_scan(**first, group="shards", backend="chunkwise")
    second_out, state = run_scan(**second, group="shards", backend="chunkwise")
    # Backwards autograd begins with the second one, which ran last.
    out = torch.cat((first_out, second_out), dim=1)
    got = {"out": out, "state": state, **gradients(out, d_out, inputs)}
    assert_agree(got, expected, BOUNDS[dtype])


def test_segments_of_a_shard_whose_queries_are_of_another_dtype(kernels, shards, monkeypatch):
    """Chunks are of 64 tokens where keys and values are sent, and of 16 in the scan, which float32 queries make float32."""
    cut_time(kernels, 2, monkeypatch)
    inputs, _ = problem(Case(T=200, H=1, R=4, D=5, state=False), BF16)
    inputs["q"] = inputs["q"].float()
    with torch.no_grad():
        got = run_scan(**inputs, group="shards", backend="chunkwise")
        expected = run_scan(**inputs, backend="chunkwise")
    assert_equal(got, expected)


@linear_or_query
def test_outputs_that_are_not_asked_for(linear):
    """No cotangent of the state, no final state: nothing is read that is not there."""
    inputs, (d_out, d_state) = problem(Case(T=20, H=1, R=4, D=5), FP32, linear)
    expected = exact(inputs, (d_out, torch.zeros_like(d_state)))
    expected.pop("state")
    for final_state in (True, False):
        out, _ = run_scan(**inputs, backend="chunkwise", final_state=final_state)
        assert_agree({"out": out, **gradients(out, d_out, inputs)}, expected, FLOAT32)


def test_mixed_dtypes():
    """One fp32 input makes it fp32; o follows v."""
    inputs, (d_out, d_state) = problem(Case(T=20, H=1, G=2, R=4, D=5), FP32)
    for name, dtype in (("q", BF16), ("k", FP32), ("v", torch.float16)):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    cotangents = d_out.half(), d_state
    got = run_kernels(inputs, cotangents)
    assert got["out"].dtype == torch.float16
    assert_agree(got, exact(inputs, cotangents), "bfloat16")


def shifted(x):
    """Returns the same numbers in memory that begins one number in."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def test_strided_inputs():
    """q, k, v cut out of one projection and a cotangent that is one number; views one element in; transposed k."""
    inputs, (d_out, d_state) = problem(Case(T=10, B=2, H=2, R=16, D=16), FP32)
    cotangents = d_out[:, :1, :1, :1].expand_as(d_out), d_state
    expected = exact(inputs, cotangents)
    inputs = {name: x.detach() for name, x in inputs.items()}
    q, k, v = torch.stack([inputs["q"], inputs["k"], inputs["v"]], dim=3).unbind(3)
    for other in (
        {"q": q, "k": k, "v": v},
        {name: shifted(x) for name, x in inputs.items()},
        {"k": inputs["k"].mT.contiguous().mT},
    ):
        leaves = {name: x.detach().requires_grad_() for name, x in (inputs | other).items()}
        assert_agree(run_kernels(leaves, cotangents), expected, FLOAT32)


def test_offsets_beyond_32_bits():
    """Tokens 2^25 numbers apart: the last ones lie beyond 2^31."""
    T = 70
    stride = 1 << 25
    inputs, (d_out, d_state) = problem(Case(T=T, H=1, R=16, D=16), BF16)
    expected = exact(inputs, (d_out, d_state))
    strides = (16, T * stride, stride, 16, 1)
    memory = torch.empty_strided((4, 1, T, 1, 16), strides, dtype=BF16, device=DEVICE)
    names = ("q", "k", "v")
    memory.copy_(torch.stack([*(inputs[name].detach() for name in names), d_out]))
    for name, x in zip(names, memory, strict=False):
        inputs[name] = x.requires_grad_()
    assert_agree(run_kernels(inputs, (memory[3], d_state)), expected, "bfloat16")


def test_recompute_is_a_matter_of_memory_only(kernels, small_chunks, monkeypatch):
    """The same bits with packed documents in segments; `a` is all that is kept beside the inputs."""
    cut_time(kernels, 3, monkeypatch)
    documents = packed(20, STARTS[:1], DEVICE)
    inputs, cotangents = problem(Case(T=20, H=1, G=2, R=4, D=5), BF16)
    known = {x.data_ptr() for x in (*inputs.values(), documents)}
    both = []
    for recompute, shapes in ((True, []), (False, [(1, 2, 20, 32)])):
        with saved_tensors() as saved:
            outputs = run_scan(
                **inputs, recompute=recompute, backend="chunkwise", documents=documents
            )
        extra = [x for x in saved if x.data_ptr() not in known]
        assert [tuple(x.shape) for x in extra] == shapes
        assert all(x.dtype == BF16 for x in extra)
        both.append(results(outputs, cotangents, inputs))
    assert_equal(*both)


def test_w_in_a_pass_of_its_own_rounds_the_same_numbers(kernels, monkeypatch):
    inputs, cotangents = problem(Case(T=70, H=1, G=2, R=16, D=40), BF16)
    replace_plan(kernels, monkeypatch, fused=(4096, 4, 2))
    got = run_kernels(inputs, cotangents)
    replace_plan(kernels, monkeypatch, fused=None)
    assert_equal(got, run_kernels(inputs, cotangents))


@pytest.mark.parametrize(
    ("op", "linear", "options"),
    [(ops.scan, False, ["chunkwise", True]), (ops.linear_scan, True, ["chunkwise"])],
    ids=["query", "linear"],
)
def test_opcheck(op, linear, options):
    """Shapes and dtypes are those that the fake implementations say; `a` is kept."""
    inputs, _ = problem(Case(T=5, H=1, G=2, R=4, D=3), BF16, linear)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, (*inputs.values(), *options), test_utils=tests)
