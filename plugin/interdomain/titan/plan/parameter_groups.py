"""The optimizer's group of each parameter."""

import re

from torch import Tensor

# Input norms (scales and biases) and the dynamics Delta, A, C, c. By name: tensor attributes do not survive sharding.
SSM_PARAMETER = re.compile(r"\.attention\.(ssm|k_norm|v_norm)\.")


def group_of(name: str, p: Tensor, optimizer: str) -> str:
    """The group of a parameter. Under Muon the maps within blocks are `matrices`: the attention's and feed-forward's weights of
    two dimensions. Embedding, head, norms, convolutions and dynamics stay with AdamW."""
    if SSM_PARAMETER.search(name):
        return "ssm"
    return (
        "matrices" if optimizer == "Muon" and name.startswith("layers.") and p.ndim == 2 else "main"
    )
