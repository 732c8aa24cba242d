"""Context parallelism: the exchange of states between ranks that share sequences.

Shapes: B batch, T tokens of a rank, H state heads, M basis functions, P channels of a state, N
ranks of the group.

Each rank of the group has T consecutive tokens of the same sequences. cp_rank, or r, is a rank's
place in the group: rank 0 has the first tokens. The tokens of rank r leave the state F_r when they
start from zero. The state that enters rank r + 1 is S_(r+1) = F_r + rho_r Lambda^T S_r, where rho_r
is 1 if no document begins in the tokens of rank r, else 0. All ranks know Lambda^T, so only F_r and
the B values rho_r are sent, whatever T is. Gradients of states are sent in the same way from the
last rank to the first one, with conj(Lambda^T).

The work is divided by the rows (h, m) of a state, of which each rank has one N-th. One all-to-all
brings a rank its rows of all F_r. It computes these rows of every S_r in one weighted sum. Another
all-to-all takes the sums to the ranks that they enter. So a rank receives less than two states, for
any number of ranks.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from .tables import powers

# Collectives that return before they are done, and that take the name of a group.
c10d = torch.ops._c10d_functional


def send(
    local: Tensor, log_decay: Tensor, T: int, documents: Tensor | None, group: str, *, reverse: bool = False,
    d_final: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Starts the exchange of states between ranks. `receive` waits for its end.

    Rank r of N has T tokens, which leave the state F_r when they start from zero. The state that
    enters rank r is the sum over the ranks s before it
        S_r = sum_(s < r) Lambda^((r-1-s) T) F_s
    without those s for which a document begins in a rank between s and r. Each rank computes
    one N-th of the rows of every S_r. It is collective: every rank of the group calls it, with the
    same shapes.

    Args:
        local: F_r, the state that the tokens of this rank r leave when they start from zero, [B, H,
            M, P, 2]. With `reverse`, the gradient of the state before the tokens by this rank's own
            outputs.
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        T: Tokens of a rank.
        documents: The id of each token's document, [B, T], or None. Document 0 goes on from the
            rank before.
        group: Name of the process group.
        reverse: True for gradients, which go from the last rank to the first one.
        d_final: With `reverse`, the gradient of this rank's final state if its caller used that
            state, else None.

    Returns:
        The message that is on its way, in the shape of `message`.
    """
    members = _process_group(group)
    cp_rank = distributed.get_rank(members)
    N = members.size()
    B = local.shape[0]
    with _side_stream(local, log_decay, documents, d_final):
        # rho_r: 1 if the state before this rank's tokens reaches the state after them.
        if documents is None:
            passes = local.new_ones(B)
        else:
            passes = (documents[:, -1] == 0).to(local.dtype)

        # A gradient of the final state is also one of the state before the tokens: times
        # conj(Lambda^T).
        if d_final is not None:
            exponent = torch.full((1,), T, device=local.device)
            step = torch.view_as_complex(powers(log_decay, exponent))[:, 0, :, None]
            passed = torch.conj_physical(step) * torch.view_as_complex(d_final.contiguous())
            local = local + passes.view(B, 1, 1, 1, 1) * torch.view_as_real(passed)

        # The first all-to-all brings each rank its rows (h, m) of all F_r, and all rho_r.
        H, M, _ = log_decay.shape
        rows = local.flatten(1, 2).transpose(0, 1).flatten(1)  # [H M, B P 2]
        # Zeros fill the rows up to a multiple of N, so that every rank has as many.
        rows = F.pad(rows, (0, 0, 0, -(H * M) % N)).view(N, -1)
        rows_and_passes = torch.cat((rows, passes.expand(N, B)), dim=1)
        from_all = c10d.wait_tensor(_all_to_all(rows_and_passes, group))  # a row from each rank
        # F_s of every rank s in this rank's rows, [N, rows, B, P] complex. The sum is in float64,
        # because float32 products may be computed in TF32.
        states = torch.view_as_complex(
            from_all[:, :-B].double().contiguous().view(N, -1, B, local.shape[3], 2)
        )

        # The weight of F_s in the sum for rank r > s is Lambda^((r-1-s) T), or 0 if a document
        # begins in the ranks between the two.
        order = torch.arange(N, device=local.device)
        r = order[:, None]
        s = order
        table = torch.view_as_complex(powers(log_decay.view(1, H * M, 2), order * T))[0]  # [N, H M]
        table = F.pad(table, (0, -(H * M) % N)).chunk(N, dim=1)[cp_rank]
        # begun[r] counts the ranks before r in whose tokens a document begins, [N + 1, B].
        begun = F.pad((1 - from_all[:, -B:]).cumsum(0), (0, 0, 1, 0))
        goes_on = (r > s)[..., None] & (begun[r] == begun[s + 1])  # [N, N, B]
        weights = table[(r - 1 - s).clamp_min(0), :, None] * goes_on[:, :, None]  # [N, N, rows, B]

        # Gradients go the other way, with conjugates. The second all-to-all takes the sums to their
        # ranks.
        if reverse:
            weights = torch.conj_physical(weights).transpose(0, 1)
        # S_r = sum_s weights[r, s] F_s in this rank's rows (n).
        sums = torch.einsum("rsnb,snbp->rnbp", weights.to(states.dtype), states)
        return _all_to_all(torch.view_as_real(sums).to(local.dtype).flatten(1), group)


def message(group: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the shape of the result of `send`: a row for each of the N ranks.

    Args:
        group: Name of the process group.
        shape: The shape of a state, [B, H, M, P, 2].
    """
    B, H, M, P, _ = shape
    N = _process_group(group).size()
    # Every rank has H M / N rows of a state, rounded up, and sends each other rank their sums.
    return N, -(-H * M // N) * B * P * 2


def receive(sent: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Waits for the state before this rank's tokens.

    Args:
        sent: The result of `send`.
        shape: The shape of a state, [B, H, M, P, 2].

    Returns:
        The state, zeros on the first rank. If `send` was called with `reverse`: the gradient of the
        state after this rank's tokens by the outputs of later ranks, zeros on the last rank.
    """
    B, H, M, P, _ = shape
    # The rows (h, m) of the state in their order, without the ones that filled them up.
    rows = c10d.wait_tensor(sent).view(-1, B, P, 2)[: H * M]
    # [H M, B, P, 2] -> [B, H, M, P, 2]
    return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(shape)


def _process_group(group: str) -> distributed.ProcessGroup:
    """Returns the process group of a name."""
    return distributed.distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


def _all_to_all(x: Tensor, group: str) -> Tensor:
    """Starts to send x[j] to rank j, [N, n] -> [N, n]. `wait_tensor` waits for the result."""
    return c10d.all_to_all_single(x.contiguous(), [1] * len(x), [1] * len(x), group)


@contextlib.contextmanager
def _side_stream(*inputs: Tensor | None) -> Iterator[None]:
    """Runs the block on a CUDA stream of its own; on a CPU, it does nothing.

    The exchange waits for other ranks in between. On a stream of its own it does not delay the
    passes of the scan. The allocator reuses memory that the stream allocated only on the same
    stream.

    Args:
        *inputs: Tensors that the block reads, or None.
    """
    device = next(x.device for x in inputs if x is not None)
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    # The inputs belong to the current stream: their memory must not be reused before this stream
    # has read them.
    for x in inputs:
        if x is not None:
            x.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of the exchanges on a device."""
    return torch.cuda.Stream(device)
