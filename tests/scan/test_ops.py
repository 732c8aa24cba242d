"""The ops as PyTorch sees them: opcheck, torch.compile, selective activation checkpointing, autocast, absent gradients."""

import functools
import importlib
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from interdomain import scan
from interdomain.scan import ops
from interdomain.scan.library import tag_caches

from .common import ON_CPU, RUNNABLE, WRITTEN_OUT, Case, assert_agree, gradients, op_inputs, run_op
from .test_documents import packed

CASE = Case(T=20, G=3, R=4, D=3, M=4)


linear_or_query = pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])


@pytest.mark.parametrize("state", [False, True])
@linear_or_query
@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_opcheck(backend, linear, state):
    """With a state, documents and a final state in fp32, or none of them in bf16."""
    case = Case(T=20, G=1 if linear else 3, R=4, D=3, M=4, state=state)
    inputs, (d_out, d_state) = op_inputs(case, torch.float32, torch.float32 if state else torch.bfloat16, linear)
    args = (*inputs.values(), *(() if state else (None,)), 8, backend)
    documents = packed(case.T)[:1] if state else None
    op, backward = (ops.linear_scan, ops.linear_scan_backward) if linear else (ops.scan, ops.scan_backward)
    torch.library.opcheck(op, (*args, *(() if linear else (False,)), documents, state))
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    for d_final, need_decay in ((d_state, True), (None, False)):
        torch.library.opcheck(
            backward, (d_out, d_final, *args, need_decay), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("backend", "compiler", "linear"),
    [("chunkwise", "inductor", False), ("chunkwise", "aot_eager", True), ("fft", "aot_eager", False)],
)
def test_compiles_without_a_graph_break(backend, compiler, linear):
    """From dt, A and C to the gradients, tables and validation included; one graph for every length."""
    block = functools.partial(scan.linear_scan if linear else scan.interdomain_scan, backend=backend)

    def tables_and_scan(log_decay, **inputs):
        theta = scan.decay_exponent(torch.ones_like(log_decay[:, 0, 0]), (-log_decay[..., 0]).log(), log_decay[..., 1])
        return block(log_decay=theta, **inputs)

    compiled = torch.compile(tables_and_scan, fullgraph=True, backend=compiler, dynamic=compiler == "aot_eager")
    for T in (20,) if compiler == "inductor" else (20, 70):
        inputs, cotangents = op_inputs(Case(T=T, G=1 if linear else 3, R=4, D=3, M=4), torch.float32, linear=linear)
        documents = packed(T)[:1] if T == 20 else None
        results = []
        for fn in (compiled, tables_and_scan):
            outputs = fn(**inputs, documents=documents)
            results.append(dict(enumerate(outputs)) | gradients(outputs, cotangents, inputs))
        assert_agree(*results, "float32")


def test_caches_of_torch_compile_know_the_version_of_the_ops(tmp_path, monkeypatch):
    """By name alone an op that has changed would be called by code that was compiled for the old one."""
    ours = torch.compiler.config.cache_key_tag
    tag_caches("interdomain.scan.ops")
    assert torch.compiler.config.cache_key_tag == ours != ""
    monkeypatch.syspath_prepend(tmp_path)
    tags = []
    for version in ("one", "two", "one"):
        (tmp_path / f"ops_{version}.py").write_text(f"# {version}\n")
        importlib.import_module(f"ops_{version}")
        with torch.compiler.config.patch(cache_key_tag=""):
            tag_caches(f"ops_{version}")
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]
    for version in ("one", "two"):
        del sys.modules[f"ops_{version}"]


