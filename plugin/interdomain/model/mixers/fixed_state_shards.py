"""Context parallelism of the fixed-state baselines: the ranks have contiguous shards of the same sequences, in order.

A shard's recurrence is affine in the state S before it: A S + B is the state after it, and to an output that a zero state has
S^T c_t is added. A is a decay per channel, or of the delta rules a K x K matrix; both are of one size for every T.

Rank j computes the states before all shards, for its part of the rows: (h, k) of a decay, heads of the delta rules. One
all-to-all brings it these rows of every A and B, another takes the states to their shards.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..shard import Part, receive, send
from .fixed_state_scan import first_tokens

# Shapes: B batch, T tokens of a shard, H heads, G heads of queries and keys, K key width, V value width, D 1 or K, N ranks.


def sharded_recurrence(
    run: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    documents: Tensor | None,
    shard: Part,
    beside: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """`recurrence` of a shard's tokens, of which document 0 goes on from the shard before. Collective.

    run: `recurrence` on this rank alone. The other arguments, and what is returned, are as there.
    """
    dtype, V = torch.promote_types(v.dtype, torch.float32), v.shape[-1]
    if beta is not None:
        # Columns of a state do not meet. Those of the identity, to which nothing is added, become A, and their outputs c.
        identity = torch.eye(k.shape[-1], dtype=dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)
        start = F.pad(identity, (V, 0))
        o, S = run(q, k, F.pad(v, (0, k.shape[-1])), log_decay, beta, initial_state=start, documents=documents)
        (o, c), (added, passed) = o.split([V, k.shape[-1]], dim=-1), S.split([V, k.shape[-1]], dim=-1)
    else:
        assert log_decay is not None
        o, added = run(q, k, v, log_decay, documents=documents)
        decay = log_decay.to(dtype).view(*v.shape[:3], -1)  # [B, T, H, D]
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        from_start = decay.cumsum(1).exp()
        c, passed = q * from_start, from_start[:, -1, :, :, None].expand(-1, -1, k.shape[-1], -1)
    (B, H, K, _), D, N = added.shape, passed.shape[-1], shard.size
    both = torch.cat([added, passed], dim=-1).transpose(0, 1)  # by rows whose states do not meet: [H, B, K, V + D],
    both = both if D > 1 else both.transpose(1, 2).reshape(H * K, B, 1, V + 1)
    n, width = len(both), both.shape[2]
    each = [-(-n // N)] * N
    sent = send(F.pad(both.flatten(1), (0, 0, 0, sum(each) - n)), each, each, shard)
    beside()
    with torch.autocast(v.device.type, enabled=False):
        before = _states_before(receive(sent, each, each, shard).view(N, -1, B, width, V + D), V)
        before = send(before.flatten(0, 1).flatten(1), each, each, shard)
        S = receive(before, each, each, shard)[:n].view(n, B, width, V)
        S = S.transpose(0, 1) if D > 1 else S.view(H, K, B, V).permute(2, 0, 1, 3)
        o = o + (c.to(dtype).transpose(1, 2) @ S).transpose(1, 2)
        return o.to(v.dtype), added + _passed_on(passed, S)


def _states_before(both: Tensor, V: int) -> Tensor:
    """The states before all shards from their B and A, [N, rows, B, K, V + D] -> [N, rows, B, K, V]."""
    x, A = both.split([V, both.shape[-1] - V], dim=-1)
    step = 1
    while step < len(x):  # the shards up to each: a prefix sum by doubling
        x = torch.cat([x[:step], x[step:] + _passed_on(A[step:], x[:-step])])
        A = torch.cat([A[:step], _passed_on(A[step:], A[:-step])])
        step *= 2
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def _passed_on(A: Tensor, x: Tensor) -> Tensor:
    """A of the state x, or of another A: [..., K, D] and [..., K, n] -> [..., K, n]."""
    return A * x if A.shape[-1] == 1 else A @ x
