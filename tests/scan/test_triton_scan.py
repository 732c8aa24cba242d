"""The Triton kernels of `chunkwise` against the fp64 loop: values, final state, every gradient.

On a machine with a GPU these tests run there. Elsewhere test_triton_gpu.py runs this file in a process of its own.
Chunks are of 64 tokens in bf16 and of 16 in fp32, unless `small_chunks` makes them 16.
"""

import functools

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops

from .common import (
    Case,
    assert_agree,
    error,
    exact,
    function,
    gradients,
    linear_or_query,
    op_inputs,
    run_op,
)
from .devices import DEVICE, on_kernels, use_kernels
from .test_documents import STARTS, one_by_one, packed

pytest.importorskip("triton")
pytestmark = on_kernels
FP32, BF16 = torch.float32, torch.bfloat16
BOUNDS = {FP32: "float32", BF16: "bfloat16"}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)
    from interdomain.scan import triton_chunkwise

    return triton_chunkwise


def replace_plan(kernels, monkeypatch, **changes):
    make_plan = kernels.make_plan
    monkeypatch.setattr(kernels, "make_plan", lambda *args: make_plan(*args)._replace(**changes))


@pytest.fixture
def small_chunks(kernels, monkeypatch):
    replace_plan(kernels, monkeypatch, chunk=16)


@functools.cache
def problem(case, dtype, linear=False):
    return op_inputs(case, FP32, dtype, linear)


def on_device(inputs, cotangents=()):
    inputs = {n: x.detach().to(DEVICE).requires_grad_() for n, x in inputs.items()}
    return inputs, tuple(x.to(DEVICE) for x in cotangents)


def run(inputs, cotangents, linear=False, **options):
    """On DEVICE: outputs and gradients, brought back."""
    return {
        n: x.cpu() for n, x in run_op(*on_device(inputs, cotangents), linear, **options).items()
    }


def check(case, dtype, linear=False, expected=None, **options):
    """Against the loop, or against `expected`."""
    inputs, cotangents = problem(case, dtype, linear)
    got = run(inputs, cotangents, linear, backend="chunkwise", **options)
    tokens = {"out", "dq", "dk", "dv", "dz"}
    assert all(x.dtype == (dtype if n in tokens else FP32) for n, x in got.items())
    assert_agree(got, expected or exact(inputs, cotangents, linear), BOUNDS[dtype])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(T=1, B=2, H=1, R=16, D=16), BF16),  # one token: nearly all of every tile is masked
        (
            Case(T=33, H=2, R=4, D=5, readout="hermitian", state=False),
            FP32,
        ),  # no pointer to a state; W's lower half
        (
            Case(T=65, B=2, H=1, G=2, R=16, D=17, readout="real"),
            BF16,
        ),  # a chunk of one token; heads that share a state
        # Whole chunks and full tiles: compiled without masks. Sums over all of time: bf16 sums would show.
        (Case(T=128, H=1, G=2, R=16, D=16, decay="weak"), BF16),
        (Case(T=20, H=1, R=96, D=96), FP32),  # widths that are no powers of two
        (Case(T=70, H=1, R=40, D=70, M=64, decay="s4d"), BF16),  # 128 radians per token; R is not D
        (
            Case(T=20, H=1, R=32, D=24, M=128, decay="s4d"),
            FP32,
        ),  # the largest M has plans of its own
    ],
    ids=str,
)
def test_query_readout(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    # 73 channels: two blocks of them in the readout's gradient.
    [(Case(T=33, H=2, R=40, D=33, state=False), FP32), (Case(T=130, H=1, R=16, D=16, M=32), BF16)],
    ids=str,
)
def test_linear_readout(case, dtype):
    check(case, dtype, linear=True)


def test_tables_hold_phases_of_thousands_of_radians():
    """In fp32 a phase would be off by 1e-4."""
    from interdomain.scan.triton_launch import Launches
    from interdomain.scan.triton_plan import make_plan

    inputs, _ = op_inputs(Case(T=1, H=1, M=64, decay="s4d"), FP32)
    theta, w = (
        inputs["log_decay"].detach().to(DEVICE),
        1 / torch.arange(1, 129, device=DEVICE)[None],
    )
    tables = Launches.build(
        make_plan(theta.device, FP32, 64, 0), theta, T=90, chunks=2, readout=w
    )  # chunks of 16
    z = (
        torch.view_as_complex(theta.double())[:, None]
        * torch.arange(-16, 65, device=DEVICE)[:, None]
    )
    power, w = torch.exp(z)[0], torch.complex(*w.double()[0].chunk(2))
    E, T, i = power[8:24], power[range(24, 8, -1)], torch.arange(16, device=DEVICE)
    D = (w * power[16 + (i[:, None] - i).clamp_min(0)]).sum(-1).real.tril()
    step, segments = power[[16 + 9, 16 + 16]], power[[16 + 32, 16 + 26]]
    complex_tables = (
        *(
            (tables.E[0], E),
            (tables.t[0], T),
            (tables.t_conj[0], T.conj()),
            (tables.t_conj_T[0].mT, T.conj()),
        ),
        *(
            (tables.rows[0], E * w),
            (tables.step[0], step),
            (tables.power[:, 0].mT.flatten(1), segments),
        ),
    )
    for got, expected in complex_tables:
        assert error(got, torch.cat((expected.real, expected.imag), dim=-1), "max") < 1e-6
    assert error(tables.scores[0], D, "max") < 1e-6