class Outputs(TorchDispatchMode):
    """Numbers in each output of the scan's ops."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "interdomain":
            self.sizes.append((func.name(), [x.numel() for x in out]))
        return out


def test_derivatives_that_are_refused():
    """Forward mode, torch.func.grad, a second derivative: an error, and `reference` has them. vmap works."""
    inputs, _ = op_inputs(CASE, torch.float32)
    q = inputs["q"].detach()

    def run(q, backend="chunkwise"):
        return scan.interdomain_scan(**{**inputs, "q": q}, backend=backend)[0]

    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="backend='reference' of the scan"):
            torch.func.jvp(run, (q,), (q,))
        torch.testing.assert_close(torch.vmap(run)(torch.stack([q, 2 * q])), torch.stack([run(q), 2 * run(q)]))
        value, tangent = torch.func.jvp(functools.partial(run, backend="reference"), (q,), (q,))
    torch.testing.assert_close(tangent, value)  # o is linear in q
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda q: run(q).square().sum())(q)
    for fn, leaf in ((run, q.requires_grad_()), (lambda z: linear(z), torch.randn(1, 5, 1, 3, requires_grad=True))):
        (first,) = torch.autograd.grad(fn(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="no derivative of its own"):
            first.sum().backward()


def linear(z):
    return scan.linear_scan(z, torch.tensor([[[-0.1, 1.0]]]), torch.ones(1, 2))[0]


def test_nothing_is_made_on_the_default_device():
    inputs, cotangents = op_inputs(CASE, torch.float32)
    documents = (torch.arange(CASE.T) // 7).expand(CASE.B, -1)
    with torch.device("meta"):
        results = {b: run_op(inputs, cotangents, backend=b, documents=documents) for b in RUNNABLE}
    for found in results.values():
        assert_agree(found, results["reference"], "float32")


@pytest.fixture
def calls(monkeypatch):
    """How often the forward implementations ran."""
    count = {"scan": 0, "linear": 0}
    real = ops.IMPLEMENTATIONS["chunkwise"]

    def counting(name, fn):
        def run(*args, **kw):
            count[name] += 1
            return fn(*args, **kw)

        return run

    wrapped = real._replace(
        scan_forward=counting("scan", real.scan_forward), linear_forward=counting("linear", real.linear_forward)
    )
    monkeypatch.setitem(ops.IMPLEMENTATIONS, "chunkwise", wrapped)
    return count


@pytest.mark.parametrize(("listed", "runs"), [(True, 1), (False, 2)])
@linear_or_query
def test_selective_activation_checkpointing(linear, listed, runs, calls):
    inputs, cotangents = op_inputs(CASE, torch.float32, linear=linear)
    op = torch.ops.interdomain.linear_scan.default if linear else torch.ops.interdomain.scan.default
    fn = scan.linear_scan if linear else scan.interdomain_scan

    def policy(ctx, func, *args, **kwargs):
        saved = listed and func == op
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(*tensors):
        out, state = fn(**dict(zip(inputs, tensors, strict=True)))
        return out * 2, state

    out, state = checkpoint(
        block,
        *inputs.values(),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    grads = torch.autograd.grad((out * cotangents[0]).sum() + (state * cotangents[1]).sum(), list(inputs.values()))
    assert calls["linear" if linear else "scan"] == runs
    plain = run_op(inputs, (2 * cotangents[0], cotangents[1]), linear)
    assert all(torch.equal(g, plain[f"d{n}"]) for n, g in zip(inputs, grads, strict=True))


@pytest.mark.parametrize("backend", ON_CPU)
@linear_or_query
def test_a_final_state_that_is_not_asked_for_is_not_made(linear, backend):
    inputs, cotangents = op_inputs(CASE, torch.float32, linear=linear)
    fn = functools.partial(scan.linear_scan if linear else scan.interdomain_scan, backend=backend)
    documents = (torch.arange(CASE.T) // 7).expand(CASE.B, -1)
    for numbers in (None, documents):
        expected = fn(**inputs, documents=numbers)[0]
        with Outputs() as made:
            out, state = fn(**inputs, documents=numbers, final_state=False)
        assert state is None
        assert torch.equal(out, expected)
        if backend in ("auto", *WRITTEN_OUT):  # what a checkpointing policy that lists the op keeps
            ((name, sizes),) = made.sizes
            assert (name.partition("::")[0], sizes[0], sum(sizes)) == ("interdomain", out.numel(), out.numel())

    def gradients(fn):
        return torch.autograd.grad((fn(**inputs)[0] * cotangents[0]).sum(), list(inputs.values()))

    without = functools.partial(fn, final_state=False)
    expected = gradients(fn)
    assert all(torch.equal(got, wanted) for got, wanted in zip(gradients(without), expected, strict=True))
    if backend == "auto":
        compiled = torch.compile(without, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(gradients(compiled), expected)


@pytest.mark.parametrize("backend", ON_CPU)
@linear_or_query
def test_autocast_changes_nothing(linear, backend):
    inputs, cotangents = op_inputs(CASE, torch.float32, linear=linear)
    expected = run_op(inputs, cotangents, linear, backend=backend)
    fn = scan.linear_scan if linear else scan.interdomain_scan
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = fn(**inputs, backend=backend)
    got = gradients(outputs, cotangents, inputs)  # outside, as PyTorch asks of a backward
    assert torch.equal(outputs[0], expected["out"])
    assert torch.equal(outputs[1], expected["state"])
    assert all(torch.equal(got[n], expected[n]) for n in got)
    if backend in ("auto", *WRITTEN_OUT):  # the op's own backward holds inside, too
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = run_op(inputs, cotangents, linear, backend=backend)
        assert all(torch.equal(got[n], expected[n]) for n in expected)


@linear_or_query
@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_unused_outputs_and_frozen_inputs(backend, linear):
    """None for the cotangent of an unused output is a zero; a frozen input gets no gradient and changes no other."""
    inputs, cotangents = op_inputs(CASE, torch.float64, linear=linear)
    fn = functools.partial(scan.linear_scan if linear else scan.interdomain_scan, backend=backend)
    zeros = tuple(torch.zeros_like(x) for x in cotangents)
    leaves = list(inputs.values())
    for used in (0, 1):
        cotangent = [zeros[0], zeros[1]]
        cotangent[used] = cotangents[used]
        expected = run_op(inputs, tuple(cotangent), linear, backend=backend)
        grads = torch.autograd.grad((fn(**inputs)[used] * cotangents[used]).sum(), leaves)
        assert_agree(
            {f"d{n}": g for n, g in zip(inputs, grads, strict=True)},
            {f"d{n}": expected[f"d{n}"] for n in inputs},
            "float64",
        )

    expected = run_op(inputs, cotangents, linear, backend=backend)
    inputs["log_decay"].requires_grad_(False)
    out, state = fn(**inputs)
    ((out * cotangents[0]).sum() + (state * cotangents[1]).sum()).backward()
    assert inputs["log_decay"].grad is None
    rest = [n for n in inputs if n != "log_decay"]
    assert_agree({n: inputs[n].grad for n in rest}, {n: expected[f"d{n}"] for n in rest}, "float64")


@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_saves_its_inputs_only(backend):
    """Nothing the size of the states survives the forward: the backward recomputes them."""
    inputs, _ = op_inputs(Case(T=130), torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        scan.interdomain_scan(**inputs, backend=backend)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in inputs.values()}
