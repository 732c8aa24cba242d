"""The definition of a study: a TOML file of sizes, conditions, settings, rates and seeds; the runs that it names; the record
kept of each. docs/study.md describes the file and the records.
"""

import itertools
import json
import math
import re
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from interdomain.files.distributed_checkpoint import DOCUMENTS, finished_steps
from interdomain.files.distributed_checkpoint import VALIDATION as RESULT
from interdomain.files.run_folder import CHECKPOINTS, checkpoints_of, events_of
from interdomain.files.run_folder import EVENTS as EVENTS_FOLDER
from interdomain.folders import expand_path, write_whole
from interdomain.model import count_parameters, meta_model
from interdomain.titan.plan.run_plan import RunPlan, make_plan, model_config
from interdomain.titan.settings.job_config import IN_TOKENS, job_config_of, pairs, read_toml, reads_n_basis
from interdomain.tools._curves import EVENTS, curves_of, events_folder, facts_of, read_events

AXES = ("sizes", "conditions", "settings", "rates")
BEST = "best"  # in the place of a rate: the one at which the condition's finished runs have the lowest loss
TOP = ("config", "output", "results", "ranks", "all", *AXES, "corpora", "runs")
VALIDATION = "validation_metrics/loss"
# Tags of a record.
KEPT = re.compile(r"validation_(metrics/(loss|accuracy)|position/.*)$|loss_metrics/global_avg_loss$|n_tokens_seen$")
CONFIG = "run.toml"  # in a run's folder: its settings, as ./launch.sh reads them


