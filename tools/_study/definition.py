"""The definition of a study, a TOML file, and the record of each of its runs.

The file has tables of sizes, conditions, settings, learning rates and seeds: the axes of the study.
A condition is a choice of the layers' mixers, such as softmax or interdomain. Each combination is a
run. A finished run leaves a record, a JSON file, from which the tables of the study are made.
docs/study.md describes the file and the records.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from interdomain.checkpoint.run_folder import (
    CHECKPOINTS_SETTING,
    EVENTS_SETTING,
    checkpoints_of,
    events_of,
)
from interdomain.checkpoint.step_folder import DOCUMENTS, finished_steps
from interdomain.checkpoint.step_folder import VALIDATION as RESULT
from interdomain.folders import expand_path, write_atomically
from interdomain.removed import removal_of
from interdomain.titan.plan.run_plan import RunPlan, make_plan
from interdomain.titan.settings.job_config import job_config_of, pairs, read_toml
from interdomain.titan.settings.rules import reads_n_basis
from interdomain.titan.settings.schema import IN_TOKENS
from interdomain.tools._curves import EVENTS, curves_of, events_folder, facts_of, read_events

# The axes of a study: the name of the table in its file, and the label in the record of a run.
AXES = {"sizes": "size", "conditions": "condition", "settings": "setting", "rates": "rate"}
# The keys of a study's file.
KEYS = ("config", "output", "results", "ranks", "all", *AXES, "runs")
VALIDATION = "validation_metrics/loss"  # the tag of the validation loss in TensorBoard
# The curves that a record keeps.
KEPT_TAGS = re.compile(
    r"validation_(metrics/(loss|accuracy)|position/.*)$|loss_metrics/global_avg_loss$|n_tokens_seen$"
)
CONFIG = "run.toml"  # the settings of a run, in its folder, as ./launch.sh reads them

Table = dict[str, Any]  # a table of a TOML file


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        labels: Its size, condition, setting and rate, if the study has these axes.
        seed: The seed of the run.
        name: The labels and the seed, as part of a path.
        settings: The sections of its TOML file.
        record: The file that is written when the run is finished.
        ranks: The number of processes. None: as ./launch.sh chooses.
    """

    labels: dict[str, str]
    seed: int
    name: str
    settings: Table
    record: Path
    ranks: int | None

    @property
    def folder(self) -> Path:
        return Path(self.settings["job"]["dump_folder"])

    @cached_property
    def plan(self) -> RunPlan:
        """Returns the steps, tokens and FLOPs of the run.

        Raises:
            ValueError: The settings are wrong, or a study cannot use them.
        """
        try:
            job = job_config_of(self.settings)
            for section, setting in (
                (job.validation, "enable"),
                (job.checkpoint, "enable"),
                (job.metrics, "enable_tensorboard"),
            ):
                if not getattr(section, setting):
                    raise ValueError(
                        "a study compares validation losses and continues its runs: set validation.enable, "
                        "checkpoint.enable and metrics.enable_tensorboard to true."
                    )
            return make_plan(job, self.ranks or 1, on_gpus=True)
        except ValueError as e:
            raise ValueError(f"{self.name}: {e}") from e

    @property
    def step(self) -> int:
        """Returns the step of the newest checkpoint; 0 if there is none."""
        return max(finished_steps(checkpoints_of(self.folder)), default=0)

    @property
    def is_finished(self) -> bool:
        """Returns True if the run has a record.

        A run that has come to its end without a record gets it here.

        Raises:
            ValueError: The run was finished, or begun, with other settings.
        """
        # A record is written once, and may be the only thing that is left of a run.
        if self.record.is_file():
            self._check_settings(self.record, read_record(self.record)["settings"])
            return True

        # The last step ends with a validation, whose loss is in the run's TensorBoard.
        logged = {"curves": {}}
        if any(events_of(self.folder).glob(EVENTS)):
            logged = record_of(self.folder)
        has_ended = str(self.plan.steps) in logged["curves"].get(VALIDATION, {})
        # Before the first checkpoint nothing is lost if the settings change.
        config = self.folder / CONFIG
        if (has_ended or self.step) and config.is_file():
            self._check_settings(config, read_toml(config))
        if has_ended:
            self._write_record(logged)
        return has_ended

    def _write_record(self, logged: Table) -> None:
        """Writes the record of the finished run.

        Args:
            logged: The facts and curves from `record_of`.
        """
        record = {"run": self.labels | {"seed": self.seed}, "settings": self.settings, **logged}
        # Validation splits with few documents also leave the loss of each document.
        by_document = self._last_checkpoint / DOCUMENTS
        if by_document.is_file():
            record["documents"] = json.loads(by_document.read_text())
        self.record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.record, dumped(record))

    def _check_settings(self, path: Path, settings: Table) -> None:
        """Raises ValueError if the settings in a file of this run are not those of the study.

        Args:
            path: The file, for the error's text.
            settings: The sections in the file.
        """
        in_file = dict(pairs(settings))
        in_study = dict(pairs(self.settings))
        changed = []
        for name in in_file | in_study:
            # `job` has folders and a description; `experimental` is for TorchTitan's own entry.
            is_free = name.startswith(("job.", "experimental."))
            if not is_free and in_file.get(name) != in_study.get(name):
                changed.append(f"{name} {in_file.get(name)} there, {in_study.get(name)} here")
        if changed:
            raise ValueError(
                f"{path} was made with other settings: {'; '.join(changed)}. Restore them, or remove {self.folder} (and "
                f"{self.record}, if it exists) to train the run again, or give the study another output and results."
            )

    @property
    def _last_checkpoint(self) -> Path:
        return checkpoints_of(self.folder) / f"step-{self.plan.steps}"

    def write_config(self) -> Path:
        """Writes the run's TOML file for a start, and returns its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # If the curve of a finished run was lost, the start repeats its last validation.
        (self._last_checkpoint / RESULT).unlink(missing_ok=True)
        path = self.folder / CONFIG
        write_atomically(path, toml(self.settings).encode())
        return path


@dataclass(frozen=True)
class Study:
    """A study as its file describes it.

    Attributes:
        runs: All runs, in the order of their seeds.
    """

    name: str
    runs: list[StudyRun]

    def missing(self) -> list[StudyRun]:
        return [run for run in self.runs if not run.is_finished]


def read_study(path: Path) -> Study:
    """Reads a study's file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file describes no study.
    """
    # Check the file, and expand the paths of its folders.
    table = read_toml(path)
    grids = table.get("runs", [{}])  # without [[runs]] all combinations are meant
    _check(path, table, grids)
    output = Path(expand_path(table.get("output", f"outputs/studies/{path.stem}")))
    results = Path(expand_path(table.get("results", str(output / "records"))))

    # Make the runs. A run that several tables name is one run.
    runs: dict[str, StudyRun] = {}
    for grid in grids:
        for labels, seed in _combinations(table, grid):
            name = "/".join([*map(_file_name, labels.values()), f"seed-{seed}"])
            settings = _settings(table, labels)
            # The study decides the seed and the folder of a run.
            settings.setdefault("debug", {})["seed"] = seed
            job = settings.setdefault("job", {})
            job["dump_folder"] = str(output / name)
            job["description"] = f"{path.stem}: {name}"
            runs[name] = StudyRun(
                labels={AXES[axis]: label for axis, label in labels.items()},
                seed=seed,
                name=name,
                settings=settings,
                record=results / f"{name}.json",
                ranks=table.get("ranks"),
            )
    in_order = sorted(runs.values(), key=lambda run: run.seed)
    return Study(path.stem, in_order)


def _combinations(table: Table, grid: Table) -> Iterator[tuple[dict[str, str], int]]:
    """Yields the labels and the seed of each run of a table [[runs]].

    Args:
        table: The study's file.
        grid: The table. It has the names to combine on each axis; an axis that it lacks has all its
            names.
    """
    axes = [axis for axis in AXES if table.get(axis)]
    names = [grid.get(axis, list(table[axis])) for axis in axes]
    for seed, *labels in itertools.product(grid.get("seeds", [42]), *names):
        yield dict(zip(axes, labels, strict=True)), seed


def _file_name(label: str) -> str:
    """Replaces the characters of a label that do not belong in a path."""
    return re.sub(r"[^\w.=+-]+", "-", label).strip("-")


def _check(path: Path, table: Table, grids: list[Table]) -> None:
    """Raises ValueError for names that a study does not have, and for lists that name no run.

    Args:
        path: The study's file, for the error's text.
        table: The contents of the file.
        grids: Its tables [[runs]].
    """
    problems = []
    # The keys of the file.
    for key in table:
        if key not in KEYS:
            allowed = f"there is no {key} in a study; allowed: {', '.join(KEYS)}"
            problems.append(removal_of(key) or allowed)
    for axis in ("sizes", "conditions"):
        if not table.get(axis):
            problems.append(f"there are no {axis}: add a table [{axis}.NAME] with its settings")
    # The tables [[runs]].
    for grid in grids:
        for key, names in grid.items():
            if key not in (*AXES, "seeds"):
                problems.append(f"[[runs]] has no {key}; allowed: {', '.join(AXES)}, seeds")
            elif not isinstance(names, list) or not names:
                problems.append(f"{key} = {names!r} names no run: give a list of names")
            elif key != "seeds":
                known = table.get(key, {})
                for name in names:
                    if name not in known:
                        unknown = f"[[runs]] names {key} {name}; the file has {', '.join(known)}"
                        problems.append(removal_of(name) or unknown)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}.")


def _settings(table: Table, labels: dict[str, str]) -> Table:
    """Returns the sections of a run's file.

    The tables of the study's file override each other in order.

    Args:
        table: The study's file.
        labels: The run's name on each axis of AXES, such as {"sizes": "125M"}.
    """
    settings: Table = {}
    # The shared file and [all] come first, then the tables of the labels in the order of the axes.
    layers = [{"config": table.get("config")}, table.get("all", {})]
    layers += [table[axis][name] for axis, name in labels.items()]
    for layer in layers:
        # A table may name a file, which it overrides.
        layer = dict(layer)
        file = layer.pop("config", None)
        if file:
            _override(settings, read_toml(file))
        _override(settings, layer)

    # An n_basis for all conditions is not for those whose layers do not read it.
    condition = dict(pairs(table["conditions"][labels["conditions"]]))
    mixer = settings.get("mixer", {})
    if "mixer.n_basis" not in condition and not reads_n_basis(mixer):
        mixer.pop("n_basis", None)
    return settings


def _override(settings: Table, layer: Table) -> None:
    """Changes settings to those of a table.

    Args:
        settings: Sections, changed in place.
        layer: The table, with sections of its own.
    """
    for section, values in layer.items():
        if isinstance(values, dict):
            settings.setdefault(section, {}).update(values)
        else:
            # A key outside of all sections: the plan of the run refuses it.
            settings[section] = values
    names = dict(pairs(layer))
    for name in (CHECKPOINTS_SETTING, EVENTS_SETTING):
        parts = Path(names.get(name, "")).parts
        if "/" in parts or ".." in parts:
            raise ValueError(
                f"{name} = {names[name]}: several runs would write into one folder. Name one within a run's."
            )
    # Steps replace tokens that an earlier table gave, as on the command line.
    for steps, tokens in IN_TOKENS.items():
        if steps in names and tokens not in names:
            section, key = tokens.split(".")
            settings[section].pop(key, None)


def toml(settings: Table) -> str:
    """Returns the text of a TOML file of sections.

    TOML writes strings, numbers, switches and lists as JSON does.

    Args:
        settings: The values of each section.
    """
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


def read_record(path: Path) -> Table:
    """Reads the record of a run.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is damaged ({e}). Remove it, and run the study again.") from e


