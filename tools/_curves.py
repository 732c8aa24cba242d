"""A run's curves: read from its TensorBoard folder as one, whatever number of restarts wrote it."""

import json
import logging
from pathlib import Path

from interdomain.checkpoint.event_files import EVENTS
from interdomain.checkpoint.run_folder import events_of

Curves = dict[str, dict[int, float]]  # {tag: {step: value}}


def events_folder(run: Path) -> Path:
    """The folder with a run's events: `run` itself or the one in which the run wrote them. Raises: FileNotFoundError."""
    for folder in (run, events_of(run)):
        if any(folder.glob(EVENTS)):
            return folder
    raise FileNotFoundError(
        f"{run} holds no TensorBoard events. Give a run's folder (metrics.enable_tensorboard = true)."
    )


def read_events(folder: Path):
    """TensorBoard's accumulator over all files of `folder`, nothing sampled away, steps that were run again once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every restart
    return EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 1}
    ).Reload()


def curves_of(events) -> Curves:
    """Every scalar, by step."""
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def read_curves(folder: Path) -> Curves:
    """Every scalar of a folder of events, by step."""
    return curves_of(read_events(folder))


def facts_of(events, name: str) -> dict:
    """Facts of a run's last start: its configuration, hyperparameters or environment. Empty if they were not written."""
    tag = f"run/{name}/text_summary"
    if tag not in events.Tags()["tensors"]:
        return {}
    text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    return json.loads(text.strip("`\n"))  # fenced, for TensorBoard draws Markdown