@dataclass(frozen=True)
class StudyRun:
    """One run of a study. labels: its size, condition, setting and rate, by axis; settings: the sections of its TOML file."""

    labels: dict[str, str]
    seed: int
    name: str
    settings: dict[str, Any]
    record: Path
    ranks: int | None

    @property
    def folder(self) -> Path:
        return Path(self.settings["job"]["dump_folder"])

    @cached_property
    def plan(self) -> RunPlan:
        """Raises: ValueError for settings that no run can have, with the run's name."""
        try:
            job = job_config_of(self.settings)
            if not (job.validation.enable and job.checkpoint.enable and job.metrics.enable_tensorboard):
                needed = "validation.enable, checkpoint.enable and metrics.enable_tensorboard"
                raise ValueError(f"a study compares validation losses and continues its runs: set {needed} to true.")
            return make_plan(job, self.ranks or 1, on_gpus=True)
        except ValueError as e:
            raise ValueError(f"{self.name}: {e}") from e

    @cached_property
    def is_finished(self) -> bool:
        """True if the run's record is there; one is written if the run has come to its end.

        Raises: ValueError if the run was finished, or begun, with other settings.
        """
        if self.record.is_file():
            self._refuse_changes(self.record, read_record(self.record)["settings"])
            return True
        logged = record_of(self.folder) if any(events_of(self.folder).glob(EVENTS)) else {"curves": {}}
        ended = str(self.plan.steps) in logged["curves"].get(VALIDATION, {})
        config = self.folder / CONFIG
        if (ended or self.step) and config.is_file():
            self._refuse_changes(config, read_toml(config))
        if ended:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            record = {"run": self.labels | {"seed": self.seed}, "settings": self.settings, **logged}
            by_document = checkpoints_of(self.folder) / f"step-{self.plan.steps}" / DOCUMENTS
            if by_document.is_file():
                record["documents"] = read_json(by_document, "nats", "labels")
            write_whole(self.record, dumped(record))
        return ended

    def _refuse_changes(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises: ValueError if the settings in a file of this run are not those of the study."""
        there, here = dict(pairs(settings)), dict(pairs(self.settings))
        free = ("job.", "experimental.")  # folders; TorchTitan's own entry
        names = [name for name in there | here if not name.startswith(free) and there.get(name) != here.get(name)]
        if changed := [f"{name} {there.get(name)} there, {here.get(name)} here" for name in names]:
            raise ValueError(
                f"{path} was made with other settings: {'; '.join(changed)}. Restore them, or remove {self.folder} (and "
                f"{self.record}, if it exists) to train the run again, or give the study another output and results."
            )

    @property
    def step(self) -> int:
        """The last step that a checkpoint is of; 0: none."""
        return max(finished_steps(checkpoints_of(self.folder)), default=0)

    def write_config(self) -> Path:
        """The run's file, for a start. Without its curve the last validation's result is worth nothing: it is made again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (checkpoints_of(self.folder) / f"step-{self.plan.steps}" / RESULT).unlink(missing_ok=True)
        path = self.folder / CONFIG
        write_whole(path, toml(self.settings).encode())
        return path


@dataclass(frozen=True)
class Study:
    """corpora: {folder: options of prepare-data that make it}; waiting: runs at the best rate, which is not known yet."""

    name: str
    runs: list[StudyRun]
    corpora: dict[str, str]
    waiting: int

    def missing(self) -> list[StudyRun]:
        return [run for run in self.runs if not run.is_finished]


def read_study(path: Path) -> Study:
    """The runs of a study's file, seed by seed. Raises: ValueError for a file that describes none, FileNotFoundError."""
    table = read_toml(path)
    if unknown := [key for key in table if key not in TOP]:
        raise ValueError(f"{path}: there is no {', '.join(unknown)} in a study; allowed: {', '.join(TOP)}.")
    for axis in ("sizes", "conditions"):
        if not table.get(axis):
            raise ValueError(f"{path} names no {axis}: add a table [{axis}.NAME] with that one's settings.")
    corpora = table.get("corpora", {})
    if not isinstance(corpora, dict) or not all(isinstance(options, str) for options in corpora.values()):
        raise ValueError(
            f'{path}: corpora must be a table of folders with options of prepare-data, as "data/mqar" = "--synthetic mqar": '
            f"got {corpora!r}."
        )
    corpora = {expand_path(folder): options for folder, options in corpora.items()}
    output = Path(expand_path(table.get("output", f"outputs/studies/{path.stem}")))
    results = Path(expand_path(table.get("results", str(output / "records"))))
    runs: dict[str, StudyRun] = {}
    waiting = 0
    for grid in _grids(path, table):
        names = [_named(path, table, grid, axis) for axis in AXES]
        seeds, earlier = grid.get("seeds", [42]), list(runs.values())
        for seed, *labels in itertools.product(seeds, *names):
            named = {axis: label for axis, label in zip(AXES, labels, strict=True) if label is not None}
            if named.get("rates") == BEST:
                rate = _best_rate(earlier, named)
                if rate is None:
                    waiting += 1
                    continue
                named["rates"] = rate
            file_names = [re.sub(r"[^\w.=+-]+", "-", label).strip("-") for label in named.values()]
            name = "/".join([*file_names, f"seed-{seed}"])
            try:
                settings = _settings(table, named)
            except ValueError as e:
                raise ValueError(f"{name}: {e}") from e
            settings.setdefault("debug", {})["seed"] = seed
            settings.setdefault("job", {}).update(dump_folder=str(output / name), description=f"{path.stem}: {name}")
            labels = {axis.removesuffix("s"): label for axis, label in named.items()}
            runs[name] = StudyRun(labels, seed, name, settings, results / f"{name}.json", table.get("ranks"))
    _check_folders(list(runs.values()))
    return Study(path.stem, sorted(runs.values(), key=lambda run: run.seed), corpora, waiting)


def _check_folders(runs: list[StudyRun]) -> None:
    """Raises: ValueError if two runs would write their checkpoints, or their TensorBoard events, into one folder."""
    owners: dict[Path, StudyRun] = {}
    for run in runs:
        for setting in (CHECKPOINTS, EVENTS_FOLDER):
            section, name = setting.split(".")
            folder = run.settings.get(section, {}).get(name)
            if not isinstance(folder, str):
                continue
            place = (run.folder / expand_path(folder)).resolve()
            owner = owners.setdefault(place, run)
            if owner is not run:
                raise ValueError(
                    f"{setting} = {folder}: {owner.name} and {run.name} would both write into {place}. Give a name within "
                    "each run's folder, or leave it out; output says where all runs of a study lie."
                )


def _best_rate(runs: list[StudyRun], named: dict[str, str]) -> str | None:
    """The rate at which the runs with these labels have the lowest validation loss; None if one of them has no record yet."""
    labels = {axis.removesuffix("s"): label for axis, label in named.items() if axis != "rates"}
    losses: dict[str, float] = {}
    for run in (run for run in runs if labels.items() <= run.labels.items()):
        if not run.is_finished:
            return None
        curve = read_record(run.record)["curves"][VALIDATION]
        losses[run.labels["rate"]] = min(*curve.values(), losses.get(run.labels["rate"], math.inf))
    return min(losses, key=lambda rate: losses[rate], default=None)


def _grids(path: Path, table: dict) -> list[dict[str, list]]:
    """The tables [[runs]], each with lists that are not empty; without any, one that names nothing and means all."""
    grids = table.get("runs", [{}])
    if unknown := [key for grid in grids for key in grid if key not in (*AXES, "seeds")]:
        raise ValueError(f"{path}: [[runs]] has no {', '.join(unknown)}; allowed: {', '.join(AXES)}, seeds.")
    for key, value in [("runs", grids), *(item for grid in grids for item in grid.items())]:
        if not isinstance(value, list) or not value:
            raise ValueError(
                f"{path}: {key} = {value!r} names no run. Give a list with at least one entry, or leave {key} out: then "
                f"{'the seed is 42' if key == 'seeds' else f'all {key} are meant'}."
            )
    return grids


def _named(path: Path, table: dict, grid: dict, axis: str) -> list:
    there = table.get(axis, {})
    names = grid.get(axis, list(there) or [None])
    known = [None, *there, *[BEST] * (axis == "rates")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{path}: [[runs]] names {axis} {', '.join(unknown)}; the file has {', '.join(there)}.")
    return names


def _settings(table: dict, named: dict[str, str]) -> dict[str, Any]:
    """The sections of a run's file: each table's over those before it."""
    settings: dict[str, Any] = {}
    per_parameter = None
    layers = [table.get("all", {}), *(table[axis][name] for axis, name in named.items())]
    for layer in [{"config": table.get("config")}, *map(dict, layers)]:
        if file := layer.pop("config", None):
            _put(settings, read_toml(file))
        per_parameter = layer.pop("tokens_per_parameter", per_parameter)
        _put(settings, layer)
    mixer = settings.get("mixer", {})
    if "mixer.n_basis" not in dict(pairs(table["conditions"][named["conditions"]])) and not reads_n_basis(mixer):
        mixer.pop("n_basis", None)  # of all conditions; these layers do not read it
    if per_parameter is not None:
        parameters = count_parameters(meta_model(model_config(job_config_of(settings))))
        settings.setdefault("training", {})["tokens"] = round(per_parameter * parameters)
    return settings


def _put(settings: dict[str, Any], layer: dict[str, Any]) -> None:
    """Put a table's settings over others. Steps replace tokens that an earlier table said, as on the command line."""
    layer_settings = dict(pairs(layer))
    for name, value in layer_settings.items():
        section, _, key = name.partition(".")
        if not key:
            raise ValueError(f"{name} = {value!r} is no setting: write section.name, as training.tokens.")
        settings.setdefault(section, {})[key] = deepcopy(value)
    for steps, tokens in IN_TOKENS.items():
        if steps in layer_settings and tokens not in layer_settings:
            section, key = tokens.split(".")
            settings[section].pop(key, None)


def toml(settings: dict[str, Any]) -> str:
    """A TOML file of sections with strings, numbers, switches and lists, which TOML writes as JSON does."""
    lines = []
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in values.items()), ""]
    return "\n".join(lines)


