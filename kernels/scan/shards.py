"""Context parallelism: the ranks of a group hold contiguous shards of the same sequences, in order.

Shapes: B batch, T tokens of a shard, H state heads, M basis functions, P channels, N ranks.

Shard r leaves F_r from its own tokens alone, and S_(r+1) = F_r + rho_r Lambda^T S_r enters the next
one, where rho_r is 1 if no document begins in shard r, else 0. Lambda^T is known to all ranks: only
F_r and the B numbers rho_r travel, whatever T is. Gradients of states travel likewise, from the
last shard to the first, with conj(Lambda^T).

Rank j computes what enters every shard, for the j-th part of a state's rows (h, m). One all-to-all
brings it these rows of all F_r, another one takes the sums to their shards: a rank receives less
than two states, however many ranks there are.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from .tables import powers

# Collectives that do not wait, and that take the name of a group.
c10d = torch.ops._c10d_functional


def send(
    local: Tensor, log_decay: Tensor, T: int, documents: Tensor | None, group: str, *, reverse: bool = False,
    d_final: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Starts the exchange. `receive` waits for what it returns.

    It is collective: every rank of the group calls it, with the same shapes.

    Args:
        local: The state that this shard alone leaves, [B, H, M, P, 2]. With `reverse`, the part of
            the gradient of the state before the shard that its own outputs add.
        log_decay: theta, [H, M, 2].
        T: Tokens of a shard.
        documents: The document of each token, [B, T], or None; document 0 goes on from the shard
            before.
        group: Name of the process group.
        reverse: True for gradients, which travel from the last shard to the first.
        d_final: With `reverse`, the gradient of this shard's final state by its use, or None.

    Returns:
        The message on its way, in the shape of `message`.
    """
    members, B = _members(group), local.shape[0]
    rank, N = distributed.get_rank(members), members.size()
    with _beside(local, log_decay, documents, d_final):
        # rho_r: 1 if the state before this shard reaches the one after it.
        passes = local.new_ones(B) if documents is None else (documents[:, -1] == 0).to(local.dtype)
        # The gradient of the final state passes through the shard to the state before it.
        if d_final is not None:
            step = torch.view_as_complex(
                powers(log_decay, torch.full((1,), T, device=local.device))
            )[:, 0, :, None]
            passed = torch.conj_physical(step) * torch.view_as_complex(d_final.contiguous())
            local = local + passes.view(B, 1, 1, 1, 1) * torch.view_as_real(passed)

        # Each rank gets its part of the rows (h, m) of all F_r, and all rho_r.
        H, M, _ = log_decay.shape
        rows = local.flatten(1, 2).transpose(0, 1).flatten(1)
        rows = F.pad(rows, (0, 0, 0, -(H * M) % N)).view(N, -1)
        received = c10d.wait_tensor(
            _all_to_all(torch.cat((rows, passes.expand(N, B)), dim=1), group)
        )
        # In float64: float32 products may be TF32's.
        parts = torch.view_as_complex(
            received[:, :-B].double().contiguous().view(N, -1, B, local.shape[3], 2)
        )

        # Weights of part s in the sum for shard r > s: Lambda^((r-1-s) T), if no document begins
        # between the two.
        order = torch.arange(N, device=local.device)
        r, s = order[:, None], order
        table = torch.view_as_complex(powers(log_decay.view(1, H * M, 2), order * T))[0]  # [N, H M]
        table = F.pad(table, (0, -(H * M) % N)).chunk(N, dim=1)[rank]
        # The number of shards before each in which a document begins, [N + 1, B].
        begun = F.pad((1 - received[:, -B:]).cumsum(0), (0, 0, 1, 0))
        goes_on = (r > s)[..., None] & (begun[r] == begun[s + 1])  # [N, N, B]
        weights = table[(r - 1 - s).clamp_min(0), :, None] * goes_on[:, :, None]  # [N, N, rows, B]
        # Gradients go the other way, with conjugates. Then the sums go to their shards.
        if reverse:
            weights = torch.conj_physical(weights).transpose(0, 1)
        sums = torch.einsum("rsnb,snbp->rnbp", weights.to(parts.dtype), parts)
        return _all_to_all(torch.view_as_real(sums).to(local.dtype).flatten(1), group)


def message(group: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the shape of the result of `send`.

    Args:
        group: Name of the process group.
        shape: The shape of a state, [B, H, M, P, 2].
    """
    (B, H, M, P, _), N = shape, _members(group).size()
    return N, -(-H * M // N) * B * P * 2


def receive(sent: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Waits for the state before this shard.

    Args:
        sent: The result of `send`.
        shape: The shape of a state, [B, H, M, P, 2].

    Returns:
        The state; zeros at the first shard. With `reverse`, the gradient of the state after the
        shard by the shards after it; zeros at the last one.
    """
    B, H, M, P, _ = shape
    rows = c10d.wait_tensor(sent).view(-1, B, P, 2)[: H * M]
    return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(shape)


def _members(group: str) -> distributed.ProcessGroup:
    """Returns the process group of a name."""
    return distributed.distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


def _all_to_all(x: Tensor, group: str) -> Tensor:
    """Sends x[j] to rank j, [N, n] -> [N, n]. The result is there after `wait_tensor`."""
    return c10d.all_to_all_single(x.contiguous(), [1] * len(x), [1] * len(x), group)


@contextlib.contextmanager
def _beside(*inputs: Tensor | None) -> Iterator[None]:
    """Runs the block on a stream of its own on CUDA.

    So what waits within the exchange does not hold up the passes. Memory that is allocated on the
    stream is reused on it, after the passes so far.

    Args:
        *inputs: Tensors that the block reads, or None.
    """
    device = next(x.device for x in inputs if x is not None)
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for x in inputs:
        if x is not None:
            x.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of the exchanges on a device."""
    return torch.cuda.Stream(device)
