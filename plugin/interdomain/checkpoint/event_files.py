"""TensorBoard's event files of a run: each start writes one, and TensorBoard reads them in the order of their names."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from interdomain.patches import event_files_after

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

    with event_files_after(_latest_stamp(folder)):
        return SummaryWriter(folder, max_queue=max_queue, purge_step=first_step)


def _latest_stamp(folder: Path) -> int:
    """The latest time in the name of an event file, in seconds; 0 if there is none."""
    stamps = [
        int(match.group(1))
        for path in folder.glob(EVENTS)
        if (match := re.match(r"\D+(\d+)", path.name))
    ]
    return max(stamps, default=0)
