"""The kernels that the mixers call: the package's, or plain PyTorch.

Plain PyTorch computes under torch.export, whose graphs run where these kernels are not, and in an exported model where the
package is not installed or has other arguments.

The functions are those of `interdomain.features` and `interdomain.scan`, which say what the arguments are. `execution` is an
`Execution`, or None for automatic choices.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from interdomain.features.plain import features, step
from interdomain.scan.plain import is_exporting, plain_scan
from interdomain.scan.step import linear_one_step, scan_step

from .fixed_state_scan import plain_recurrence

INTERFACE = 1  # of the package's functions that are called here
HAS_PACKAGE = False

try:
    import interdomain.features
    import interdomain.scan
    from interdomain.model.mixers import fla_kernels

    HAS_PACKAGE = interdomain.scan.INTERFACE == INTERFACE
    if not HAS_PACKAGE:
        logging.getLogger(__name__).warning(
            f"This code calls interface {INTERFACE} of the package interdomain, and the installed one has "
            f"{interdomain.scan.INTERFACE}: it computes in plain PyTorch. Install the version of config.json's "
            "`converted_by`, or convert again."
        )
except ImportError:
    pass


def runs_package() -> bool:
    return HAS_PACKAGE and not is_exporting()


def input_features(x: Tensor, head_dim: int, *, execution: Any = None, **options: Any) -> Tensor:
    """`interdomain.features.input_features` of documents that are counted already."""
    if runs_package():
        backend = "auto" if execution is None else execution.features
        return interdomain.features.input_features(
            x, head_dim, backend=backend, check_documents=False, **options
        )
    with torch.autocast(x.device.type, enabled=False):
        return features(x, head_dim, **_one_by_one(options))


def input_features_step(
    x: Tensor, head_dim: int, *, execution: Any = None, **options: Any
) -> Tensor:
    """`interdomain.features.input_features_step`: overwrites `past`."""
    if runs_package():
        backend = "auto" if execution is None else execution.features
        return interdomain.features.input_features_step(x, head_dim, backend=backend, **options)
    with torch.autocast(x.device.type, enabled=False):
        return step(x, head_dim, **_one_by_one(options))


def _one_by_one(options: dict[str, Any]) -> dict[str, Any]:
    """The pairs among the options as two tensors each."""
    options = dict(options)
    for pair, names in {
        "conv": ("weight", "bias"),
        "rope": ("cos", "sin"),
        "norm": ("scale", "shift"),
    }.items():
        tensors = options.pop(pair, None)
        if tensors is not None:
            options |= zip(names, tensors, strict=True)
    return options


def interdomain_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, *, initial_state: Tensor | None = None,
    execution: Any = None, **options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """`interdomain.scan.interdomain_scan`."""
    if runs_package():
        if execution is not None:
            options.update(backend=execution.backend, recompute=execution.recompute)
        return interdomain.scan.interdomain_scan(
            q, k, v, log_decay, mixing, initial_state=initial_state, **options
        )
    with torch.autocast(k.device.type, enabled=False):
        return plain_scan(q, k, v, log_decay, mixing, initial_state)


def linear_scan(
    z: Tensor, log_decay: Tensor, readout: Tensor, *, initial_state: Tensor | None = None, execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """`interdomain.scan.linear_scan`."""
    if runs_package():
        if execution is not None:
            options.update(backend=execution.backend)
        return interdomain.scan.linear_scan(
            z, log_decay, readout, initial_state=initial_state, **options
        )
    with torch.autocast(z.device.type, enabled=False):
        return plain_scan(None, z, z[..., :0], log_decay, readout, initial_state)


def interdomain_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    decay: Tensor,
    mixing: Tensor,
    state: Tensor,
) -> Tensor:
    """The output of `interdomain.scan.interdomain_step`, which overwrites the state."""
    if runs_package():
        tables = dict(log_decay=log_decay, decay=decay, mixing=mixing)
        return interdomain.scan.interdomain_step(q, k, v, state=state, inplace=True, **tables)[0]
    with torch.autocast(k.device.type, enabled=False):
        return scan_step(q, k, v, decay, mixing, state)


def linear_step(
    z: Tensor, *, log_decay: Tensor, decay: Tensor, readout: Tensor, state: Tensor
) -> Tensor:
    """The output of `interdomain.scan.linear_step`, which overwrites the state."""
    if runs_package():
        tables = dict(log_decay=log_decay, decay=decay, readout=readout)
        return interdomain.scan.linear_step(z, state=state, inplace=True, **tables)[0]
    with torch.autocast(z.device.type, enabled=False):
        return linear_one_step(z, decay, readout, state)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
    lengths: Tensor | None = None,
    execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`plain_recurrence` of the fixed-state baselines, or by the package's kernels.

    lengths: tokens of each row, [B], where padding follows them; None: all. The state is that after a row's own tokens.
    """
    if lengths is not None:  # padding adds nothing, and nothing decays over it
        padding = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
        k = k.masked_fill(padding[:, :, None, None], 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(
                padding.view(*padding.shape, *(1,) * (log_decay.ndim - 2)), 0
            )
    if runs_package():
        backend = "auto" if execution is None else execution.backend
        options.update(initial_state=initial_state, documents=documents, backend=backend)
        return fla_kernels.recurrence(q, k, v, log_decay, beta, **options)
    return plain_recurrence(
        q, k, v, log_decay, beta, initial_state=initial_state, documents=documents
    )
