"""A model over several ranks: each computes its part of the tokens or of the heads.

All functions here are collective, in the forward and in the backward pass: every rank of the group
must call them, the first and the last too. They are PyTorch's functional collectives with a
gradient, which torch.compile and CommDebugMode see. What `send` starts runs beside everything that
is computed before `receive`; in the backward pass it is the other way round.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interdomain.scan import SentState, send_state

# Shapes: B batch, T tokens, E width of hidden states or of a projection, H heads of the state,
#         M basis functions. In the classes below, `d` is the gradient of the function's result.

c10d = torch.ops._c10d_functional  # asynchronous; a group is given by its name

# The parameters that tensor-parallel ranks slice, by the name of the module, and the dimension.
# They are the large ones. All others are whole on every rank, and their gradients must be summed
# over the ranks; so are those of a module of such a name with the attribute `whole`.
SLICED = {
    "tok_embeddings": 0,
    "output": 0,
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "wg": 0,
    "w1": 0,
    "w3": 0,
    "wo": 1,
    "w2": 1,
}
# The projections that convolutions follow (some of them), in a dict of Megatron's.
CONVOLVED = ("wq", "wk", "wv")


def split_dimension(model: nn.Module, name: str) -> int | None:
    """Returns the dimension along which tensor-parallel ranks slice a module's parameters.

    Args:
        model: The model, or a part of it.
        name: The module's name in it.
    Returns:
        None if every rank has the whole parameters.
    """
    if getattr(model.get_submodule(name), "whole", False):
        return None
    return SLICED.get(name.rpartition(".")[2])


class GroupRank(NamedTuple):
    """This rank's place in context or tensor parallelism, and the collectives of its group.

    Rank r of the group has part r of `size` equal parts, of the tokens or of the heads.

    Attributes:
        group: The name of the process group (`ProcessGroup.group_name`).
        rank: This rank's place in the group.
        size: The number of ranks in the group.
    """

    group: str
    rank: int
    size: int

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gathers the tokens of all ranks: [B, T / size, E] -> [B, T, E]."""
        return _Gather.apply(x, 1, self)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """Sums x over the ranks and keeps this rank's tokens: [B, T, E] -> [B, T / size, E]."""
        return _Scatter.apply(x, 1, self)

    def gather(self, x: Tensor) -> Tensor:
        """Stacks x of all ranks, [size, *x.shape]. The gradient of x is summed over the ranks."""
        return _Gather.apply(x[None], 0, self)

    def send_tail(self, x: Tensor | dict[str, Tensor], n: int) -> Tensor:
        """Starts to send the last n tokens of this rank to the next rank.

        Args:
            x: Hidden states, [B, T, E]. Megatron gives a dict of their projections, of which those
                that convolutions read are sent.
            n: The number of tokens.
        Returns:
            The argument `sent` of `receive_tail`.
        """
        if isinstance(x, dict):
            parts = [x[name] for name in CONVOLVED if name in x]
        else:
            parts = [x]
        tail = torch.cat([part[:, -n:] for part in parts], dim=-1)
        return send(tail, *self._ring(len(tail)), self)

    def receive_tail(
        self,
        sent: Tensor,
        x: Tensor | dict[str, Tensor],
        back: Tensor | None,
    ) -> Any:
        """Returns the last n tokens of the previous rank, in the form of x. Rank 0 gets zeros.

        Args:
            sent: The result of `send_tail`.
            x: This rank's own hidden states, [B, T, E], or Megatron's dict of their projections.
                Only its form is read.
            back: How many of the tokens belong to the document of this rank's first token, [B]; the
                others become zeros. None means all.
        """
        # [B, n, E], or the projections side by side.
        past = receive(sent, *self._ring(len(sent)), self)
        if self.rank == 0:
            # The last rank's tokens arrived: in a ring all ranks exchange the same shapes.
            back = torch.zeros(len(past), dtype=torch.int64, device=past.device)
        if back is not None:
            distance = torch.arange(past.shape[1], 0, -1, device=past.device)[:, None]
            past = past.masked_fill(distance > back[:, None, None], 0)

        # Separate the projections again.
        if not isinstance(x, dict):
            return past
        names = [name for name in CONVOLVED if name in x]
        widths = [x[name].shape[-1] for name in names]
        return dict(zip(names, past.split(widths, dim=-1), strict=True))

    def _ring(self, rows: int) -> tuple[list[int], list[int]]:
        """Returns the rows for and from each rank if all rows go to the next rank.

        Args:
            rows: The number of rows that this rank sends, and receives.
        """
        rows_to = [0] * self.size
        rows_from = [0] * self.size
        rows_to[(self.rank + 1) % self.size] = rows
        rows_from[self.rank - 1] = rows
        return rows_to, rows_from

    def send_state(
        self,
        inputs: list[Tensor],
        log_decay: Tensor,
        documents: Tensor | None,
        backend: str,
    ) -> SentState:
        """Starts the exchange of a scan's states (`interdomain.scan.send_state`).

        Args:
            inputs: [k, v], or [z] for the linear readout, each [B, T, H, width].
            log_decay: The scan's log Lambda per token, [H, M, 2], as (real, imaginary).
            documents: Each token's document, [B, T]. None means one document in each row.
            backend: Implementation of the scan, one of `interdomain.scan.BACKENDS`.
        """
        return send_state(
            *inputs,
            log_decay=log_decay,
            group=self.group,
            documents=documents,
            check_documents=False,
            backend=backend,
        )


