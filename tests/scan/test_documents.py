"""Packed documents equal the documents one by one: values, final state and every gradient, on every backend."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interdomain import scan
from interdomain.scan.packing import checked_documents

from .common import ON_CPU, Case, assert_agree, gradients, op_inputs, run_op

# Per sequence, the first tokens of documents: on the boundaries of chunks of 16 and between them, and one after the
# other. The first sequence continues its initial state, the second begins anew.
STARTS = ((0, 1, 5, 16, 17, 32, 47, 48, 49, 69), (0, 33, 64))
CASE = Case(T=70, B=2, H=2, G=2, R=6, D=5, M=8)


def packed(T, starts=STARTS, device="cpu"):
    """The numbers of documents, [B, T]."""
    numbers = torch.zeros(len(starts), T, dtype=torch.int32)
    for row, firsts in zip(numbers, starts, strict=True):
        row[[t for t in firsts if t < T]] = 1
    numbers[0, 0] = 0
    return numbers.cumsum(1, dtype=torch.int32).to(device)


def one_by_one(inputs, cotangents, documents, linear=False):
    """Each document through the loop in float64, the first from the initial state if it is number 0."""
    inputs = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    fn = scan.linear_scan if linear else scan.interdomain_scan
    per_token = ("z",) if linear else ("q", "k", "v")
    rows, finals = [], []
    for b, numbers in enumerate(documents.tolist()):
        pieces, firsts = [], [t for t, n in enumerate(numbers) if t == 0 or n != numbers[t - 1]]
        for start, stop in zip(firsts, (*firsts[1:], len(numbers)), strict=True):
            piece = {n: x[b : b + 1, start:stop] if n in per_token else x for n, x in inputs.items()}
            state = piece.pop("initial_state", None)
            if state is not None and numbers[start] == 0:
                piece["initial_state"] = state[b : b + 1]
            out, final = fn(**piece, backend="reference")
            pieces.append(out)
        rows.append(torch.cat(pieces, dim=1))
        finals.append(final)
    outputs = torch.cat(rows), torch.cat(finals)
    grads = gradients(outputs, tuple(x.double() for x in cotangents), inputs)
    return {"out": outputs[0], "state": outputs[1], **grads}


def problem(linear, case=CASE, dtype=torch.float64, activations=None):
    inputs, cotangents = op_inputs(case, dtype, activations, linear)
    return inputs, cotangents, packed(case.T)


@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
@pytest.mark.parametrize("backend", [b for b in ON_CPU if b != "auto"])
def test_documents_one_by_one(backend, linear):
    inputs, cotangents, documents = problem(linear)
    expected = one_by_one(inputs, cotangents, documents, linear)
    got = run_op(inputs, cotangents, linear, backend=backend, documents=documents, chunk_size=16)
    assert_agree(got, expected, "float64")


@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_one_document_is_a_sequence(linear):
    """Number 0 throughout changes no bit of what is summed; another number drops the initial state."""
    inputs, cotangents, _ = problem(linear)
    zeros = torch.zeros(2, 70, dtype=torch.int64)
    for backend in ("chunkwise", "fft", "reference"):
        assert_agree(
            run_op(inputs, cotangents, linear, backend=backend, documents=zeros),
            run_op(inputs, cotangents, linear, backend=backend),
            "float64",
        )
    fresh = run_op(inputs, cotangents, linear, documents=zeros + 3)
    rest = {n: x for n, x in inputs.items() if n != "initial_state"}
    assert_agree({n: x for n, x in fresh.items() if n != "dinitial_state"}, run_op(rest, cotangents, linear), "float64")
    assert not fresh["dinitial_state"].any()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            torch.zeros(2, 69, dtype=torch.int32),
            r"shape \(2, 69\); expected int32 or int64 of shape \[B, T\] = \(2, 70\)",
        ),
        (torch.zeros(2, 70, dtype=torch.bool), r"torch.bool of shape \(2, 70\); expected int32 or int64"),
        (torch.zeros(2, 70, dtype=torch.int32, device="meta"), "documents is on meta and k .* on cpu"),
    ],
)
def test_refusals(documents, message):
    for linear in (False, True):
        inputs, _, _ = problem(linear)
        with pytest.raises(ValueError, match=message):
            (scan.linear_scan if linear else scan.interdomain_scan)(**inputs, documents=documents)


WRONG = {
    "falling": ([[0, 0, 1, 2], [0, 1, 1, 0]], "got 0 after 1 at token 3 of sequence 1"),
    "negative": ([[-1, 0, 1, 2], [0, 1, 1, 2]], "got -1 at the first token of sequence 0"),
    "too large": ([[0, 0, 0, 0], [0, 1, 1, 2**31]], "got 2147483648 after 1 at token 3 of sequence 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_are_no_documents(wrong):
    """An error at the call on a CPU; compiled, and on CUDA, an assertion that the host does not wait for."""
    numbers, got = WRONG[wrong]
    numbers, right = torch.tensor(numbers), torch.tensor([[0, 0, 1, 2**31 - 1], [5, 5, 5, 5]])
    small = Case(T=4, B=2, R=4, D=3, M=4)
    for linear in (False, True):
        inputs, _ = op_inputs(small, torch.float32, linear=linear)
        fn = scan.linear_scan if linear else scan.interdomain_scan
        fn(**inputs, documents=right)
        with pytest.raises(ValueError, match=rf"from 0 to 2\^31 - 1, never falling along T: {got}"):
            fn(**inputs, documents=numbers)
    compiled = torch.compile(scan.linear_scan, fullgraph=True, backend="aot_eager")
    compiled(**inputs, documents=right)
    with pytest.raises(RuntimeError, match="documents must number"):
        compiled(**inputs, documents=numbers)
    with FakeTensorMode() as mode:  # its tensors have no numbers that the host could look at
        checked_documents(mode.from_tensor(numbers), mode.from_tensor(numbers))
