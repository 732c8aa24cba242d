"""A run's curves: read from its TensorBoard folder as one, whatever number of restarts wrote it."""

import json
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from interdomain.files.event_files import EVENTS
from interdomain.files.run_folder import events_of

HEADER_BYTES = 12  # of a record in an event file: its length (8), and a checksum of the length (4)
CHECKSUM_BYTES = 4  # behind a record's data

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
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    class Events(EventAccumulator):
        def Reload(self):
            """Read all files. TensorBoard's own passes over the rest of a file that is damaged at one place, in silence."""
            for file in sorted(folder.glob(EVENTS)):
                for record in read_records(file):
                    self._ProcessEvent(Event.FromString(record))
            return self

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every restart
    return Events(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 1}).Reload()


def read_records(file: Path) -> Iterator[bytes]:
    """The data of an event file's records.

    A damaged record is left out, with a note on stderr. A record that is cut off at the end of the file is what a run leaves
    that is killed while it writes.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    contents = file.read_bytes()
    first_damaged = None
    place = 0
    while place + HEADER_BYTES <= len(contents):
        length, checksum = struct.unpack_from("<QI", contents, place)
        if masked_crc32c(contents[place : place + 8]) != checksum:
            # Where the next record begins is not known: it is searched byte by byte.
            first_damaged = place if first_damaged is None else first_damaged
            place += 1
            continue
        begin = place + HEADER_BYTES
        end = begin + length
        if end + CHECKSUM_BYTES > len(contents):
            break
        data = contents[begin:end]
        (checksum,) = struct.unpack_from("<I", contents, end)
        if masked_crc32c(data) == checksum:
            yield data
        else:
            first_damaged = place if first_damaged is None else first_damaged
        place = end + CHECKSUM_BYTES
    if first_damaged is not None:
        note = f"note: {file} is damaged at byte {first_damaged:,}. What cannot be read there is left out."
        print(note, file=sys.stderr)


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