def local_slice(
    x: Tensor,
    part: "GroupRank | None",
    dim: int = 0,
) -> Tensor:
    """Returns this rank's slice of x along a dimension, a view; x itself if `part` is None.

    Args:
        x: A tensor that every rank has.
        part: This rank's place in the group.
        dim: The dimension that the ranks divide into equal parts.
    """
    if part is None:
        return x
    return x.chunk(part.size, dim)[part.rank]


def send(
    x: Tensor,
    rows_to: list[int],
    rows_from: list[int],
    part: GroupRank,
) -> Tensor:
    """Starts an all-to-all of rows of x.

    Args:
        x: The rows, in the order of the ranks that get them.
        rows_to: The number of rows for each rank.
        rows_from: The number of rows from each rank.
        part: This rank's place in the group.
    Returns:
        The argument `sent` of `receive`. Nothing else may read it.
    """
    return _Send.apply(x, rows_to, rows_from, part.group)


def receive(
    sent: Tensor,
    rows_to: list[int],
    rows_from: list[int],
    part: GroupRank,
) -> Tensor:
    """Waits for the rows of an all-to-all that `send` started.

    Args:
        sent: The result of `send`.
        rows_to: The number of rows for each rank.
        rows_from: The number of rows from each rank.
        part: This rank's place in the group.
    Returns:
        The rows that this rank gets, in the order of the ranks that sent them.
    """
    return _Receive.apply(sent, rows_to, rows_from, part.group)


class _Send(torch.autograd.Function):
    """Starts an all-to-all. The backward pass waits for the one that `_Receive` started."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows_to: list[int],
        rows_from: list[int],
        group: str,
    ) -> Tensor:
        """Starts to send `rows_to` rows of x to each rank, and to receive `rows_from`."""
        return c10d.all_to_all_single(x.contiguous(), rows_from, rows_to, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        """Waits for the gradient of x, which `_Receive.backward` started to send."""
        return c10d.wait_tensor(d), None, None, None


class _Receive(torch.autograd.Function):
    """Waits for an all-to-all. The backward pass starts the opposite one."""

    @staticmethod
    def forward(
        ctx: Any,
        sent: Tensor,
        rows_to: list[int],
        rows_from: list[int],
        group: str,
    ) -> Tensor:
        """Waits for `sent`, the result of `_Send` with the same `rows_to` and `rows_from`."""
        ctx.rows_to = rows_to
        ctx.rows_from = rows_from
        ctx.group = group
        return c10d.wait_tensor(sent)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        """Starts to send d, the gradient of the received rows, back to their ranks."""
        return (
            c10d.all_to_all_single(d.contiguous(), ctx.rows_to, ctx.rows_from, ctx.group),
            None,
            None,
            None,
        )


class _Gather(torch.autograd.Function):
    """Puts x of all ranks side by side along `dim`. Its adjoint is `_Scatter`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        part: GroupRank,
    ) -> Tensor:
        """Puts x of all ranks in `part.group` side by side along dimension `dim`."""
        ctx.arguments = dim, part
        return _gathered(x, dim, part)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(d, *ctx.arguments), None, None


class _Scatter(torch.autograd.Function):
    """Sums x over the ranks and slices it along `dim`. Its adjoint is `_Gather`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        part: GroupRank,
    ) -> Tensor:
        """Sums x over the ranks in `part.group`, and keeps this rank's slice along `dim`."""
        ctx.arguments = dim, part
        return _scattered(x, dim, part)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(d, *ctx.arguments), None, None


# The collectives work along the first dimension only, so parts along another one are moved there.


def _gathered(
    x: Tensor,
    dim: int,
    part: GroupRank,
) -> Tensor:
    """Puts x of all ranks in `part.group` side by side along dimension `dim`."""
    stacked = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), part.size, part.group))
    if dim == 0:
        return stacked
    return torch.cat(stacked.chunk(part.size), dim)


def _scattered(
    x: Tensor,
    dim: int,
    part: GroupRank,
) -> Tensor:
    """Sums x over the ranks in `part.group`, and returns this rank's slice along `dim`."""
    if dim != 0:
        x = torch.cat(x.chunk(part.size, dim))
    own = c10d.reduce_scatter_tensor(x.contiguous(), "sum", part.size, part.group)
    return c10d.wait_tensor(own)
