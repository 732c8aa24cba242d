"""TensorBoard's event files of a run.

Each start writes one, and TensorBoard reads them in the order of their names.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from interdomain.patches import event_files_after

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "events.out.tfevents.*"  # the names of event files


def open_events(folder: Path, first_step: int, max_queue: int = 10) -> "SummaryWriter":
    """Opens a writer whose file TensorBoard reads after all files in the folder.

    This holds whatever the clock says.

    Args:
        folder: The folder of the run's event files.
        first_step: The step from which on TensorBoard ignores the events of earlier files.
        max_queue: The number of events that are written at once.
    """
    from torch.utils.tensorboard import SummaryWriter

    # The name of an event file begins with its time, in seconds.
    latest = 0
    for path in folder.glob(EVENTS):
        if match := re.match(r"\D+(\d+)", path.name):
            latest = max(latest, int(match.group(1)))
    # The new file's name begins with a later time.
    with event_files_after(latest):
        return SummaryWriter(folder, max_queue=max_queue, purge_step=first_step)
