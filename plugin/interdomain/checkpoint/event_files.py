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

    This holds even if this machine's clock is behind that of an earlier start.

    Args:
        folder: The folder of the run's event files. It need not exist.
        first_step: The first step of this start of the run. TensorBoard then ignores what earlier files have
            for this step and later ones.
        max_queue: The number of events that are collected before they are written together.
    """
    from torch.utils.tensorboard import SummaryWriter

    # The first number in the name of an event file is the time in seconds when it was opened.
    latest = 0
    for path in folder.glob(EVENTS):
        if match := re.match(r"\D+(\d+)", path.name):
            latest = max(latest, int(match.group(1)))
    # The new file's name gets a later time.
    with event_files_after(latest):
        return SummaryWriter(folder, max_queue=max_queue, purge_step=first_step)
