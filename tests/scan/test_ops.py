"""The ops as PyTorch sees them: opcheck, torch.compile, selective activation checkpointing, autocast, absent gradients."""

import functools
import inspect
from unittest import mock

import pytest
import torch

from interdomain import scan
from interdomain.scan import ops
from interdomain.scan.library import tag_caches

from .common import (
    BACKENDS,
    Case,
    assert_agree,
    assert_equal,
    gradients,
    linear_or_query,
    op_inputs,
    results,
    run_op,
    run_scan,
    saved_tensors,
)
from .test_documents import packed

CASE = Case(T=20, G=3, R=4, D=3, M=4)


@pytest.mark.parametrize(
    ("op", "backward", "linear", "options"),
    [
        (ops.scan, ops.scan_backward, False, ["chunkwise", False]),
        (ops.linear_scan, ops.linear_scan_backward, True, ["chunkwise"]),
    ],
    ids=["query", "linear"],
)
@pytest.mark.parametrize(("state", "activations"), [(False, torch.bfloat16), (True, torch.float32)])
def test_opcheck(op, backward, linear, options, state, activations):
    """With a state, documents and a final state in fp32, or none of them in bf16."""
    case = Case(T=20, G=3, R=4, D=3, M=4, state=state)
    inputs, (d_out, d_state) = op_inputs(case, torch.float32, activations, linear)
    inputs = [*inputs.values()]
    documents = None
    if state:
        documents = packed(case.T)[:1]
    else:
        inputs.append(None)
    args = *inputs, *options, documents, state
    torch.library.opcheck(op, args)
    _, *others = op(*args)  # what a checkpointing policy that lists the op keeps
    assert sum(x.numel() for x in others) == (d_state.numel() if state else 0)
    values = [x.detach() for x in inputs if x is not None]
    initial_state = [] if state else [None]
    for d_final in (d_state, None):
        args = d_out, d_final, *values, *initial_state, "chunkwise"
        torch.library.opcheck(backward, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("backend", "linear", "lengths"),
    [("chunkwise", False, [20]), ("chunkwise", True, [20, 70]), ("fft", False, [20])],
)
def test_compiles_without_a_graph_break(backend, linear, lengths):
    """From dt, A and C to the gradients, tables and validation included; one graph for every length."""

    def tables_and_scan(log_decay, **inputs):
        dt = torch.ones_like(log_decay[:, 0, 0])
        theta = scan.decay_exponent(dt, (-log_decay[..., 0]).log(), log_decay[..., 1])
        return run_scan(log_decay=theta, backend=backend, **inputs)

    compiled = torch.compile(tables_and_scan, fullgraph=True, backend="aot_eager", dynamic=linear)
    for T in lengths:
        case = Case(T=T, H=1, G=3, R=4, D=3, M=4)
        inputs, cotangents = op_inputs(case, torch.float32, linear=linear)
        documents = packed(T)[:1] if backend == "chunkwise" else None
        got = compiled(**inputs, documents=documents)
        expected = tables_and_scan(**inputs, documents=documents)
        assert_agree(
            results(got, cotangents, inputs), results(expected, cotangents, inputs), "float32"
        )


@linear_or_query
@pytest.mark.parametrize("documents", [None, packed(130)[:1]], ids=["one", "packed"])
def test_few_heads_at_a_time(linear, documents, monkeypatch):
    """Two heads and then one, as on a CPU, give the results of all heads at once, states and documents included."""
    case = Case(T=130, H=3, G=2, R=4, D=3, M=4)
    inputs, cotangents = op_inputs(case, torch.float64, linear=linear)
    run = functools.partial(run_op, inputs, cotangents, backend="chunkwise", documents=documents)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(ops, "HEAD_TOKENS", 2 * case.T)
    two_and_one = run()
    monkeypatch.setattr(ops, "HEAD_TOKENS", 3 * case.T)
    assert_agree(two_and_one, run(), "float64")


def test_caches_of_torch_compile_know_the_version_of_the_ops(monkeypatch):
    """By name alone an op that has changed would be called by code that was compiled for the old one."""
    tags = []
    for source in ("# one", "# two", "# one"):
        monkeypatch.setattr(inspect, "getsource", mock.Mock(return_value=source))
        with torch.compiler.config.patch(cache_key_tag=""):
            tag_caches("interdomain.scan.ops")
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]
    assert torch.compiler.config.cache_key_tag


def test_derivatives_that_are_refused():
    """Forward mode, torch.func.vjp, a second derivative: an error, and `reference` has them. vmap works."""
    inputs, _ = op_inputs(CASE, torch.float32)
    q = inputs.pop("q").detach()

    def run(q, backend="chunkwise"):
        return run_scan(**inputs, q=q, backend=backend)[0]

    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="backend='reference' of the scan"):
            torch.func.jvp(run, (q,), (q,))
        several = torch.vmap(run)(torch.stack([q, 2 * q]))
        torch.testing.assert_close(several, torch.stack([run(q), run(2 * q)]))
        reference = functools.partial(run, backend="reference")
        value, tangent = torch.func.jvp(reference, (q,), (q,))
    torch.testing.assert_close(tangent, value)  # o is linear in q
    with pytest.raises(NotImplementedError, match=r"no derivative by torch\.func"):
        torch.func.vjp(run, q)
    (first,) = torch.autograd.grad(run(q.requires_grad_()).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@linear_or_query
def test_a_final_state_that_is_not_asked_for_is_not_made(linear, backend):
    inputs, (d_out, _) = op_inputs(CASE, torch.float32, linear=linear)
    documents = (torch.arange(CASE.T) // 7)[None]
    run = functools.partial(run_scan, **inputs, backend=backend, documents=documents)
    out, state = run(final_state=False)
    expected, _ = run()
    assert state is None
    assert_equal(out, expected)
    assert_equal(gradients(out, d_out, inputs), gradients(expected, d_out, inputs))


@linear_or_query
def test_unused_outputs_and_frozen_inputs(linear):
    """None for the cotangent of an unused output is a zero; a frozen input gets no gradient and changes no other."""
    inputs, (d_out, d_state) = op_inputs(CASE, torch.float64, linear=linear)
    expected = run_op(inputs, (torch.zeros_like(d_out), d_state))
    theta = inputs.pop("log_decay").detach()
    _, state = run_scan(**inputs, log_decay=theta)
    got = gradients(state, d_state, inputs)
    assert_agree(got, {name: expected[name] for name in got}, "float64")


def test_saves_its_inputs_only():
    """Nothing the size of the states survives the forward: the backward recomputes them."""
    inputs, _ = op_inputs(Case(T=130), torch.float32)
    with saved_tensors() as saved:
        run_scan(**inputs, backend="chunkwise")
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in inputs.values()}
