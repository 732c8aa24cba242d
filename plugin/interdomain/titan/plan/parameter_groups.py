"""The optimizer's group of each parameter."""

import re

from torch import Tensor

# Norms of the mixer's inputs (scales and biases), and the SSM parameters Delta, A, C and c. They
# are matched by name, because attributes of a tensor do not survive sharding.
SSM_PARAMETER = re.compile(r"\.attention\.(ssm|k_norm|v_norm)\.")


def group_of(name: str, p: Tensor, optimizer: str) -> str:
    """Returns the group of a parameter: ssm, matrices (Muon only) or main.

    Muon updates the two-dimensional weights of attention and feed-forward. Embedding, head, norms,
    convolutions and SSM parameters stay with AdamW.

    Args:
        name: Name of the parameter in the whole model.
        p: The parameter.
        optimizer: The setting optimizer.name.
    """
    if SSM_PARAMETER.search(name):
        return "ssm"
    if optimizer == "Muon" and name.startswith("layers.") and p.ndim == 2:
        return "matrices"
    return "main"
