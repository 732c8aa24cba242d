"""The Triton kernels of `chunkwise`, `parallel` and `sequential` against the fp64 loop: values, final state, every gradient.

On a machine with a GPU these tests run there. Elsewhere test_interpreter.py runs this file in a process of its own.
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
    gradients,
    op_inputs,
    paper_linear,
    paper_query,
    run_linear,
    run_op,
    run_query,
)
from .devices import DEVICE, on_kernels, use_kernels
from .test_documents import one_by_one, packed

pytest.importorskip("triton")
pytestmark = on_kernels
linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
FP32, BF16 = torch.float32, torch.bfloat16
BOUNDS = {FP32: "float32", BF16: "bfloat16", torch.float16: "bfloat16"}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)
    from interdomain.scan import triton_chunkwise

    return triton_chunkwise


@functools.cache
def problem(case, dtype, linear=False):
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    return inputs, cotangents, exact(inputs, cotangents, linear)


def on_device(inputs, cotangents=()):
    inputs = {n: x.detach().to(DEVICE).requires_grad_() for n, x in inputs.items()}
    return inputs, tuple(x.to(DEVICE) for x in cotangents)


def run(inputs, cotangents, linear=False, **options):
    """On DEVICE: outputs and gradients, brought back."""
    return {n: x.cpu() for n, x in run_op(*on_device(inputs, cotangents), linear, **options).items()}


def check(backend, case, dtype, linear=False, expected=None, bound=None, **options):
    """Against the loop, or against `expected`. `sequential` computes in fp32: what is no tensor of tokens is as exact."""
    inputs, cotangents, found = problem(case, dtype, linear)
    got = run(inputs, cotangents, linear, backend=backend, **options)
    expected = found if expected is None else expected
    tokens = {"out", "dq", "dk", "dv", "dz"}
    assert all(x.dtype == (dtype if n in tokens else torch.float32) for n, x in got.items())
    rest = "float32" if backend == "sequential" else bound or BOUNDS[dtype]
    assert_agree(
        {n: got[n] for n in got if n in tokens}, {n: expected[n] for n in got if n in tokens}, bound or BOUNDS[dtype]
    )
    assert_agree({n: got[n] for n in got if n not in tokens}, {n: expected[n] for n in got if n not in tokens}, rest)


CHUNKWISE = [
    (Case(T=1, B=2, H=1, R=16, D=16), BF16, False),  # one token: nearly all of every tile is masked
    (
        Case(T=63, H=1, R=16, D=17, readout="hermitian", state=False),
        FP32,
        False,
    ),  # no pointer to a state; W's lower half
    (
        Case(T=65, B=2, H=1, G=2, R=16, D=17, readout="real"),
        FP32,
        False,
    ),  # a chunk of one token; heads that share a state
    (Case(T=65, B=2, H=1, G=2, R=16, D=17, readout="real"), BF16, False),
    (Case(T=128, H=1, G=2, R=16, D=16), BF16, False),  # whole chunks and full tiles: compiled without masks
    (Case(T=130, H=2, R=16, D=16, decay="weak"), BF16, False),  # sums over all of time: bf16 sums would show
    (Case(T=20, H=1, R=96, D=96), FP32, False),  # widths that are no powers of two
    (Case(T=70, H=1, R=40, D=70, M=64, decay="s4d"), BF16, False),  # 128 radians per token; R is not D
    (Case(T=20, H=1, R=32, D=24, M=128, decay="s4d"), FP32, False),  # the largest M has plans of its own
    (Case(T=63, H=2, R=16, D=17, state=False), FP32, True),
    (Case(T=130, H=1, R=16, D=16, M=32), BF16, True),
    (Case(T=20, H=1, R=96, D=96, decay="s4d", M=64), FP32, True),
]
SEQUENTIAL = [
    (Case(T=17, H=2, G=2, R=6, D=7, readout="hermitian", state=False), FP32, False),  # one past a segment of 16
    (Case(T=37, H=1, G=2, R=8, D=9, readout="real"), FP32, False),
    (Case(T=18, H=1, R=20, D=24, M=128, decay="s4d"), FP32, False),
    (Case(T=36, H=1, R=7, D=5, decay="strong"), FP32, False),  # states of the past are recovered by division
    (Case(T=21, H=1, G=2, R=8, D=9, M=32, decay="s4d"), torch.float16, False),
    (Case(T=37, H=1, R=8, D=8, M=32), FP32, True),
    (Case(T=21, H=1, R=8, D=9, M=32, decay="s4d", state=False), BF16, True),
]
PARALLEL = [
    (Case(T=17, B=2, H=1, R=16, D=16), BF16, False),  # one chunk
    (Case(T=40, H=2, G=2, R=16, D=17), FP32, False),  # three, of 16
    (Case(T=40, H=2, R=16, D=17), FP32, True),
]
ALL = (
    [("chunkwise", *x) for x in CHUNKWISE]
    + [("sequential", *x) for x in SEQUENTIAL]
    + [("parallel", *x) for x in PARALLEL]
)


@pytest.mark.parametrize(("backend", "case", "dtype", "linear"), ALL, ids=str)
def test_values_and_gradients(backend, case, dtype, linear):
    check(backend, case, dtype, linear, chunk_size=16 if backend == "parallel" and case.T == 40 else None)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("chunkwise", FP32), ("chunkwise", BF16), ("sequential", FP32)], ids=str
)
@linear_or_query
def test_at_the_decay_bound(backend, dtype, linear):
    """Tables span |Lambda|^-32 to |Lambda|^32; what lies above the diagonal holds up to e^63 and must not be read."""
    T, M = (130, 16) if backend == "chunkwise" else (34, 16)
    case = Case(T=T, H=1, G=1 if linear else 2, R=16, D=16, M=M)
    inputs, cotangents = op_inputs(case, torch.float32, dtype, linear)
    with torch.no_grad():
        inputs["log_decay"][..., 0] = -scan.MAX_DECAY_PER_TOKEN
    got = run(inputs, cotangents, linear, backend=backend, chunk_size=64 if backend == "chunkwise" else None)
    assert_agree(got, exact(inputs, cotangents, linear), "float32" if dtype == FP32 else "bfloat16 at the decay bound")


@linear_or_query
@pytest.mark.parametrize(("segments", "T"), [(2, 64), (3, 70)])
def test_segments(segments, T, linear, kernels, monkeypatch):
    """Two of whole chunks, which take no masks along time; three, the last one shorter and ragged, in parts of dW, too."""
    for module in (kernels, kernels.launch):
        monkeypatch.setattr(module, "segment_count", lambda *args: segments)
    case = Case(T=T, B=2, H=1, G=1 if linear else 2, R=16, D=17, state=segments == 3)
    for dtype in (FP32, BF16) if segments == 3 else (FP32,):
        check("chunkwise", case, dtype, linear, chunk_size=16)


def test_a_state_is_summed_in_fp32():
    """What four chunks add to a state of a thousand times their size, which bf16 would round away."""
    inputs, _ = op_inputs(Case(T=64, H=1, R=16, D=16, decay="weak"), torch.float32, BF16)
    inputs = {n: x.detach() * (1000 if n == "initial_state" else 1) for n, x in inputs.items()}
    _, got = scan.interdomain_scan(**on_device(inputs)[0], backend="chunkwise", chunk_size=16)
    exact = {n: x.double() for n, x in inputs.items()}
    _, expected = scan.interdomain_scan(**exact, backend="reference")
    alone = exact | {n: torch.zeros_like(exact[n]) for n in "kv"}
    _, carried = scan.interdomain_scan(**alone, backend="reference")
    assert error(got.detach().cpu() - carried, expected - carried, "rms") < 6e-3


def test_states_between_segments(kernels):
    """The associative scan against the recurrence that it stands for: more than the 16 segments that it takes at once."""
    g = torch.Generator().manual_seed(0)
    span, chunk, H, M, P = kernels.Span(T=19 * 32 + 5, segments=20, chunks=2), 16, 2, 16, 7
    theta = torch.stack((-torch.rand(H, M, generator=g) * 0.05, 3 * torch.randn(H, M, generator=g)), dim=-1)
    local = torch.randn(2, H, 20, M, P, 2, generator=g)
    first = torch.randn(2, H, M, P, 2, generator=g)
    log_decay = torch.view_as_complex(theta.double())[..., None]
    plan = kernels.make_plan(torch.device(DEVICE), torch.float32, M, 16, chunk)
    tables = kernels.launch.Tables.build(theta.to(DEVICE), plan, span)
    for reverse in (False, True):
        states = [torch.view_as_complex(first.double())]
        for i in range(19):
            s = 19 - i if reverse else i
            step = (log_decay * (5 if s == 19 else 32)).exp()
            states.append(
                (step.conj() if reverse else step) * states[-1] + torch.view_as_complex(local[:, :, s].double())
            )
        expected = torch.view_as_real(torch.stack(states[::-1] if reverse else states, dim=2).resolve_conj())
        got = kernels.launch.chain(tables, local.to(DEVICE), first.to(DEVICE), span, chunk, reverse=reverse)
        assert error(got.cpu(), expected, "rms") < 1e-6


@pytest.mark.parametrize(
    ("backend", "segments", "dtype", "linear"),
    [
        ("chunkwise", 1, BF16, False),
        ("chunkwise", 1, FP32, True),
        ("chunkwise", 3, FP32, False),
        ("parallel", 1, FP32, False),
        ("sequential", 1, FP32, False),
        ("sequential", 1, FP32, True),
    ],
    ids=str,
)
def test_documents(backend, segments, dtype, linear, kernels, monkeypatch):
    """Documents that end within chunks, with them, and with segments (every 32 tokens of three)."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: segments)
    case = Case(T=70 if backend == "chunkwise" else 35, B=2, H=1, G=1 if linear else 2, R=16, D=17)
    documents = packed(case.T)
    expected = one_by_one(*problem(case, dtype, linear)[:2], documents, linear)
    check(backend, case, dtype, linear, expected, chunk_size=16, documents=documents.to(DEVICE))


