"""A model over several ranks: each computes its part of the tokens or of the heads, and gets from the others what it needs.

All functions are collective, forward and backward: every rank of the group must call them, the first and the last too. They are
PyTorch's functional collectives with a gradient, so torch.compile and CommDebugMode see them. What `send` starts runs beside
all that is computed before `receive`; in the backward pass the other way round.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interdomain.scan import SentState, send_state

c10d = torch.ops._c10d_functional  # asynchronous; take the name of a group

# Tensor parallelism: which parameters the ranks have parts of, by the module's name, and along which dimension. They are the
# large ones. All others are whole on every rank, and what each has of their gradients is to be summed over the ranks; so is a
# module of such a name with the attribute `whole`.
SHARDED = {
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


def split_dimension(model: nn.Module, name: str) -> int | None:
    """The dimension along which the ranks of tensor parallelism have parts of a module's parameters; None: each has all."""
    return (
        None
        if getattr(model.get_submodule(name), "whole", False)
        else SHARDED.get(name.rpartition(".")[2])
    )


class Part(NamedTuple):
    """The part, of `size` equal ones, that a rank has; the ranks of a process group have the parts in order.

    The mixers call its methods, so that a model without parts needs nothing of this module.

    Attributes:
        group: the group's name (`ProcessGroup.group_name`).
        rank: this rank's place in it.
    """

    group: str
    rank: int
    size: int

    def gather_tokens(self, x: Tensor) -> Tensor:
        """The tokens of all ranks, [B, T / size, E] -> [B, T, E]."""
        return _Collective.apply(x, True, 1, self)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """The adjoint: this rank's tokens of the sum over all ranks, [B, T, E] -> [B, T / size, E]."""
        return _Collective.apply(x, False, 1, self)

    def gather(self, x: Tensor) -> Tensor:
        """x of all ranks, one after the other: [size, *x.shape]. A rank's gradient is the sum of what all ranks have for its
        x."""
        return _Collective.apply(x[None], True, 0, self)

    def send_tail(self, x: Tensor | dict[str, Tensor], n: int) -> Tensor:
        """Send the last n tokens of a shard x [B, T, E] to the rank after it. `receive_tail` takes the result.

        Args:
            x: Hidden states; or projections of them by name (Megatron), of which those of convolutions are sent.
        """
        parts = _of_convolutions(x).values() if isinstance(x, dict) else [x]
        tail = torch.cat([part[:, -n:] for part in parts], dim=-1)
        return send(tail, *self._ring(len(tail)), self)

    def receive_tail(self, sent: Tensor, x: Tensor | dict[str, Tensor], back: Tensor | None) -> Any:
        """The last n tokens of the shard before, as x.

        Args:
            back: How many of the last tokens are of the first token's document, [B]; the others are zeros. None: all. The first
                rank gets zeros.
        """
        past = receive(sent, *self._ring(len(sent)), self)
        if (
            self.rank == 0
        ):  # these are the last rank's, as those of a ring: all ranks have the same shapes
            back = torch.zeros(len(past), dtype=torch.int64, device=past.device)
        if back is not None:
            distance = torch.arange(past.shape[1], 0, -1, device=past.device)[:, None]
            past = past.masked_fill(distance > back[:, None, None], 0)
        if not isinstance(x, dict):
            return past
        projections = _of_convolutions(x)
        widths = [y.shape[-1] for y in projections.values()]
        return dict(zip(projections, past.split(widths, dim=-1), strict=True))

    def _ring(self, rows: int) -> tuple[list[int], list[int]]:
        """How many rows go to each rank, and how many come from each: all to the next, all from the one before."""
        to = [0] * self.size
        of = [0] * self.size
        to[(self.rank + 1) % self.size] = rows
        of[self.rank - 1] = rows
        return to, of

    def send_state(
        self, parts: Iterable[Tensor], log_decay: Tensor, documents: Tensor | None, backend: str
    ) -> SentState:
        """Start the exchange of a scan's states (`interdomain.scan.send_state`). parts: keys and values, or z."""
        return send_state(
            *parts,
            log_decay=log_decay,
            group=self.group,
            documents=documents,
            check_documents=False,
            backend=backend,
        )


def shard_of(x: Tensor, part: "Part | None", dim: int = 0) -> Tensor:
    """This rank's part of x along a dimension, a view; x itself where part is None."""
    return x if part is None else x.chunk(part.size, dim)[part.rank]


def _of_convolutions(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: y for name, y in x.items() if name in ("wq", "wk", "wv")}


def send(x: Tensor, to: list[int], of: list[int], part: Part) -> Tensor:
    """Send to[i] rows of x to rank i, in order, and get of[i] rows of rank i. The result has arrived after `receive`, which
    takes it, and nothing else does before."""
    return _Send.apply(x, to, of, part.group)


def receive(sent: Tensor, to: list[int], of: list[int], part: Part) -> Tensor:
    """The rows that arrived; `to` and `of` as in `send`."""
    return _Receive.apply(sent, to, of, part.group)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
        return c10d.all_to_all_single(x.contiguous(), of, to, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        return c10d.wait_tensor(d), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, to: list[int], of: list[int], group: str) -> Tensor:
        ctx.to, ctx.of, ctx.group = to, of, group
        return c10d.wait_tensor(sent)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        return c10d.all_to_all_single(d.contiguous(), ctx.to, ctx.of, ctx.group), None, None, None


class _Collective(torch.autograd.Function):
    """`_gathered` or `_scattered`; backward the other one, its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: bool, dim: int, part: Part) -> Tensor:
        ctx.gather, ctx.dim, ctx.part = gather, dim, part
        return (_gathered if gather else _scattered)(x, dim, part)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        return (_scattered if ctx.gather else _gathered)(d, ctx.dim, ctx.part), None, None, None


def _gathered(x: Tensor, dim: int, part: Part) -> Tensor:
    """x of all ranks, side by side along a dimension."""
    everyone = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), part.size, part.group))
    return everyone if dim == 0 else torch.cat(everyone.chunk(part.size), dim)


def _scattered(x: Tensor, dim: int, part: Part) -> Tensor:
    """The sum over the ranks, of which each gets its piece along a dimension."""
    x = x if dim == 0 else torch.cat(x.chunk(part.size, dim))
    return c10d.wait_tensor(
        c10d.reduce_scatter_tensor(x.contiguous(), "sum", part.size, part.group)
    )
