"""The folder of a run (job.dump_folder): the places of its checkpoints and its TensorBoard events.

Both places are settings, and may lead out of the run's folder. So a run writes them to
`folders.json` at each start, and the tools read them here. Without this file the defaults count:
earlier versions did not write it.
"""

import json
from pathlib import Path

from interdomain.folders import write_atomically

FOLDERS_FILE = "folders.json"
# The names of the settings that folders.json holds, and their defaults.
CHECKPOINTS_SETTING = "checkpoint.folder"
EVENTS_SETTING = "metrics.save_tb_folder"
DEFAULTS = {CHECKPOINTS_SETTING: "checkpoint", EVENTS_SETTING: "tb"}


def note_folders(run: Path, checkpoints: str, events: str) -> None:
    """Writes folders.json into a run's folder: where its checkpoints and its events are.

    Args:
        run: The run's folder.
        checkpoints: The value of the setting checkpoint.folder, relative to `run` or absolute.
        events: The value of the setting metrics.save_tb_folder, relative to `run` or absolute.
    """
    folders = {CHECKPOINTS_SETTING: checkpoints, EVENTS_SETTING: events}
    write_atomically(run / FOLDERS_FILE, (json.dumps(folders) + "\n").encode())


def checkpoints_of(run: Path) -> Path:
    """Returns the folder of a run's checkpoints.

    The run writes it to its folders.json at each start. Without that file it is the default,
    `checkpoint` in the run's folder.

    Args:
        run: The folder of the run.

    Raises:
        ValueError: folders.json is damaged.
    """
    return _noted_folder(run, CHECKPOINTS_SETTING)


def events_of(run: Path) -> Path:
    """Returns the folder of a run's TensorBoard events.

    The run writes it to its folders.json at each start. Without that file it is the default, `tb`
    in the run's folder.

    Args:
        run: The folder of the run.

    Raises:
        ValueError: folders.json is damaged.
    """
    return _noted_folder(run, EVENTS_SETTING)


def _noted_folder(run: Path, setting: str) -> Path:
    """Returns the folder that a setting named when the run last started.

    Args:
        run: The run's folder.
        setting: The name of the setting, CHECKPOINTS_SETTING or EVENTS_SETTING.

    Raises:
        ValueError: folders.json is damaged.
    """
    # Without folders.json, which earlier versions did not write, the setting has its default.
    path = run / FOLDERS_FILE
    folders = DEFAULTS
    try:
        if path.is_file():
            folders = json.loads(path.read_text())
        return run / folders[setting]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is damaged ({e}). Remove it: the run's next start writes it anew."
        ) from e
