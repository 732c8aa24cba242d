"""Documents that are packed into one sequence: a state stops at the end of its document.

`documents` gives each token an id, which is the same for all tokens of a document and never falls
along the sequence.

Shapes: B batch, T time.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# The beginning of the error about wrong values.
ALLOWED_NUMBERS = (
    "documents must number the tokens of each sequence from 0 to 2^31 - 1, never falling along T"
)


def checked_documents(
    documents: Tensor | None, tokens: Tensor, check_numbers: bool = True
) -> Tensor | None:
    """Checks the ids of the documents that are packed into sequences, and makes them int32.

    Args:
        documents: The id of each token's document, [B, T] int32 or int64, or None.
        tokens: The tokens, [B, T, ...].
        check_numbers: False leaves out the check of the values.

    Returns:
        The ids as contiguous int32; None for None.

    Raises:
        ValueError: The shape, dtype or device is wrong, or on a CPU a value. On a GPU and under
            torch.compile, wrong values fail an asynchronous assertion, for which the host does not
            wait: CUDA ends the process with the message at the next synchronisation, and a compiled
            graph on a CPU raises RuntimeError.
    """
    if documents is None:
        return None
    if documents.shape != tokens.shape[:2] or documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"documents is {documents.dtype} of shape {tuple(documents.shape)}; expected int32 or int64 of shape "
            f"[B, T] = {tuple(tokens.shape[:2])}: the number of each token's document"
        )
    if documents.device != tokens.device:
        raise ValueError(
            f"documents is on {documents.device} and k (or z, x) on {tokens.device}; move one of them"
        )
    if check_numbers:
        _check_numbers(documents)
    return documents.to(torch.int32).contiguous()


def _check_numbers(documents: Tensor) -> None:
    """Checks that the numbers of documents are from 0 to 2^31 - 1 (int32) and never fall along T.

    Args:
        documents: The number of each token's document, [B, T] int32 or int64.
    """
    # The number of the token before each token. A 0 before the first one makes a negative first
    # number one that falls.
    before = F.pad(documents, (1, 0))[:, :-1]
    wrong = documents < before
    if documents.dtype == torch.int64:
        wrong = wrong | (documents >= 2**31)
    # Report the first wrong number with an error. If it cannot be read, assert on the device
    # instead: the host shall not wait for a GPU, and a graph or a subclass such as a fake tensor
    # has no values to read.
    right = ~wrong.any()
    if (
        torch.compiler.is_compiling()
        or type(documents) is not Tensor
        or documents.device.type != "cpu"
    ):
        torch._assert_async(right, ALLOWED_NUMBERS)  # pyright: ignore[reportPrivateImportUsage]
    elif not right:
        b, t = wrong.nonzero()[0].tolist()
        number = documents[b, t].item()
        got = f"{number} after {before[b, t].item()} at token {t}"
        if t == 0:
            got = f"{number} at the first token"
        raise ValueError(
            f"{ALLOWED_NUMBERS}: got {got} of sequence {b}. Sort the documents, or number them in their order."
        )