@pytest.mark.parametrize("backend", ["chunkwise", "sequential"])
@linear_or_query
def test_what_is_not_asked_for(backend, linear):
    """No cotangent of the state, no gradient of the decay, no final state: nothing is read that is not there."""
    case = Case(T=40, H=1, R=16, D=16)
    inputs, cotangents, _ = problem(case, FP32, linear)
    expected = exact(inputs, (cotangents[0], torch.zeros_like(cotangents[1])), linear)
    inputs, cotangents = on_device(inputs, cotangents)
    inputs["log_decay"].requires_grad_(False)
    leaves = {n: x for n, x in inputs.items() if n != "log_decay"}
    fn = functools.partial(scan.linear_scan if linear else scan.interdomain_scan, backend=backend)
    outputs = fn(**inputs)[0], fn(**inputs, final_state=False)[0]
    assert torch.equal(*outputs)
    for out in outputs:
        got = gradients((out,), cotangents[:1], leaves)
        assert_agree({n: x.cpu() for n, x in got.items()}, {n: expected[n] for n in got}, "float32")


def test_mixed_dtypes():
    """One fp32 input makes it fp32; o follows v."""
    inputs, cotangents = op_inputs(Case(T=40, H=1, G=2, R=16, D=16), torch.float32)
    for name, dtype in zip("qkv", (torch.bfloat16, torch.float32, torch.float16), strict=True):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    cotangents = (cotangents[0].half(), cotangents[1])
    got = run(inputs, cotangents, backend="chunkwise")
    assert got["out"].dtype == torch.float16
    assert_agree(got, exact(inputs, cotangents), "bfloat16")