@linear_or_query
def test_at_the_decay_bound(linear):
    """Tables span |Lambda|^-32 to |Lambda|^32; what lies above the diagonal holds up to e^63 and must not be read."""
    inputs, cotangents = op_inputs(
        Case(T=70, H=1, G=1 if linear else 2, R=16, D=16), FP32, BF16, linear
    )
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -scan.MAX_DECAY_PER_TOKEN
    got = run(inputs, cotangents, linear, backend="chunkwise")
    assert_agree(got, exact(inputs, cotangents, linear), "bfloat16 at the decay bound")


@pytest.mark.parametrize(
    ("segments", "T", "dtype", "linear"),
    [(2, 64, FP32, False), (3, 70, BF16, False), (20, 20 * 16, FP32, True)],
    ids=str,
)
def test_segments(segments, T, dtype, linear, kernels, small_chunks, monkeypatch):
    """Two of whole chunks, which take no masks along time; three, the last one shorter and ragged, in parts of dW, too; more
    than the 16 that the scan over segments takes at once."""
    from interdomain.scan import triton_launch

    for module in (kernels, triton_launch):
        monkeypatch.setattr(module, "segment_count", lambda *args: segments)
    check(Case(T=T, H=1, G=2 if segments == 3 else 1, R=4, D=5, state=segments == 3), dtype, linear)


@pytest.mark.parametrize(("name", "scale"), [("state", 1000), ("dinitial_state", 0.1)])
def test_states_and_their_gradients_are_summed_in_fp32(name, scale, small_chunks):
    """Four chunks add to one of hundreds of times their size; bf16 would round their sum away."""
    inputs, cotangents = op_inputs(Case(T=64, H=1, R=16, D=16, decay="weak"), FP32, BF16)
    start = inputs["initial_state"] if name == "state" else cotangents[1]
    start.data *= scale
    got, expected = (
        run(inputs, cotangents, backend="chunkwise")[name],
        exact(inputs, cotangents)[name],
    )
    alone = inputs | {n: torch.zeros_like(inputs[n]) for n in "qkv"}
    carried = exact(alone, cotangents)[name]
    assert error(got - carried, expected - carried, "rms") < 6e-3


