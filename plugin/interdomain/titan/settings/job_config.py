"""Reads the settings of a run from a TOML file and flags into a `JobConfig`, which nothing changes afterwards."""

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tyro

import interdomain
from interdomain.folders import expand_path
from interdomain.model.settings import check_setting
from interdomain.removed import removal_of

from ..host import TORCHTITAN_SETTINGS
from .problems import Problems
from .rules import check_combinations, reads_n_basis
from .schema import ALIASES, AS_OURS, IGNORED, IN_TOKENS, INSTEAD, OFF, SETTINGS, JobConfig, Setting


def read_job_config(arguments: list[str]) -> JobConfig:
    """Reads a TOML file and flags. Flags win over the file.

    Args:
        arguments: A command line: `--job.config_file FILE`, and flags such as `--training.steps=10`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not valid TOML, or has a key that does not exist, or a value that is not allowed. The message
            has all problems.
        SystemExit: `--help`; or a flag that does not exist or has a wrong value, after an error message.
    """
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--job.config_file", "--job.config-file", dest="path")
    path = file.parse_known_args(arguments)[0].path
    flags = names_of(arguments)

    # Flags, and values of flags, that an earlier version had.
    problems = Problems()
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag.startswith("--"):
            name, has_value, value = flag[2:].partition("=")
            setting = name.replace("-", "_").replace(".no_", ".")
            if not has_value:
                value = following
            removal = removal_of(setting) or removal_of(f"{setting} = {value}")
            if removal:
                problems.append(removal)
    problems.raise_all()

    # The file, then the flags on top of it.
    values = _values_of(read_toml(path) if path else {}, problems)
    values = apply_step_overrides(values, flags)
    job = _checked(JobConfig().changed(values), problems)
    job = tyro.cli(
        JobConfig,
        args=arguments,
        default=job,
        prog="./launch.sh FILE.toml",
        description="Settings of a run. Each is a key in a section of FILE.toml and a flag.\n\n"
        "A flag wins over the file. The defaults shown are those of the file.",
        config=(
            tyro.conf.HelptextFromCommentsOff,
        ),  # there are none: without this it would parse our source for them
    )
    if mixer_is_chosen(flags) and not reads_n_basis(vars(job.mixer)):
        job = job.changed({"mixer.n_basis": None})
    job = _checked(job, problems)
    if problems:
        with problems.collect():
            check_combinations(job)
    problems.raise_all()
    return job


def job_config_of(table: dict[str, Any]) -> JobConfig:
    """The configuration of a TOML file's table. Raises: ValueError with all problems."""
    problems = Problems()
    job = _checked(JobConfig().changed(_values_of(table, problems)), problems)
    problems.raise_all()
    return job


def job_config_of_values(
    values: Mapping[str, Any], problems: Problems, base: JobConfig | None = None
) -> JobConfig:
    """The configuration `base` with other values of some settings.

    Args:
        values: By setting.
        problems: Gets what is wrong with them. The default takes the place of a wrong value.
        base: None: all settings as by default.
    """
    return _checked((base or JobConfig()).changed(values), problems)


def mixer_is_chosen(flags: set[str]) -> bool:
    """True if flags choose a mixer and say nothing of n_basis. That of the file belongs to the file's mixer."""
    return (
        bool(flags & {"mixer.condition", "mixer.layers", "mixer.state_heads"})
        and "mixer.n_basis" not in flags
    )


def names_of(flags: Iterable[str]) -> set[str]:
    """The settings that are set on a command line."""
    return {flag[2:].partition("=")[0].replace("-", "_") for flag in flags}


def apply_step_overrides(values: Mapping[str, Any], flags: set[str]) -> dict[str, Any]:
    """Lets a length in steps on the command line win over the file's in tokens.

    Args:
        values: The values of a file, by setting.
        flags: The settings that are set on the command line.
    """
    changed = dict(values)
    for steps, tokens in IN_TOKENS.items():
        if steps in flags and tokens not in flags:
            changed[tokens] = 0
    return changed


