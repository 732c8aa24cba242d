"""The folder of a run (job.dump_folder): where its checkpoints and its TensorBoard events lie.

A run notes both in `folders.json` at each start, since their names are settings and may lead out of the run's folder. The tools
take them from here. Without the file, which earlier versions do not write, they are those of the defaults.
"""

import json
from pathlib import Path

from interdomain.folders import write_whole

NOTE = "folders.json"
CHECKPOINTS = "checkpoint.folder"
EVENTS = "metrics.save_tb_folder"
DEFAULTS = {CHECKPOINTS: "checkpoint", EVENTS: "tb"}


def note_folders(run: Path, checkpoints: str, events: str) -> None:
    """Write the note into a run's folder.

    Args:
        checkpoints: The setting checkpoint.folder.
        events: The setting metrics.save_tb_folder.
    """
    folders = {CHECKPOINTS: checkpoints, EVENTS: events}
    write_whole(run / NOTE, (json.dumps(folders) + "\n").encode())


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints. Raises: ValueError for a damaged note."""
    return run / _folders_of(run)[CHECKPOINTS]


def events_of(run: Path) -> Path:
    """The folder of a run's TensorBoard events. Raises: ValueError for a damaged note."""
    return run / _folders_of(run)[EVENTS]


def _folders_of(run: Path) -> dict[str, str]:
    path = run / NOTE
    if not path.is_file():
        return DEFAULTS
    try:
        folders = json.loads(path.read_text())
        for name in DEFAULTS:
            if not isinstance(folders[name], str):
                raise TypeError(f"{name} is no text")
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is damaged ({e}). Remove it: the run's next start writes it anew."
        ) from e
    return folders
