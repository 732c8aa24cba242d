"""The way back to before a run's spikes (`--rewind`): to the last milestone before the first of them, without their data.

RUN/spikes.json   {"spikes": their steps, "leave_out": data.leave_out of the run that had them, "begins": the steps before each
                  of its data stages[, "load_step": to go back to]}

The trainer writes the file when it stops for its spikes. The launcher adds the step, once. So the same command, run again,
continues from what was saved since; until the run stops for its spikes again, which writes the file anew.
"""

import json
import math
from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch.distributed as dist

from interdomain.data import batch_of_step
from interdomain.files.distributed_checkpoint import finished_steps, milestones, read_sidecar
from interdomain.folders import write_whole

from ..errors import stop
from ..settings.schema import JobConfig
from .resume_from import left_out

SPIKES = "spikes.json"


def stop_at_spikes(job_config: Any, begins: list[int], steps: list[int]) -> None:
    """End the run once it had training.max_spikes spikes, and write down their steps. On all ranks.

    begins: steps before each data stage.
    """
    limit, file = job_config.training.max_spikes, Path(job_config.job.dump_folder) / SPIKES
    if not limit or len(steps) < limit:
        return
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, {"spikes": steps, "leave_out": job_config.data.leave_out, "begins": begins})
    stop(
        f"{len(steps)} spikes of the loss or the gradient norm were skipped, at steps {_listed(steps)} (training.max_spikes = "
        f"{limit}). To continue from the last milestone before the first of them, without the data of these steps, start the "
        "same command with --rewind behind it. To go on as it is, set a higher training.max_spikes."
    )


def rewind(job_config: JobConfig, *, dry_run: bool) -> tuple[list[str], str]:
    """(flags that make a start go back to before the spikes, the same in words). The step is chosen once, and written down
    unless this is a dry run.

    Raises: ValueError if no spikes are known, or no checkpoint is from before them.
    """
    run = Path(job_config.job.dump_folder)
    checkpoints = run / job_config.checkpoint.folder
    found = _spikes_of(run, checkpoints)
    spikes, before = found["spikes"], found["leave_out"]
    if not spikes:
        raise ValueError(
            f"--rewind: {run} has no record of spikes. Leave it out; checkpoint.load_step goes back to any step."
        )
    chosen = "load_step" in found
    if not chosen:
        kinds = milestones(checkpoints), finished_steps(checkpoints)
        earlier = [steps for kind in kinds if (steps := [step for step in kind if step < min(spikes)])]
        if not earlier:
            raise ValueError(
                f"--rewind: {checkpoints} has no complete checkpoint from before the first spike, step {min(spikes)}. Start "
                f"the run anew in another folder (--job.dump_folder), with --data.leave_out {' '.join(map(str, spikes))}."
            )
        found["load_step"] = max(earlier[0])
        if not dry_run:
            _write(run / SPIKES, found)
    leave_out = sorted({*before, *(_batch(step, before, found["begins"]) for step in spikes)})
    done = (
        "chosen by an earlier start, or from what was saved since" if chosen else "later checkpoints become .superseded"
    )
    words = f"to step {found['load_step']} ({done}), without the batches of the spikes at steps {_listed(spikes)}"
    flags = ["--checkpoint.load_step", str(found["load_step"]), "--data.leave_out", *map(str, leave_out)]
    return flags, words


def _spikes_of(run: Path, checkpoints: Path) -> dict[str, Any]:
    """The run's file, else what its latest checkpoint recorded."""
    if (run / SPIKES).is_file():
        return json.loads((run / SPIKES).read_text())
    steps = finished_steps(checkpoints)
    record = read_sidecar(steps[max(steps)])[1] if steps else {}
    begins = [stage["begins"] for stage in record.get("run", {}).get("data_stages", [{"begins": 0}])]
    return {"spikes": record.get("spike_steps", []), "leave_out": left_out(record), "begins": begins}


def _batch(step: int, before: list[int], begins: list[int]) -> int:
    """The number, as data.leave_out counts, of the batch that a step read. begins: steps before each data stage.

    Raises: ValueError for one that data.leave_out cannot name.
    """
    stage = bisect_left(begins, step) - 1
    begin, end = [*begins, math.inf][stage : stage + 2]
    batch = batch_of_step(step, [n for n in before if begin < n <= end])
    if batch > end:
        raise ValueError(
            f"--rewind: step {step} read a batch from beyond the end of its data stage, step {end}, for others were left out "
            "before, and data.leave_out cannot name it. Go back by hand: checkpoint.load_step, with a lower optimizer.lr, say."
        )
    return batch


def _write(file: Path, found: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(found) + "\n").encode())


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
