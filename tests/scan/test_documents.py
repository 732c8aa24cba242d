"""Packed documents equal the documents one by one: values, final state and every gradient, on every backend."""

import pytest
import torch

from interdomain import scan
from interdomain.scan import chunkwise_layout

from .common import (
    BACKENDS,
    Case,
    as_float64,
    assert_agree,
    linear_or_query,
    op_inputs,
    part_of_time,
    results,
    run_op,
    run_scan,
)

# Per sequence, the first tokens of documents: on the boundaries of chunks of 16 and between them, and one after the
# other. The first sequence continues its initial state, the second begins anew; the third is one document, which continues.
STARTS = ((0, 1, 5, 16, 17, 32, 47, 48, 49, 69), (0, 33, 64), ())
CASE = Case(T=70, B=3, H=2, G=2, R=6, D=5, M=8)


def packed(T, starts=STARTS, device="cpu"):
    """Returns the numbers of documents, [B, T]."""
    numbers = torch.zeros(len(starts), T, dtype=torch.int32)
    for b, firsts in enumerate(starts):
        for t in firsts:
            numbers[b, t:] += 1
    # The first sequence begins with document 0.
    numbers[0] -= numbers[0, 0].item()
    return numbers.to(device)


def one_by_one(inputs, cotangents, documents):
    """Runs each document through the loop in float64, the first from the initial state if it is number 0."""
    leaves = as_float64(inputs)
    outputs = []
    finals = []
    for b, numbers in enumerate(documents.tolist()):
        pieces = []
        for number in sorted(set(numbers)):
            start = numbers.index(number)
            document = part_of_time(leaves, slice(start, start + numbers.count(number)))
            if number > 0:
                document["initial_state"] = None
            # All sequences have these tokens; only the one with this document is looked at.
            out, final = run_scan(**document, backend="reference")
            pieces.append(out[b])
        outputs.append(torch.cat(pieces))
        finals.append(final[b])
    outputs = torch.stack(outputs), torch.stack(finals)
    return results(outputs, cotangents, leaves)


@linear_or_query
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_one_by_one(backend, linear, monkeypatch):
    monkeypatch.setattr(chunkwise_layout, "CHUNK", 16)
    inputs, cotangents = op_inputs(CASE, torch.float64, linear=linear)
    documents = packed(CASE.T)
    got = run_op(inputs, cotangents, backend=backend, documents=documents)
    assert_agree(got, one_by_one(inputs, cotangents, documents), "float64")


def test_numbers_that_are_no_documents():
    """An error at the call on a CPU; compiled, and on CUDA, an assertion that the host does not wait for."""
    inputs, _ = op_inputs(Case(T=4, R=4, D=3, M=4), torch.float32, linear=True)
    compiled = torch.compile(scan.linear_scan, fullgraph=True, backend="aot_eager")
    compiled(**inputs, documents=torch.tensor([[0, 0, 1, 2**31 - 1]]))
    for numbers, got in (
        ([0, 1, 1, 0], "got 0 after 1 at token 3 of sequence 0"),
        ([-1, 0, 1, 2], "got -1 at the first token of sequence 0"),
        ([0, 1, 1, 2**31], "got 2147483648 after 1 at token 3 of sequence 0"),
    ):
        documents = torch.tensor([numbers])
        with pytest.raises(ValueError, match=rf"from 0 to 2\^31 - 1, never falling along T: {got}"):
            scan.linear_scan(**inputs, documents=documents)
        with pytest.raises(RuntimeError, match="documents must number"):
            compiled(**inputs, documents=documents)
