"""Reads the paper's figures from paper.toml, which describes each."""

import tomllib
from pathlib import Path
from typing import Any

PAPER: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text())
SIZE = "1.3B"  # the model size of the paper's figures by task and by context length
CONDITIONS = ("softmax", "interdomain", "s4d")  # the columns of these figures
