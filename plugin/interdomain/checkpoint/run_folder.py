"""The folder of a run (job.dump_folder): the places of its checkpoints and its TensorBoard events.

Both places are settings, and may lead out of the run's folder. So a run writes them to
`folders.json` at each start, and the tools read them here. Without this file the defaults count:
earlier versions did not write it.
"""

import json
from pathlib import Path

from interdomain.folders import write_atomically

NOTE = "folders.json"
# The settings that folders.json holds, and their defaults.
CHECKPOINTS = "checkpoint.folder"
EVENTS = "metrics.save_tb_folder"
DEFAULTS = {CHECKPOINTS: "checkpoint", EVENTS: "tb"}


def note_folders(run: Path, checkpoints: str, events: str) -> None:
    """Writes folders.json into a run's folder.

    Args:
        run: The run's folder.
        checkpoints: The setting checkpoint.folder.
        events: The setting metrics.save_tb_folder.
    """
    folders = {CHECKPOINTS: checkpoints, EVENTS: events}
    write_atomically(run / NOTE, (json.dumps(folders) + "\n").encode())


def checkpoints_of(run: Path) -> Path:
    """Returns the folder of a run's checkpoints.

    Raises:
        ValueError: folders.json is damaged.
    """
    return _noted_folder(run, CHECKPOINTS)


def events_of(run: Path) -> Path:
    """Returns the folder of a run's TensorBoard events.

    Raises:
        ValueError: folders.json is damaged.
    """
    return _noted_folder(run, EVENTS)


def _noted_folder(run: Path, setting: str) -> Path:
    """Returns the folder that a setting named when the run last started.

    Args:
        run: The run's folder.
        setting: CHECKPOINTS or EVENTS.
    """
    path = run / NOTE
    folders = DEFAULTS
    try:
        if path.is_file():
            folders = json.loads(path.read_text())
        return run / folders[setting]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is damaged ({e}). Remove it: the run's next start writes it anew."
        ) from e
