"""The recurrence of the fixed-state baselines by flash-linear-attention's kernels (the extra `fla`), as one `torch.library` op.

    torch.ops.interdomain.fla_recurrence.default            torch.ops.interdomain.fla_recurrence_backward.default

torch.compile traces no kernels of that package, and activation checkpointing knows what it saves by an op's name. Only the
inputs are saved: the backward pass computes the forward once more. None of this has run on a GPU yet.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.scan.library import log_once, tag_caches

from ..shard import Part, receive, send
from .fixed_state_scan import first_tokens, plain_recurrence

# Shapes: B batch, T time (of a shard), H heads, G heads of queries and keys, K key width, V value width, D 1 or K, N ranks.

INSTALLED = importlib.util.find_spec("fla") is not None  # here: torch.compile traces `chosen`
PLAIN = (
    "chunkwise-torch",
    "reference",
)  # settings of the scan's backend that ask for plain PyTorch


def chosen(device: torch.device | None, dtype: torch.dtype, backend: str) -> tuple[bool, str]:
    """(True if the kernels compute, in words what computes). device: None for another machine's GPU."""
    if backend in PLAIN:
        problem = "as set"
    elif device is not None and device.type != "cuda":
        problem = f"the input is on {device.type}"
    elif dtype not in (torch.bfloat16, torch.float16):
        problem = f"the input is {dtype}, and those kernels have half precision only"
    elif device is not None and not INSTALLED:
        problem = "flash-linear-attention is not installed"
    else:
        return True, "flash-linear-attention (kernels)"
    words = f"chunkwise-torch (plain PyTorch): {problem}"
    if device is not None:
        log_once(f"interdomain.model: the recurrence is {words}")
    return False, words


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
    backend: str = "auto",
    cp_rank: Part | None = None,
    beside: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`plain_recurrence`; on CUDA by flash-linear-attention's kernels where that package is installed.

    Args:
        backend: of the scan; `chunkwise-torch` and `reference` are plain PyTorch here, too (`chosen`).
        shard: of the sequences, where the ranks of a group have the others; then there is no initial_state.
        beside: called while the ranks exchange their states.
    """
    if cp_rank is not None:
        assert beside is not None
        return _sharded_recurrence(backend, q, k, v, log_decay, beta, documents, cp_rank, beside)
    B, T, H, V = v.shape
    if T == 1 or not chosen(v.device, v.dtype, backend)[0]:
        return plain_recurrence(
            q, k, v, log_decay, beta, initial_state=initial_state, documents=documents
        )
    if initial_state is None:
        initial_state = v.new_zeros(
            B, H, k.shape[3], V, dtype=torch.promote_types(v.dtype, torch.float32)
        )
    with torch.autocast(v.device.type, enabled=False):
        return fla_recurrence(q, k, v, log_decay, beta, initial_state, documents)


def _sharded_recurrence(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    documents: Tensor | None,
    shard: Part,
    beside: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """`recurrence` over a shard's tokens under context parallelism; document 0 continues from the shard before. Collective.

    A shard's recurrence is affine in the state S before it. The state after it is A S + B, and S^T c_t is added to the output
    that a zero state gives. A is a decay per channel, or a K x K matrix for the delta rules; A and B have one size for every T.

    Each rank computes the states before all shards for its part of the rows: (h, k) of a decay, heads of the delta rules. One
    all-to-all brings it these rows of every A and B, another takes the states to their shards.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    K = k.shape[-1]
    V = v.shape[-1]
    if beta is not None:
        # Columns of a state do not meet. Those of the identity, to which nothing is added, become A, and their outputs c.
        identity = torch.eye(K, dtype=dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)
        start = F.pad(identity, (V, 0))
        o, S = recurrence(
            q,
            k,
            F.pad(v, (0, K)),
            log_decay,
            beta,
            initial_state=start,
            documents=documents,
            backend=backend,
        )
        o, c = o.split([V, K], dim=-1)
        added, passed = S.split([V, K], dim=-1)
    else:
        assert log_decay is not None
        o, added = recurrence(q, k, v, log_decay, documents=documents, backend=backend)
        decay = log_decay.to(dtype).view(*v.shape[:3], -1)  # [B, T, H, D]
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        from_start = decay.cumsum(1).exp()
        c = q * from_start
        passed = from_start[:, -1, :, :, None].expand(-1, -1, K, -1)

    # Send A and B by rows whose states do not meet, [H, B, K, V + D] or [H * K, B, 1, V + 1].
    B, H = added.shape[:2]
    D = passed.shape[-1]
    both = torch.cat([added, passed], dim=-1).transpose(0, 1)
    if D == 1:
        both = both.transpose(1, 2).reshape(H * K, B, 1, V + 1)
    n = len(both)
    width = both.shape[2]
    each = [-(-n // shard.size)] * shard.size
    sent = send(F.pad(both.flatten(1), (0, 0, 0, sum(each) - n)), each, each, shard)
    beside()
    with torch.autocast(v.device.type, enabled=False):
        before = _states_before(
            receive(sent, each, each, shard).view(shard.size, -1, B, width, V + D), V
        )
        before = send(before.flatten(0, 1).flatten(1), each, each, shard)
        S = receive(before, each, each, shard)[:n].view(n, B, width, V)
        S = S.view(H, K, B, V).permute(2, 0, 1, 3) if D == 1 else S.transpose(0, 1)
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


@torch.library.custom_op("interdomain::fla_recurrence", mutates_args=())
def fla_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fixed_state_scan.plain_recurrence` with a state."""
    return _run(q, k, v, log_decay, beta, state, documents)


@fla_recurrence.register_fake
def _(q, k, v, log_decay, beta, state, documents):
    return v.new_empty(v.shape), state.new_empty(state.shape)


def _run(
    q: Tensor, k: Tensor, v: Tensor, log_decay, beta, state: Tensor, documents
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = dict(scale=1.0, initial_state=state, output_final_state=True)
    q = q.to(v.dtype).expand(-1, -1, v.shape[2], -1)
    k = k.to(v.dtype).expand(-1, -1, v.shape[2], -1)
    tensors = [q, k, v]
    if log_decay is not None:
        tensors.append(log_decay.float())
    if beta is not None:
        tensors.append(beta.to(v.dtype))
    last = slice(None)
    if documents is not None:  # documents one after the other as one row, by where each begins
        goes_on = (documents[:, 0] == 0)[:, None, None, None]
        first = first_tokens(documents)
        first[:, 0] = True
        starts = first.flatten().nonzero()[:, 0]
        last = first.sum(1).cumsum(0) - 1
        before = state.new_zeros(len(starts), *state.shape[1:])
        before = before.index_put((last - first.sum(1) + 1,), state.where(goes_on, 0))
        options |= dict(initial_state=before, cu_seqlens=F.pad(starts, (0, 1), value=first.numel()))
        tensors = [x.flatten(0, 1)[None] for x in tensors]
    function = _function(None if log_decay is None else log_decay.ndim == 4, beta is not None)
    o, final = function(*tensors, **options)
    if documents is not None:
        o = o.unflatten(1, (len(v), -1))[0]
    return o, final[last]


def _function(per_channel: bool | None, delta: bool) -> Any:
    """The package's function; q, k, v come first, then decay and beta as far as there are any."""
    name = "gla" if per_channel else "simple_gla"
    if delta:
        name = "delta_rule" if per_channel is None else "gated_delta_rule"
    return getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")


@torch.library.custom_op("interdomain::fla_recurrence_backward", mutates_args=())
def recurrence_backward(
    d_o: Tensor, d_state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None,
    state: Tensor, documents: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay, beta and state, as far as there are any."""
    inputs = [
        None if x is None else x.detach().requires_grad_()
        for x in (q, k, v, log_decay, beta, state)
    ]
    without: Any = torch._C._SetExcludeDispatchKeyGuard  # within an op, autograd is off
    with torch.enable_grad(), without(torch._C.DispatchKey.AutogradFunctionality, False):
        out = _run(*inputs, documents)  # pyright: ignore[reportArgumentType, reportCallIssue]
    wanted = [x for x in inputs if x is not None]
    gradients = torch.autograd.grad(out, wanted, (d_o, d_state), allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g.clone()
        for x, g in zip(wanted, gradients, strict=True)
    ]


@recurrence_backward.register_fake
def _(d_o, d_state, q, k, v, log_decay, beta, state, documents):
    return [x.new_empty(x.shape) for x in (q, k, v, log_decay, beta, state) if x is not None]


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, d_o, d_state):
    inputs = ctx.saved_tensors
    gradients = iter(recurrence_backward(d_o.contiguous(), d_state.contiguous(), *inputs))
    return (*(None if x is None else next(gradients) for x in inputs[:-1]), None)


fla_recurrence.register_autograd(_gradient, setup_context=_setup)
tag_caches(__name__)
