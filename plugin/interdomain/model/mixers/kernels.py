"""The kernels that the mixers call: the package's, or plain PyTorch.

Plain PyTorch computes in two cases: under torch.export, whose graphs run where these kernels are
not, and in an exported model if the package is not installed or has another interface.

The functions are those of `interdomain.features` and `interdomain.scan`, which describe the
arguments. `execution` is an `Execution`; None means automatic choices.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from interdomain.features.plain import features, step
from interdomain.scan.plain import is_exporting, plain_scan
from interdomain.scan.step import linear_one_step, scan_step

from .fixed_state_scan import plain_recurrence

INTERFACE = 1  # version of the package's functions that are called here
HAS_PACKAGE = False

# In an exported model the package may be missing, or be of another version.
try:
    import interdomain.features
    import interdomain.scan
    from interdomain.model.mixers import fla_kernels

    HAS_PACKAGE = interdomain.scan.INTERFACE == INTERFACE
    if not HAS_PACKAGE:
        logging.getLogger(__name__).warning(
            f"This code calls interface {INTERFACE} of the package interdomain, and the installed "
            f"one has {interdomain.scan.INTERFACE}: it computes in plain PyTorch. Install the "
            "version in config.json's `converted_by`, or convert again."
        )
except ImportError:
    pass

# Shapes: B batch, T tokens, H heads.


def runs_package() -> bool:
    return HAS_PACKAGE and not is_exporting()


def input_features(
    x: Tensor,
    head_dim: int,
    *,
    execution: Any = None,
    **options: Any,
) -> Tensor:
    """Calls `interdomain.features.input_features`; the documents' numbers are valid."""
    if runs_package():
        backend = "auto" if execution is None else execution.features
        return interdomain.features.input_features(
            x,
            head_dim,
            backend=backend,
            check_documents=False,
            **options,
        )
    with torch.autocast(x.device.type, enabled=False):
        return features(x, head_dim, **_separate_tensors(**options))


def input_features_step(
    x: Tensor,
    head_dim: int,
    *,
    execution: Any = None,
    **options: Any,
) -> Tensor:
    """Calls `interdomain.features.input_features_step`, which overwrites `past`."""
    if runs_package():
        backend = "auto" if execution is None else execution.features
        return interdomain.features.input_features_step(x, head_dim, backend=backend, **options)
    with torch.autocast(x.device.type, enabled=False):
        return step(x, head_dim, **_separate_tensors(**options))


def _separate_tensors(
    conv: Any = None,
    rope: Any = None,
    norm: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Names the tensors of each pair, for the functions of `features/plain.py`."""
    if conv is not None:
        options["weight"], options["bias"] = conv
    if rope is not None:
        options["cos"], options["sin"] = rope
    if norm is not None:
        options["scale"], options["shift"] = norm
    return options


def interdomain_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    mixing: Tensor,
    *,
    initial_state: Tensor | None = None,
    execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls `interdomain.scan.interdomain_scan`."""
    if runs_package():
        if execution is not None:
            options.update(backend=execution.backend, recompute=execution.recompute)
        return interdomain.scan.interdomain_scan(
            q,
            k,
            v,
            log_decay,
            mixing,
            initial_state=initial_state,
            **options,
        )
    with torch.autocast(k.device.type, enabled=False):
        return plain_scan(q, k, v, log_decay, mixing, initial_state)


def linear_scan(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    *,
    initial_state: Tensor | None = None,
    execution: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Calls `interdomain.scan.linear_scan`."""
    if runs_package():
        if execution is not None:
            options.update(backend=execution.backend)
        return interdomain.scan.linear_scan(
            z,
            log_decay,
            readout,
            initial_state=initial_state,
            **options,
        )
    with torch.autocast(z.device.type, enabled=False):
        return plain_scan(
            None,
            z,
            z[..., :0],
            log_decay,
            readout,
            initial_state,
        )


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
    """Returns the output of `interdomain.scan.interdomain_step`, which overwrites the state."""
    if runs_package():
        o, _ = interdomain.scan.interdomain_step(
            q,
            k,
            v,
            log_decay,
            mixing,
            state,
            decay=decay,
            inplace=True,
        )
        return o
    with torch.autocast(k.device.type, enabled=False):
        return scan_step(q, k, v, decay, mixing, state)


def linear_step(
    z: Tensor,
    *,
    log_decay: Tensor,
    decay: Tensor,
    readout: Tensor,
    state: Tensor,
) -> Tensor:
    """Returns the output of `interdomain.scan.linear_step`, which overwrites the state."""
    if runs_package():
        o, _ = interdomain.scan.linear_step(
            z,
            log_decay,
            readout,
            state,
            decay=decay,
            inplace=True,
        )
        return o
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
    """Calls `plain_recurrence`, or `fla_kernels.recurrence` with these `options`.

    Args:
        lengths: The number of tokens in each row, [B]; padding follows them, and the state returned
            is the one after the tokens. None means that no row has padding.
    """
    if lengths is not None:
        # Padding adds nothing to the state, and the state does not decay over it.
        padding = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]  # [B, T]
        k = k.masked_fill(padding[:, :, None, None], 0)
        if log_decay is not None:
            trailing = [1] * (log_decay.ndim - 2)
            log_decay = log_decay.masked_fill(padding.view(*padding.shape, *trailing), 0)
    options.update(initial_state=initial_state, documents=documents)
    if runs_package():
        backend = "auto" if execution is None else execution.backend
        return fla_kernels.recurrence(
            q,
            k,
            v,
            log_decay,
            beta,
            backend=backend,
            **options,
        )
    return plain_recurrence(
        q,
        k,
        v,
        log_decay,
        beta,
        initial_state=initial_state,
        documents=documents,
    )