def read_record(path: Path) -> dict[str, Any]:
    """A study's record of a run. Raises: ValueError."""
    return read_json(path, "run", "settings", "facts", "configuration", "environment", "curves")


def read_json(path: Path, *names: str) -> dict[str, Any]:
    """A file of a run with tables or lists of these names. Raises: ValueError."""
    try:
        record = json.loads(path.read_text())
        if missing := [name for name in names if not isinstance(record[name], dict | list)]:
            raise ValueError(f"{', '.join(missing)} must be tables or lists")
    except (ValueError, KeyError, TypeError) as e:
        why = f"it lacks {e}" if isinstance(e, KeyError) else e
        raise ValueError(f"{path} is damaged ({why}). Remove it, and run the study again.") from e
    return record


def record_of(folder: Path) -> dict[str, Any]:
    """The record of a run from its TensorBoard events: facts, configuration, environment, and curves of `KEPT` by step.

    Raises: FileNotFoundError, ValueError for a folder that holds no run of the plugin.
    """
    events = read_events(events_folder(folder))
    curves, facts = curves_of(events), facts_of(events, "hyperparameters")
    if not facts or "n_tokens_seen" not in curves:
        raise ValueError(f"{folder} holds no run of this project: its TensorBoard events have no record of the model.")
    record = {"facts": facts} | {name: facts_of(events, name) for name in ("configuration", "environment")}
    kept = [tag for tag in sorted(curves) if KEPT.match(tag)]
    return record | {"curves": {tag: {str(step): x for step, x in curves[tag].items()} for tag in kept}}


def dumped(record: dict[str, Any]) -> bytes:
    """A record as JSON, a fact or curve to a line; figures in seven digits, as float32 has them."""
    facts = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in record.items() if k != "curves"]
    lines = []
    for tag, curve in record["curves"].items():
        rounded = {step: float(f"{x:.7g}") for step, x in curve.items()}
        lines.append(f"  {json.dumps(tag)}: {json.dumps(rounded)}")
    return "\n".join(["{", ",\n".join(facts) + ",", ' "curves": {', ",\n".join(lines), " }", "}", ""]).encode()
