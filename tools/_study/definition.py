"""The definition of a study: a TOML file of sizes, conditions, settings, rates and seeds; the runs that it names; the record
kept of each. docs/study.md describes the file and the records.
"""

import itertools
import json
import re
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from interdomain.checkpoint.run_folder import CHECKPOINTS, checkpoints_of, events_of
from interdomain.checkpoint.run_folder import EVENTS as EVENTS_FOLDER
from interdomain.checkpoint.step_folder import DOCUMENTS, finished_steps
from interdomain.checkpoint.step_folder import VALIDATION as RESULT
from interdomain.folders import expand_path, write_whole
from interdomain.removed import removal_of
from interdomain.titan.plan.run_plan import RunPlan, make_plan
from interdomain.titan.settings.job_config import job_config_of, pairs, read_toml
from interdomain.titan.settings.rules import reads_n_basis
from interdomain.titan.settings.schema import IN_TOKENS
from interdomain.tools._curves import EVENTS, curves_of, events_folder, facts_of, read_events

AXES = ("sizes", "conditions", "settings", "rates")
BEST = "best"  # in the place of a rate: the one at which the condition's finished runs have the lowest loss
TOP = ("config", "output", "results", "ranks", "all", *AXES, "corpora", "runs")
VALIDATION = "validation_metrics/loss"
# Tags of a record.
KEPT = re.compile(
    r"validation_(metrics/(loss|accuracy)|position/.*)$|loss_metrics/global_avg_loss$|n_tokens_seen$"
)
IN_RUN = (CHECKPOINTS, EVENTS_FOLDER)  # settings that name folders within a run's
CONFIG = "run.toml"  # in a run's folder: its settings, as ./launch.sh reads them

