"""Progress of commands that take long, in a terminal and in a log."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 10.0  # between two lines of progress in a log


def progress_bar(iterable: Iterable | None = None, **options: Any) -> tqdm:
    """Returns a progress bar that moves in a terminal and writes lines in a log.

    Args:
        iterable: The items to count as they pass. None if the caller updates the bar.
        **options: Other arguments of tqdm.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, delay=0.1, **options)
    # tqdm writes over what it wrote. In a log each state gets a line, without the bar.
    return tqdm(
        iterable,
        mininterval=LOG_SECONDS,
        delay=LOG_SECONDS,
        bar_format="{l_bar}{r_bar}\n",
        **options,
    )
