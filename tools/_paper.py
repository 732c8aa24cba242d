"""Reads the paper's figures from paper.toml, which describes each."""

import math
import tomllib
from pathlib import Path
from typing import Any

PAPER: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text())
SIZE = "1.3B"  # the model size of the paper's figures by task and by context length
CONDITIONS = ("softmax", "interdomain", "s4d")  # the columns of these figures


def has_papers_tokens(size: str, tokens: int | None) -> bool:
    """Returns True if a model was trained on as many tokens as the paper's of its size, to 1 %.

    Args:
        size: The model size, such as "125M".
        tokens: The tokens that it was trained on. None if this is not known.
    """
    papers = PAPER["training_tokens"].get(size)
    if papers is None or tokens is None:
        return False
    return math.isclose(tokens, papers, rel_tol=0.01)
