"""Context parallelism: the ranks of a process group hold contiguous shards of the same sequences, in order.

Shapes: B batch, T tokens of a shard, H state heads, M basis functions, P channels, N ranks.
Shard r leaves F_r from its own tokens alone, and S_(r+1) = F_r + rho_r Lambda^T S_r enters the next one, where rho_r is 1 if no
document begins in shard r, else 0. Lambda^T is known to all: only F_r and the B numbers rho_r travel, whatever T is.
Gradients of states likewise, from the last shard to the first, with conj(Lambda^T).

Rank j computes what enters every shard, for the j-th part of a state's rows (h, m). One all-to-all brings it these rows of all
F_r, another takes the sums to their shards: a rank receives less than two states, however many ranks there are.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from .tables import powers

c10d = torch.ops._c10d_functional  # asynchronous; take the name of a group


def send(
    local: Tensor, log_decay: Tensor, T: int, documents: Tensor | None, group: str, *, reverse: bool = False,
    d_final: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Start the exchange. `receive` waits for what it returns.

    Collective: every rank of the group calls it, with the same shapes.

    Args:
        local: [B, H, M, P, 2], the state that this shard alone leaves. With `reverse`, the part of the gradient of the state
            before the shard that its outputs alone add.
        d_final: with `reverse`, the gradient of this shard's final state by its use.
        documents: [B, T]; document 0 goes on from the shard before.
        group: name of the process group.
    """
    members, B = _members(group), local.shape[0]
    rank, N = distributed.get_rank(members), members.size()
    with _beside(local, log_decay, documents, d_final):
        passes = local.new_ones(B) if documents is None else (documents[:, -1] == 0).to(local.dtype)
        if d_final is not None:
            step = torch.view_as_complex(
                powers(log_decay, torch.full((1,), T, device=local.device))
            )[:, 0, :, None]
            passed = torch.conj_physical(step) * torch.view_as_complex(d_final.contiguous())
            local = local + passes.view(B, 1, 1, 1, 1) * torch.view_as_real(passed)
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

        # Weights of part s in the sum for shard r > s: Lambda^((r-1-s) T), if no document begins between the two.
        order = torch.arange(N, device=local.device)
        r, s = order[:, None], order
        table = torch.view_as_complex(powers(log_decay.view(1, H * M, 2), order * T))[0]  # [N, H M]
        table = F.pad(table, (0, -(H * M) % N)).chunk(N, dim=1)[rank]
        begun = F.pad(
            (1 - received[:, -B:]).cumsum(0), (0, 0, 1, 0)
        )  # in how many shards before, [N + 1, B]
        goes_on = (r > s)[..., None] & (begun[r] == begun[s + 1])  # [N, N, B]
        weights = table[(r - 1 - s).clamp_min(0), :, None] * goes_on[:, :, None]  # [N, N, rows, B]
        if reverse:
            weights = torch.conj_physical(weights).transpose(0, 1)
        sums = torch.einsum("rsnb,snbp->rnbp", weights.to(parts.dtype), parts)
        return _all_to_all(torch.view_as_real(sums).to(local.dtype).flatten(1), group)


def message(group: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of what `send` returns, for a state of `shape` [B, H, M, P, 2]."""
    (B, H, M, P, _), N = shape, _members(group).size()
    return N, -(-H * M // N) * B * P * 2


def receive(sent: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The state before this shard, of `shape` [B, H, M, P, 2]; zeros at the first. With `reverse` the gradient of the state
    after the shard by the shards after it; zeros at the last."""
    B, H, M, P, _ = shape
    rows = c10d.wait_tensor(sent).view(-1, B, P, 2)[: H * M]
    return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(shape)


def _members(group: str) -> distributed.ProcessGroup:
    return distributed.distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


def _all_to_all(x: Tensor, group: str) -> Tensor:
    """x[j] to rank j, [N, n] -> [N, n]; it arrives after `wait_tensor`."""
    return c10d.all_to_all_single(x.contiguous(), [1] * len(x), [1] * len(x), group)


@contextlib.contextmanager
def _beside(*inputs: Tensor | None) -> Iterator[None]:
    """On CUDA a stream of its own, so that what waits within the exchange does not hold up the passes. Memory that is allocated
    on it is reused on it, after the passes so far."""
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
    return torch.cuda.Stream(device)