@pytest.mark.parametrize(
    ("name", "linear", "decay", "unread"),
    [
        ("dmixing", False, None, slice(0)),
        ("dreadout", True, None, slice(0)),
        (
            "dlog_decay",
            False,
            -1.0,
            slice(16, 32),
        ),  # within chunks: over one that nobody reads, all is forgotten
        (
            "dlog_decay",
            False,
            -1e-6,
            slice(48),
        ),  # of the initial state alone: the costate and its derivative
    ],
    ids=str,
)
def test_gradients_are_summed_in_fp32(name, linear, decay, unread, small_chunks):
    """The last of three chunks has a cotangent a thousand times as large. Without its part that of the others is left."""
    inputs, (d_out, d_state) = op_inputs(Case(T=48, H=1, R=16, D=16), FP32, BF16, linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = decay or inputs["log_decay"][..., 0]
        for n in ("k", "v") if unread.stop else ():
            inputs[n][:, unread] = 0
    small, large = d_out.clone(), 1000 * d_out
    small[:, 32:], large[:, :32] = 0, 0
    both, alone = (
        run(inputs, (d, 0 * d_state), linear, backend="chunkwise")[name]
        for d in (small + large, large)
    )
    expected = exact(inputs, (small, 0 * d_state), linear)[name]
    assert error(both.double() - alone, expected, "rms") < 6e-3


def test_held_operands_give_the_same_gradients(kernels, monkeypatch):
    """Slow modes and tokens of one sign: lags add up in dlog_decay, and roundings do not."""
    inputs, (d_out, d_state) = op_inputs(
        Case(T=128, H=1, R=16, D=16, M=32, decay="weak", state=False), FP32, BF16
    )
    inputs = {n: x.detach().abs() if n in "qkv" else x.detach() for n, x in inputs.items()}
    inputs["log_decay"][..., 1] /= 100
    results = []
    for held in (True, False):
        replace_plan(kernels, monkeypatch, operands_in_registers=held)
        results.append(run(inputs, (d_out.abs(), 0 * d_state), backend="chunkwise"))
    assert error(*(one.pop("dlog_decay") for one in results), "rms") < 1e-3
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.parametrize(
    ("segments", "dtype", "linear"), [(1, BF16, False), (1, FP32, True), (3, FP32, False)], ids=str
)
def test_documents(segments, dtype, linear, kernels, small_chunks, monkeypatch):
    """Documents that end within chunks, with them, and with segments of one chunk."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: segments)
    case = Case(T=70 if segments == 1 else 40, B=2, H=1, G=1 if linear else 2, R=4, D=5)
    documents = packed(case.T, STARTS[:2])
    expected = one_by_one(*problem(case, dtype, linear), documents, linear)
    check(case, dtype, linear, expected, documents=documents.to(DEVICE))


@pytest.mark.parametrize(
    ("segments", "dtype", "linear", "documents"),
    [
        (1, BF16, False, None),
        (3, FP32, False, True),
        (3, FP32, True, True),
    ],
    ids=str,
)
def test_shards(segments, dtype, linear, documents, kernels, small_chunks, monkeypatch):
    """Two shards one after the other: the state that the first leaves enters the second, whose gradient of it goes back."""
    handed = {}

    def send(local, *_, reverse=False, **others):
        before = handed.get(reverse, torch.zeros_like(local))
        handed[reverse] = local
        return before

    monkeypatch.setattr(ops.context_parallel, "send", send)
    monkeypatch.setattr(ops.context_parallel, "receive", lambda sent, shape: sent.clone())
    monkeypatch.setattr(kernels, "segment_count", lambda *args: segments)
    case = Case(T=80, B=2 if documents else 1, H=1, G=1 if linear else 2, R=4, D=5, state=False)
    inputs, (d_out, d_state) = problem(case, dtype, linear)
    cotangents = d_out, torch.zeros_like(d_state)
    numbers = packed(80, ((0, 20, 45), (0, 33, 64))) if documents else None
    expected = (
        one_by_one(inputs, cotangents, numbers, linear)
        if documents
        else exact(inputs, cotangents, linear)
    )
    shards = []
    for t in (slice(40), slice(40, 80)):
        mine = {n: (x[:, t] if n in "qkvz" else x) for n, x in inputs.items()}
        mine, (d_shard,) = on_device(mine, (d_out[:, t],))
        local = (
            None
            if numbers is None
            else (numbers[:, t] - numbers[:, max(t.start or 0, 1) - 1, None]).to(DEVICE)
        )
        out, state = function(linear)(**mine, documents=local, group="shards", backend="chunkwise")
        shards.append((mine, d_shard, out, state))
    grads = [gradients((out,), (d_shard,), mine) for mine, d_shard, out, _ in reversed(shards)]
    got = {"out": torch.cat([x[2] for x in shards], dim=1), "state": shards[1][3]}
    for n in grads[0]:
        of_shards = grads[1][n], grads[0][n]
        got[n] = torch.cat(of_shards, dim=1) if n[1:] in "qkvz" else sum(of_shards)
    assert_agree({n: x.cpu() for n, x in got.items()}, expected, BOUNDS[dtype])


def test_segments_of_a_shard_whose_queries_are_of_another_dtype(kernels, monkeypatch):
    """Chunks are of 64 tokens where keys and values are sent, and of 16 in the scan, which float32 queries make float32."""
    monkeypatch.setattr(
        ops.context_parallel, "send", lambda local, *_, **others: torch.zeros_like(local)
    )
    monkeypatch.setattr(ops.context_parallel, "receive", lambda sent, shape: sent.clone())
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 2)
    inputs, _ = problem(Case(T=200, H=1, R=4, D=5, state=False), BF16)
    inputs, _ = on_device(inputs)
    inputs["q"] = inputs["q"].float()
    with torch.no_grad():
        out, state = scan.interdomain_scan(**inputs, group="shards", backend="chunkwise")
        expected, final = scan.interdomain_scan(**inputs, backend="chunkwise")
    assert torch.equal(out, expected)
    assert torch.equal(state, final)


@linear_or_query
def test_outputs_that_are_not_asked_for(linear):
    """No cotangent of the state, no final state: nothing is read that is not there."""
    inputs, cotangents = problem(Case(T=20, H=1, R=4, D=5), FP32, linear)
    expected = exact(inputs, (cotangents[0], torch.zeros_like(cotangents[1])), linear)
    inputs, cotangents = on_device(inputs, cotangents)
    fn = functools.partial(function(linear), **inputs, backend="chunkwise")
    outputs = fn()[0], fn(final_state=False)[0]
    assert torch.equal(*outputs)
    for out in outputs:
        got = gradients((out,), cotangents[:1], inputs)
        assert_agree({n: x.cpu() for n, x in got.items()}, {n: expected[n] for n in got}, "float32")


def test_mixed_dtypes():
    """One fp32 input makes it fp32; o follows v."""
    inputs, cotangents = op_inputs(Case(T=20, H=1, G=2, R=4, D=5), FP32)
    for name, dtype in zip("qkv", (BF16, FP32, torch.float16), strict=True):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    cotangents = (cotangents[0].half(), cotangents[1])
    got = run(inputs, cotangents, backend="chunkwise")
    assert got["out"].dtype == torch.float16
    assert_agree(got, exact(inputs, cotangents), "bfloat16")


def test_strided_inputs():
    """q, k, v cut out of one projection and a cotangent that is one number; views one element in; transposed k and state."""
    inputs, cotangents = problem(Case(T=10, B=2, H=2, R=16, D=16), FP32)
    cotangents = (cotangents[0][:, :1, :1, :1].expand_as(cotangents[0]), cotangents[1])
    expected = exact(inputs, cotangents)
    inputs, cotangents = on_device(inputs, cotangents)
    inputs = {n: x.detach() for n, x in inputs.items()}
    projection = torch.stack([inputs[n] for n in "qkv"], dim=3)  # with strides of three
    one_in = {
        n: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for n, x in inputs.items()
    }
    transposed = {"k": inputs["k"].mT.contiguous().mT}
    for other in (dict(zip("qkv", projection.unbind(3), strict=True)), one_in, transposed):
        got = run_op(
            {n: x.requires_grad_() for n, x in (inputs | other).items()},
            cotangents,
            backend="chunkwise",
        )
        assert_agree({n: x.cpu() for n, x in got.items()}, expected, "float32")


def test_offsets_beyond_32_bits():
    """Tokens 2^25 numbers apart: the last ones lie beyond 2^31."""
    T, stride = 70, 1 << 25
    inputs, (d_out, d_state) = problem(Case(T=T, H=1, R=16, D=16), BF16)
    expected = exact(inputs, (d_out, d_state))
    memory = torch.empty_strided(
        (4, 1, T, 1, 16), (16, T * stride, stride, 16, 1), dtype=BF16, device=DEVICE
    )
    memory.copy_(torch.stack([inputs["q"], inputs["k"], inputs["v"], d_out]))
    q, k, v, d_out = memory
    inputs, (d_state,) = on_device(inputs | {"q": q, "k": k, "v": v}, (d_state,))
    got = run_op(inputs, (d_out, d_state), backend="chunkwise")
    assert_agree({n: x.cpu() for n, x in got.items()}, expected, "bfloat16")


def test_recompute_is_a_matter_of_memory_only(kernels, small_chunks, monkeypatch):
    """The same bits with packed documents in segments; `a` is all that is kept beside the inputs."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 3)
    documents = packed(20)[:1].to(DEVICE)
    inputs, cotangents = on_device(*problem(Case(T=20, H=1, G=2, R=4, D=5), BF16))
    results = []
    for recompute in (True, False):
        saved, options = [], dict(recompute=recompute, backend="chunkwise", documents=documents)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x) or x, lambda x: x
        ):
            outputs = scan.interdomain_scan(**inputs, **options)
        results.append((*outputs, *gradients(outputs, cotangents, inputs).values()))
        known = {x.data_ptr() for x in (*inputs.values(), documents)}
        extra = [(x.dtype, tuple(x.shape)) for x in saved if x.data_ptr() not in known]
        assert extra == ([] if recompute else [(BF16, (1, 2, 20, 32))])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_w_in_a_pass_of_its_own_rounds_the_same_numbers(kernels, monkeypatch):
    inputs, cotangents = on_device(*problem(Case(T=70, H=1, G=2, R=16, D=40), BF16))
    results = []
    for fused in ((4096, 4, 2), None):
        replace_plan(kernels, monkeypatch, fused=fused)
        results.append(run_op(inputs, cotangents, backend="chunkwise"))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@linear_or_query
def test_opcheck(linear):
    """Shapes and dtypes are those that the fake implementations say."""
    inputs, _ = on_device(
        *op_inputs(Case(T=5, H=1, G=1 if linear else 2, R=4, D=3), FP32, BF16, linear)
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    op, args = (
        (ops.linear_scan, ("chunkwise",)) if linear else (ops.scan, ("chunkwise", True))
    )  # `a` is kept
    torch.library.opcheck(op, (*inputs.values(), *args), test_utils=tests)