Table = dict[str, Any]


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        labels: Its size, condition, setting and rate.
        settings: The sections of its TOML file.
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
        """Raises: ValueError for settings that no run of a study can have, with the run's name."""
        try:
            job = job_config_of(self.settings)
            if not (
                job.validation.enable and job.checkpoint.enable and job.metrics.enable_tensorboard
            ):
                needed = "validation.enable, checkpoint.enable and metrics.enable_tensorboard"
                raise ValueError(
                    f"a study compares validation losses and continues its runs: set {needed} to true."
                )
            return make_plan(job, self.ranks or 1, on_gpus=True)
        except ValueError as e:
            raise ValueError(f"{self.name}: {e}") from e

    @cached_property
    def is_finished(self) -> bool:
        """True if the run's record is there. One is written if the run has come to its end.

        Raises:
            ValueError: The run was finished, or begun, with other settings.
        """
        if self.record.is_file():
            self._check_settings(self.record, read_record(self.record)["settings"])
            return True
        ended = False
        logged = {}
        if any(events_of(self.folder).glob(EVENTS)):
            logged = record_of(self.folder)
            ended = str(self.plan.steps) in logged["curves"].get(VALIDATION, {})
        config = self.folder / CONFIG
        if (ended or self.step) and config.is_file():
            self._check_settings(config, read_toml(config))
        if ended:
            record = {"run": self.labels | {"seed": self.seed}, "settings": self.settings, **logged}
            by_document = self._last_checkpoint / DOCUMENTS
            if by_document.is_file():
                record["documents"] = read_json(by_document, "nats", "labels")
            self.record.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.record, dumped(record))
        return ended

    def _check_settings(self, path: Path, settings: Table) -> None:
        """Raises: ValueError if the settings in a file of this run are not those of the study."""
        there = dict(pairs(settings))
        here = dict(pairs(self.settings))
        changed = []
        for name in there | here:
            free = name.startswith(("job.", "experimental."))  # folders; TorchTitan's own entry
            if not free and there.get(name) != here.get(name):
                changed.append(f"{name} {there.get(name)} there, {here.get(name)} here")
        if changed:
            raise ValueError(
                f"{path} was made with other settings: {'; '.join(changed)}. Restore them, or remove {self.folder} (and "
                f"{self.record}, if it exists) to train the run again, or give the study another output and results."
            )

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        return max(finished_steps(checkpoints_of(self.folder)), default=0)

    @property
    def _last_checkpoint(self) -> Path:
        return checkpoints_of(self.folder) / f"step-{self.plan.steps}"

    def write_config(self) -> Path:
        """Writes the run's file, for a start. If the run's curve is lost, its last validation is made again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self._last_checkpoint / RESULT).unlink(missing_ok=True)
        path = self.folder / CONFIG
        write_whole(path, toml(self.settings).encode())
        return path


@dataclass(frozen=True)
class Study:
    """A study as its file describes it.

    Attributes:
        corpora: {folder: options of prepare-data that make it}.
        waiting: The number of runs at a best rate that is not known yet.
    """

    name: str
    runs: list[StudyRun]
    corpora: dict[str, str]
    waiting: int

    def missing(self) -> list[StudyRun]:
        return [run for run in self.runs if not run.is_finished]


def read_study(path: Path) -> Study:
    """Reads a study's file. Its runs are in the order of their seeds.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file describes no study.
    """
    table = read_toml(path)
    grids = table.get("runs", [{}])  # without [[runs]] all combinations are meant
    _check(path, table, grids)
    corpora = {expand_path(folder): options for folder, options in table.get("corpora", {}).items()}
    output = Path(expand_path(table.get("output", f"outputs/studies/{path.stem}")))
    results = Path(expand_path(table.get("results", str(output / "records"))))

    runs: dict[str, StudyRun] = {}
    waiting = 0
    for grid in grids:
        # An axis that the file does not have is None.
        names = [grid.get(axis, [*table.get(axis, {})] or [None]) for axis in AXES]
        earlier = list(runs.values())
        for seed, *labels in itertools.product(grid.get("seeds", [42]), *names):
            chosen = {
                axis: label for axis, label in zip(AXES, labels, strict=True) if label is not None
            }
            if chosen.get("rates") == BEST:
                rate = _best_rate(earlier, chosen)
                if rate is None:
                    waiting += 1
                    continue
                chosen["rates"] = rate
            file_names = [re.sub(r"[^\w.=+-]+", "-", label).strip("-") for label in chosen.values()]
            name = "/".join([*file_names, f"seed-{seed}"])
            try:
                settings = _settings(table, chosen)
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from e
            settings.setdefault("debug", {})["seed"] = seed
            settings.setdefault("job", {}).update(
                dump_folder=str(output / name), description=f"{path.stem}: {name}"
            )
            labels_by_axis = {axis.removesuffix("s"): label for axis, label in chosen.items()}
            record = results / f"{name}.json"
            runs[name] = StudyRun(labels_by_axis, seed, name, settings, record, table.get("ranks"))
    return Study(path.stem, sorted(runs.values(), key=lambda run: run.seed), corpora, waiting)


def _check(path: Path, table: Table, grids: Any) -> None:
    """Raises: ValueError for names that a study does not have, and for lists that name no run."""
    problems = []
    for key in table:
        if key not in TOP:
            problems.append(f"there is no {key} in a study; allowed: {', '.join(TOP)}")
    for axis in ("sizes", "conditions"):
        if not table.get(axis):
            problems.append(
                f"there are no {axis}: add a table [{axis}.NAME] with that one's settings"
            )
    for grid in grids:
        for key, names in grid.items():
            if key not in (*AXES, "seeds"):
                problems.append(f"[[runs]] has no {key}; allowed: {', '.join(AXES)}, seeds")
            elif not isinstance(names, list) or not names:
                problems.append(
                    f"{key} = {names!r} names no run: give a list with at least one entry, or leave it out"
                )
            elif key != "seeds":
                known = table.get(key, {})
                unknown = [
                    name for name in names if name not in known and (key, name) != ("rates", BEST)
                ]
                if unknown:
                    problems.append(
                        f"[[runs]] names {key} {', '.join(unknown)}; the file has {', '.join(known)}"
                    )
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}.")


def _best_rate(runs: list[StudyRun], chosen: dict[str, str]) -> str | None:
    """The rate at which the runs with these labels have the lowest validation loss; None if one of them has no record yet."""
    labels = {axis.removesuffix("s"): label for axis, label in chosen.items() if axis != "rates"}
    losses: list[tuple[float, str]] = []
    for run in runs:
        if labels.items() <= run.labels.items():
            if not run.is_finished:
                return None
            curve = read_record(run.record)["curves"][VALIDATION]
            losses.append((min(curve.values()), run.labels["rate"]))
    return min(losses)[1] if losses else None


def _settings(table: Table, chosen: dict[str, str]) -> Table:
    """The sections of a run's file: each table's over those before it."""
    settings: Table = {}
    layers = [{"config": table.get("config")}, table.get("all", {})]
    layers += [table[axis][name] for axis, name in chosen.items()]
    for layer in layers:
        own = dict(layer)
        if file := own.pop("config", None):
            _put(settings, read_toml(file))
        _put(settings, own)
    condition = dict(pairs(table["conditions"][chosen["conditions"]]))
    mixer = settings.get("mixer", {})
    if "mixer.n_basis" not in condition and not reads_n_basis(mixer):
        mixer.pop("n_basis", None)  # a setting of all conditions that these layers do not read
    return settings


def _put(settings: Table, layer: Table) -> None:
    """Puts a table's settings over others. Steps replace tokens that an earlier table gave, as on the command line."""
    layer_settings = dict(pairs(layer))
    for name, value in layer_settings.items():
        section, _, key = name.partition(".")
        if not key:
            no_setting = (
                f"{name} = {value!r} is no setting: write section.name, as training.tokens."
            )
            raise ValueError(removal_of(name) or no_setting)
        if name in IN_RUN and (Path(value).is_absolute() or ".." in Path(value).parts):
            raise ValueError(
                f"{name} = {value}: several runs would write into one folder. Name one within a run's."
            )
        settings.setdefault(section, {})[key] = deepcopy(value)
    for steps, tokens in IN_TOKENS.items():
        if steps in layer_settings and tokens not in layer_settings:
            section, key = tokens.split(".")
            settings[section].pop(key, None)


