"""The paper's figures, from paper.toml. The file says what each is."""

import tomllib
from pathlib import Path
from typing import Any

PAPER: dict[str, Any] = tomllib.loads(Path(__file__).with_name("paper.toml").read_text())
SIZE = "1.3B"  # the size of the paper's figures by task and by context length
CONDITIONS = ("softmax", "interdomain", "s4d")  # the columns of those
