"""A run's curves, read from its folder of TensorBoard events.

The files of all restarts are read as one.
"""

import json
import logging
from pathlib import Path
from typing import Any

from interdomain.checkpoint.event_files import EVENTS
from interdomain.checkpoint.run_folder import events_of

Curves = dict[str, dict[int, float]]  # {tag: {step: value}}


def events_folder(run: Path) -> Path:
    """Returns the folder with a run's events: `run` itself, or the one in which the run wrote them.

    Raises:
        FileNotFoundError: Neither folder holds events.
    """
    for folder in (run, events_of(run)):
        if any(folder.glob(EVENTS)):
            return folder
    raise FileNotFoundError(
        f"{run} holds no TensorBoard events. "
        "Give a run's folder (metrics.enable_tensorboard = true)."
    )


def read_events(folder: Path) -> Any:
    """Returns TensorBoard's accumulator over all files of a folder, with every step.

    Steps that were run again count once.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every restart
    sizes = {"scalars": 0, "tensors": 0, "histograms": 1}  # 0: all of them
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


def curves_of(events: Any) -> Curves:
    """Returns every scalar of an accumulator as {tag: {step: value}}.

    Args:
        events: An accumulator of `read_events`.
    """
    curves = {}
    for tag in events.Tags()["scalars"]:
        curves[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return curves


def read_curves(folder: Path) -> Curves:
    """Returns every scalar of a folder of TensorBoard events as {tag: {step: value}}."""
    return curves_of(read_events(folder))


def facts_of(events: Any, name: str) -> dict[str, Any]:
    """Returns facts of a run's last start.

    A run logs them as texts in JSON when it starts.

    Args:
        events: An accumulator of `read_events`.
        name: "configuration" (the settings), "hyperparameters" (such as the model's size and
            learning rate) or "environment" (versions and hardware).

    Returns:
        The facts; empty if they were not written.
    """
    tag = f"run/{name}/text_summary"
    if tag not in events.Tags()["tensors"]:
        return {}
    text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    return json.loads(text.strip("`\n"))  # fenced, because TensorBoard draws Markdown