def record_of(folder: Path) -> Table:
    """Makes the record of a run from its TensorBoard events.

    Args:
        folder: The folder of the run, or of its events.

    Returns:
        The facts (hyperparameters), the configuration, the environment, and the value of each kept
        tag by step.

    Raises:
        FileNotFoundError: The folder has no events.
        ValueError: The folder holds no run of this project.
    """
    # Read all restarts of the run as one.
    events = read_events(events_folder(folder))
    curves = curves_of(events)
    facts = facts_of(events, "hyperparameters")
    if not facts or "n_tokens_seen" not in curves:
        raise ValueError(
            f"{folder} holds no run of this project: its TensorBoard events have no record of the model."
        )
    # JSON has no numbers as names, so steps are text.
    kept = {}
    for tag in sorted(filter(KEPT_TAGS.match, curves)):
        kept[tag] = {str(step): value for step, value in curves[tag].items()}
    return {
        "facts": facts,
        "configuration": facts_of(events, "configuration"),
        "environment": facts_of(events, "environment"),
        "curves": kept,
    }


def dumped(record: Table) -> bytes:
    """Returns a record as JSON, with a fact or a curve on each line.

    Values have seven digits, as float32 has.
    """
    lines = []
    for name, fact in record.items():
        if name != "curves":
            lines.append(f" {json.dumps(name)}: {json.dumps(fact)}")
    curves = []
    for tag, curve in record["curves"].items():
        rounded = {step: float(f"{value:.7g}") for step, value in curve.items()}
        curves.append(f"  {json.dumps(tag)}: {json.dumps(rounded)}")
    lines.append(' "curves": {\n' + ",\n".join(curves) + "\n }")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