def toml(settings: Table) -> str:
    """A TOML file of sections with strings, numbers, switches and lists, which TOML writes as JSON does."""
    lines = []
    for section, values in settings.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


def read_record(path: Path) -> Table:
    """A study's record of a run. Raises: ValueError."""
    return read_json(path, "run", "settings", "facts", "configuration", "environment", "curves")


def read_json(path: Path, *names: str) -> Table:
    """A file of a run with tables or lists of these names. Raises: ValueError."""
    try:
        record = json.loads(path.read_text())
        missing = sorted(set(names) - record.keys())
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (ValueError, AttributeError) as e:
        raise ValueError(f"{path} is damaged ({e}). Remove it, and run the study again.") from e
    return record


def record_of(folder: Path) -> Table:
    """The record of a run from its TensorBoard events: facts, configuration, environment, and curves of `KEPT` by step.

    Raises:
        FileNotFoundError: The folder has no events.
        ValueError: The folder holds no run of this project.
    """
    events = read_events(events_folder(folder))
    curves = curves_of(events)
    facts = facts_of(events, "hyperparameters")
    if not facts or "n_tokens_seen" not in curves:
        raise ValueError(
            f"{folder} holds no run of this project: its TensorBoard events have no record of the model."
        )
    kept = {}
    for tag in sorted(curves):
        if KEPT.match(tag):
            kept[tag] = {str(step): value for step, value in curves[tag].items()}
    return {
        "facts": facts,
        "configuration": facts_of(events, "configuration"),
        "environment": facts_of(events, "environment"),
        "curves": kept,
    }


def dumped(record: Table) -> bytes:
    """A record as JSON, a fact or curve to a line; figures in seven digits, as float32 has them."""
    facts = [
        f" {json.dumps(name)}: {json.dumps(fact)}"
        for name, fact in record.items()
        if name != "curves"
    ]
    curves = []
    for tag, curve in record["curves"].items():
        rounded = {step: float(f"{value:.7g}") for step, value in curve.items()}
        curves.append(f"  {json.dumps(tag)}: {json.dumps(rounded)}")
    return "\n".join(
        ["{", ",\n".join(facts) + ",", ' "curves": {', ",\n".join(curves), " }", "}", ""]
    ).encode()
