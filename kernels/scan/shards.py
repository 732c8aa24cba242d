"""Context parallelism: the ranks of a process group hold contiguous shards of the same sequences, in order.

Shapes: B batch, T tokens of a shard, H state heads, M basis functions, P channels.
Shard r leaves F_r from its own tokens alone, and S_(r+1) = F_r + rho_r Lambda^T S_r enters the next one, where rho_r is 1 if no
document begins in shard r, else 0. Lambda^T is known to all: only F_r and the B numbers rho_r travel, whatever T is.
Gradients of states likewise, from the last shard to the first, with conj(Lambda^T).
"""

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from .tables import powers

c10d = torch.ops._c10d_functional  # asynchronous; take the name of a group


def entering(
    local: Tensor, log_decay: Tensor, T: int, documents: Tensor | None, group: str, *, reverse: bool = False,
    d_final: Tensor | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Start the exchange. The returned function waits and gives the state before this shard; zeros at the first rank.

    Collective: every rank of the group calls it, with the same shapes.

    Args:
        local: [B, H, M, P, 2], the state that this shard alone leaves. With `reverse`, the part of the gradient of the state
            before the shard that its outputs alone add; the function then gives the gradient of the state after the shard.
        d_final: with `reverse`, the gradient of this shard's final state by its use.
        documents: [B, T]; document 0 goes on from the shard before.
        group: name of the process group.
    """
    members = distributed.distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]
    rank, size, B = distributed.get_rank(members), distributed.get_world_size(members), local.shape[0]
    passes = local.new_ones(B) if documents is None else (documents[:, -1] == 0).to(local.dtype)
    step = torch.view_as_complex(powers(log_decay, torch.full((1,), T, device=local.device)))[:, 0, :, None]
    step = torch.conj_physical(step) if reverse else step
    if d_final is not None:
        passed = torch.view_as_real(step * torch.view_as_complex(d_final.contiguous()))
        local = local + passes.view(B, 1, 1, 1, 1) * passed
    gathered = c10d.all_gather_into_tensor(torch.cat((local.flatten(), passes)), size, group)

    def wait() -> Tensor:
        everyone = c10d.wait_tensor(gathered).view(size, -1)
        total = torch.zeros_like(torch.view_as_complex(local))
        for r in range(size - 1, rank, -1) if reverse else range(rank):
            # A copy: with B odd, a rank's part may start between two complex numbers.
            state = torch.view_as_complex(everyone[r, :-B].clone().view(local.shape))
            total = everyone[r, -B:].view(B, 1, 1, 1) * (step * total) + state
        total = torch.view_as_real(total)
        return total if d_final is None else total + d_final

    return wait