def _values_of(table: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """The values of our settings in a TOML table. Other settings are passed over if they change nothing, else a problem."""
    given = dict(pairs(table))

    def value_in_file(setting: str) -> Any:
        return given.get(setting, TORCHTITAN_DEFAULTS.get(setting))

    values = {}
    for setting, value in given.items():
        if setting in SETTINGS:
            values[setting] = value
        elif not is_off(setting, value_in_file):
            with problems.collect():
                _check_unknown(setting, value)
    return values


def _check_unknown(setting: str, value: Any) -> None:
    """Raises: ValueError unless it is a setting of TorchTitan's at a value that changes nothing."""
    unchanged = TORCHTITAN_DEFAULTS | AS_OURS
    if setting in IGNORED or (
        setting in unchanged and value in (unchanged[setting], TORCHTITAN_DEFAULTS.get(setting))
    ):
        return
    if removal := removal_of(setting):
        raise ValueError(removal)
    if setting in TORCHTITAN_DEFAULTS:
        instead = INSTEAD.get(setting, "")
        raise ValueError(
            f"{setting} = {value} is a setting of TorchTitan that has no effect here. {instead} Leave it out."
        )
    near = difflib.get_close_matches(setting, SETTINGS, n=3, cutoff=0.7)
    hint = f" Near to it: {', '.join(near)}." if near else ""
    raise ValueError(f"there is no setting {setting}.{hint} ./launch.sh --flags lists all.")


def is_off(setting: str, value: Callable[[str], Any]) -> bool:
    """True for a setting of TorchTitan's that nothing reads, because its feature is off.

    Args:
        value: Returns the value of a setting.
    """
    if setting not in TORCHTITAN_DEFAULTS:
        return False
    features = [
        (switch, off)
        for switch, off, pattern in OFF
        if setting != switch and re.match(pattern, setting)
    ]
    return any(value(switch) == off for switch, off in features)


def _checked(job: JobConfig, problems: Problems) -> JobConfig:
    """The configuration with paths expanded and TorchTitan's names of sizes replaced.

    What is wrong with a value by itself is added to `problems`, and the default takes its place, so that the checks of several
    settings can be made, too.
    """
    defaults = JobConfig()
    changed = {}
    for setting, declared in SETTINGS.items():
        value = job[setting]
        try:
            if declared.is_path:
                value = changed[setting] = expand_setting(setting, value)
            check_value(setting, value, declared)
        except ValueError as e:
            problems.append(str(e))
            changed[setting] = defaults[setting]
    job = job.changed(changed)
    flavor = job.model.flavor
    return job.changed({"model.flavor": ALIASES.get(flavor, flavor)})


def check_value(setting: str, value: Any, declared: Setting) -> None:
    """Raises: ValueError for a value that the schema does not allow: type, and `Bound`."""
    if removal := removal_of(f"{setting} = {value}"):
        raise ValueError(removal)
    check_setting(setting, value, declared.kind, declared.bound)
    if declared.is_path and "://" in str(value):
        raise ValueError(
            f"{setting} = {value} is an address, and must be a path of this machine. docs/clusters.md shows how to copy "
            "checkpoints to an object store and back."
        )


def expand_setting(setting: str, value: Any) -> Any:
    """A path with `~` and `$NAME` expanded. A string may be a list: on the command line lists have commas."""
    if isinstance(value, list):
        return [expand_setting(setting, path) for path in value]
    if not isinstance(value, str):
        return value
    try:
        return ",".join(map(expand_path, value.split(",")))
    except ValueError as e:
        raise ValueError(f"{setting} = {e}") from e


def read_toml(file: str | Path) -> dict[str, Any]:
    """A file's table. The wheel brings train_configs/: a file that is not in the current folder is looked for there.

    Raises:
        ValueError: The file is not valid TOML, or its path has a variable that is not set.
        FileNotFoundError: There is no such file.
    """
    path = Path(expand_path(str(file)))
    installed = Path(interdomain.__file__).parent / path
    if installed.is_file() and not path.exists():
        path = installed
    try:
        with open(path, "rb") as f:
            return tomllib.load(f)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(
            f"{file} is not valid TOML: {e}. Correct that place: strings in quotes, true and false in lower case, one "
            "`key = value` per line, as in train_configs/debug.toml."
        ) from e


def pairs(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(setting, value) of everything in a TOML table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from pairs(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


TORCHTITAN_DEFAULTS = dict(pairs(TORCHTITAN_SETTINGS))  # setting -> TorchTitan's own value
