"""TensorBoard's event files of a run: each start writes one, and TensorBoard reads them in the order of their names."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "events.out.tfevents.*"


def open_events(folder: Path, first_step: int, max_queue: int = 10) -> "SummaryWriter":
    """A writer whose file is read after all that are in the folder, whatever the clock says.

    Args:
        first_step: What the earlier files hold from this step on is dropped by TensorBoard.
        max_queue: Events that are written at once.
    """
    from torch.utils.tensorboard import SummaryWriter

    with _clock_after(_latest_stamp(folder)):
        return SummaryWriter(folder, max_queue=max_queue, purge_step=first_step)


def _latest_stamp(folder: Path) -> int:
    """The latest time in the name of an event file, in seconds; 0 if there is none."""
    stamps = [int(match.group(1)) for path in folder.glob(EVENTS) if (match := re.match(r"\D+(\d+)", path.name))]
    return max(stamps, default=0)


@contextlib.contextmanager
def _clock_after(stamp: int) -> Iterator[None]:
    """Context in which TensorBoard names files by a time after `stamp`.

    The clock of another node may be behind that of the last start's, and two starts may fall into one second: such a file
    would come before those that it replaces.
    """
    from tensorboard.summary.writer import event_file_writer

    clock = event_file_writer.time
    later = SimpleNamespace(time=lambda: max(clock.time(), stamp + 1))
    event_file_writer.time = later  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        event_file_writer.time = clock