@pytest.mark.parametrize("backend", ["chunkwise", "sequential"])
def test_strided_inputs(backend):
    """q, k, v cut out of one projection and a cotangent that is one number; views one element in; transposed k and state."""
    inputs, cotangents, _ = problem(Case(T=20 if backend == "chunkwise" else 9, B=2, H=2, R=16, D=16), FP32)
    cotangents = (cotangents[0][:, :1, :1, :1].expand_as(cotangents[0]), cotangents[1])
    expected = exact(inputs, cotangents)
    inputs, cotangents = on_device(inputs, cotangents)
    inputs = {n: x.detach() for n, x in inputs.items()}
    packed = torch.stack([inputs[n] for n in "qkv"], dim=3).flatten(2)
    q, k, v = packed.unflatten(2, (2, 3, 16)).unbind(3)
    one_in = {n: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for n, x in inputs.items()}
    state = inputs["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    transposed = {"k": inputs["k"].mT.contiguous().mT, "initial_state": state}
    assert k.stride(1) == 96
    assert all(x.data_ptr() % 16 for x in one_in.values())
    for given in ({"q": q, "k": k, "v": v}, one_in, transposed):
        got = run_op({n: x.requires_grad_() for n, x in (inputs | given).items()}, cotangents, backend=backend)
        assert_agree({n: x.cpu() for n, x in got.items()}, expected, "float32")


@pytest.mark.parametrize("backend", ["chunkwise", "sequential"])
def test_offsets_beyond_32_bits(backend):
    """Tokens 2^25 numbers apart: the last ones lie beyond 2^31."""
    T, stride = 70, 1 << 25
    inputs, _, expected = problem(Case(T=T, H=1, R=16, D=16), BF16)
    memory = torch.empty_strided((1, T, 1, 16), (T * stride, stride, 16, 1), dtype=BF16, device=DEVICE)
    inputs, _ = on_device(inputs)
    with torch.no_grad():
        o, state = scan.interdomain_scan(**{**inputs, "k": memory.copy_(inputs["k"])}, backend=backend)
    assert_agree({"out": o.cpu(), "state": state.cpu()}, {n: expected[n] for n in ("out", "state")}, "bfloat16")


def test_recompute_is_a_matter_of_memory_only(kernels, monkeypatch):
    """The same bits with packed documents in segments; `a` is all that is kept beside the inputs."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 3)
    documents = packed(40)[:1].to(DEVICE)
    inputs, cotangents = on_device(*problem(Case(T=40, H=1, G=2, R=16, D=16), BF16)[:2])
    settings = dict(backend="chunkwise", chunk_size=16, documents=documents)
    results = []
    for recompute in (True, False):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            outputs = scan.interdomain_scan(**inputs, recompute=recompute, **settings)
        results.append((*outputs, *gradients(outputs, cotangents, inputs).values()))
        given = {x.data_ptr() for x in (*inputs.values(), documents)}
        extra = [(x.dtype, tuple(x.shape)) for x in saved if x.data_ptr() not in given]
        assert extra == ([] if recompute else [(torch.bfloat16, (1, 2, 40, 32))])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_other_plans_round_the_same_numbers(kernels, monkeypatch):
    """W in a pass of its own, where `expand` has no room for it; the decay in a launch of its own."""
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 2)
    inputs, cotangents = on_device(*problem(Case(T=70, H=1, G=2, R=16, D=40, M=32), BF16)[:2])
    results, make_plan = [], kernels.make_plan
    for plan in (dict(fused=(4096, 4, 2), decay=(512, 4, 2)), dict(fused=None, decay=(512, 4, 3))):
        monkeypatch.setattr(kernels, "make_plan", lambda *args, plan=plan: make_plan(*args)._replace(**plan))
        results.append(run_op(inputs, cotangents, backend="chunkwise"))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.parametrize("backend", ["chunkwise", "sequential"])
@linear_or_query
def test_opcheck_and_compile(backend, linear):
    """One node for torch.compile, forward and backward; shapes and dtypes as the fake implementations say."""
    inputs, cotangents = on_device(
        *op_inputs(Case(T=5, H=1, G=1 if linear else 2, R=4, D=3), torch.float32, BF16, linear)
    )
    fn = functools.partial(scan.linear_scan if linear else scan.interdomain_scan, backend=backend)
    op = ops.linear_scan if linear else ops.scan
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, (*inputs.values(), 0, backend), test_utils=tests)
    results = []
    for call in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
        outputs = call(**inputs)
        results.append((*outputs, *gradients(outputs, cotangents, inputs).values()))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_sequential_in_float64_is_the_paper_s():
    """The same kernels in fp64, down to the gradients of dt, A and C: nothing left to hide behind rounding."""

    def there(fn):
        def call(*args):
            *args, state = (None if x is None else x.to(DEVICE) for x in args)
            return tuple(x.cpu() for x in fn(*args, initial_state=state, backend="sequential"))

        return call

    case = Case(T=17, H=2, G=2, R=6, D=7, readout="hermitian")
    assert_agree(run_query(case, there(scan.interdomain_scan)), paper_query(case), "float64")
    assert_agree(run_linear(case, there(scan.linear_scan)), paper_linear(case), "float64")
