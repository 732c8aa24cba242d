"""The ops as PyTorch sees them: opcheck, torch.compile, selective activation checkpointing, autocast, absent gradients."""

import functools
import inspect
import subprocess
import sys

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops
from interdomain.scan.library import tag_caches

from .common import (
    BACKENDS,
    Case,
    assert_agree,
    function,
    gradients,
    linear_or_query,
    op_inputs,
    run_op,
)
from .test_documents import packed

CASE = Case(T=20, G=3, R=4, D=3, M=4)


@pytest.mark.parametrize("state", [False, True])
@linear_or_query
def test_opcheck(linear, state):
    """With a state, documents and a final state in fp32, or none of them in bf16."""
    case = Case(T=20, G=1 if linear else 3, R=4, D=3, M=4, state=state)
    inputs, (d_out, d_state) = op_inputs(
        case, torch.float32, torch.float32 if state else torch.bfloat16, linear
    )
    args = (*inputs.values(), *(() if state else (None,)), "chunkwise")
    documents = packed(case.T)[:1] if state else None
    op, backward = (
        (ops.linear_scan, ops.linear_scan_backward) if linear else (ops.scan, ops.scan_backward)
    )
    args_and_flags = (*args, *(() if linear else (False,)), documents, state)
    torch.library.opcheck(op, args_and_flags)
    _, *others = op(*args_and_flags)  # what a checkpointing policy that lists the op keeps
    assert sum(x.numel() for x in others) == (d_state.numel() if state else 0)
    args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    for d_final in (d_state, None):
        torch.library.opcheck(
            backward, (d_out, d_final, *args), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(
    ("backend", "linear"),
    [("chunkwise", False), ("chunkwise", True), ("fft", False)],
)
def test_compiles_without_a_graph_break(backend, linear):
    """From dt, A and C to the gradients, tables and validation included; one graph for every length."""
    block = functools.partial(function(linear), backend=backend)

    def tables_and_scan(log_decay, **inputs):
        theta = scan.decay_exponent(
            torch.ones_like(log_decay[:, 0, 0]), (-log_decay[..., 0]).log(), log_decay[..., 1]
        )
        return block(log_decay=theta, **inputs)

    compiled = torch.compile(tables_and_scan, fullgraph=True, backend="aot_eager", dynamic=linear)
    for T in (20, 70) if linear else (20,):
        case = Case(T=T, H=1, G=1 if linear else 3, R=4, D=3, M=4)
        inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
        results = []
        for fn in (compiled, tables_and_scan):
            outputs = fn(**inputs, documents=packed(T)[:1] if backend == "chunkwise" else None)
            results.append(dict(enumerate(outputs)) | gradients(outputs, cotangents, inputs))
        assert_agree(*results, "float32")


@linear_or_query
def test_one_head_after_the_other(linear, monkeypatch):
    """One head after the other, as on a CPU, gives the results of all heads at once, states and documents included."""
    case = Case(T=130, H=3, G=1 if linear else 2, R=4, D=3, M=4)
    inputs, cotangents = op_inputs(case, torch.float64, linear=linear)
    for documents in (None, packed(case.T)[:1].expand(case.B, -1)):
        results = []
        for tokens in (1, 10**6):
            monkeypatch.setattr(ops, "BY_HEAD", tokens)
            results.append(
                run_op(inputs, cotangents, linear, backend="chunkwise", documents=documents)
            )
        assert_agree(*results, "float64")


def test_values_alone_need_no_compiler():
    """The first token of a process does not wait for the import of torch.compile's front end."""
    program = """
import sys, torch
from interdomain import scan
q, decay, W = torch.randn(1, 8, 2, 4), -torch.rand(2, 3, 2), torch.randn(2, 6, 6)
with torch.no_grad():
    _, state = scan.interdomain_scan(q, q, q, decay, W)
    scan.interdomain_step(q[:, 0], q[:, 0], q[:, 0], decay, W, state)
    scan.linear_scan(q, decay, W[:, 0])
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_caches_of_torch_compile_know_the_version_of_the_ops(monkeypatch):
    """By name alone an op that has changed would be called by code that was compiled for the old one."""
    tags = []
    for source in ("# one", "# two", "# one"):
        monkeypatch.setattr(inspect, "getsource", lambda module, source=source: source)
        with torch.compiler.config.patch(cache_key_tag=""):
            tag_caches("interdomain.scan.ops")
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]
    assert torch.compiler.config.cache_key_tag


def test_derivatives_that_are_refused():
    """Forward mode, torch.func.grad, a second derivative: an error, and `reference` has them. vmap works."""
    inputs, _ = op_inputs(CASE, torch.float32)
    q = inputs["q"].detach()

    def run(q, backend="chunkwise"):
        return scan.interdomain_scan(**{**inputs, "q": q}, backend=backend)[0]

    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="backend='reference' of the scan"):
            torch.func.jvp(run, (q,), (q,))
        torch.testing.assert_close(
            torch.vmap(run)(torch.stack([q, 2 * q])), torch.stack([run(q), 2 * run(q)])
        )
        value, tangent = torch.func.jvp(functools.partial(run, backend="reference"), (q,), (q,))
    torch.testing.assert_close(tangent, value)  # o is linear in q
    for transform in (torch.func.grad(lambda q: run(q).sum()), lambda q: torch.func.vjp(run, q)):
        with pytest.raises(NotImplementedError, match=r"no derivative by torch\.func"):
            transform(q)
    (first,) = torch.autograd.grad(run(q.requires_grad_()).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@linear_or_query
def test_a_final_state_that_is_not_asked_for_is_not_made(linear, backend):
    inputs, (d_out, _) = op_inputs(CASE, torch.float32, linear=linear)
    documents = (torch.arange(CASE.T) // 7).expand(CASE.B, -1)
    fn = functools.partial(function(linear), **inputs, backend=backend, documents=documents)
    out, state = fn(final_state=False)
    expected, _ = fn()
    assert state is None
    assert torch.equal(out, expected)
    got, expected = gradients((out,), (d_out,), inputs), gradients((expected,), (d_out,), inputs)
    assert all(torch.equal(got[n], expected[n]) for n in expected)


@pytest.mark.parametrize("backend", BACKENDS)
@linear_or_query
def test_autocast_and_a_default_device_change_nothing(linear, backend):
    inputs, cotangents = op_inputs(CASE, torch.float32, linear=linear)
    expected = run_op(inputs, cotangents, linear, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        outputs = function(linear)(**inputs, backend=backend)
    got = gradients(outputs, cotangents, inputs)  # outside, as PyTorch asks of a backward
    got |= {"out": outputs[0], "state": outputs[1]}
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    if backend == "chunkwise":  # the op's own backward holds inside, too
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = run_op(inputs, cotangents, linear, backend=backend)
        assert all(torch.equal(got[n], expected[n]) for n in expected)


@linear_or_query
def test_unused_outputs_and_frozen_inputs(linear):
    """None for the cotangent of an unused output is a zero; a frozen input gets no gradient and changes no other."""
    inputs, (d_out, d_state) = op_inputs(CASE, torch.float64, linear=linear)
    expected = run_op(inputs, (0 * d_out, d_state), linear)
    inputs["log_decay"].requires_grad_(False)
    rest = {n: x for n, x in inputs.items() if n != "log_decay"}
    _, state = function(linear)(**inputs)
    got = gradients((state,), (d_state,), rest)
    assert_agree(got, {n: expected[n] for n in got}, "float64")


def test_saves_its_inputs_only():
    """Nothing the size of the states survives the forward: the backward recomputes them."""
    inputs, _ = op_inputs(Case(T=130), torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        scan.interdomain_scan(**inputs, backend="chunkwise")
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in inputs.values()}
