"""Reads the settings of a run from a TOML file and flags into a frozen `JobConfig`."""

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
        arguments: A command line: `--job.config_file FILE`, and flags such as
            `--training.steps=10`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not valid TOML, or has a key that does not exist, or a value that is
            not allowed. The message has all problems.
        SystemExit: `--help`; or a flag that does not exist or has a wrong value, after an error
            message.
    """
    file_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file_parser.add_argument("--job.config_file", "--job.config-file", dest="path")
    path = file_parser.parse_known_args(arguments)[0].path
    flags = names_of(arguments)
    problems = Problems()
    for flag in sorted(flags):
        removal = removal_of(flag.replace(".no_", "."))
        if removal:
            problems.append(removal)
    problems.raise_all()

    # The file. Wrong values get their defaults, so that other problems can be found, too.
    table = {}
    if path:
        table = read_toml(path)
    values = apply_step_overrides(_values_of(table, problems), flags)
    job = _checked(JobConfig().changed(values), problems)

    # The flags on top of it.
    job = tyro.cli(
        JobConfig,
        args=arguments,
        default=job,
        prog="./launch.sh FILE.toml",
        description="Settings of a run. Each is a key in a section of FILE.toml and a flag.\n\n"
        "A flag wins over the file. The defaults shown are those of the file.",
        # The fields of JobConfig have no help texts. Without this, tyro would parse all our source
        # for them in each call.
        config=(tyro.conf.HelptextFromCommentsOff,),
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
    """Returns the configuration of a TOML file's table.

    Args:
        table: The table, as `read_toml` returns it.

    Raises:
        ValueError: A setting does not exist, or has a value that is not allowed. The message has
            all problems.
    """
    problems = Problems()
    job = _checked(JobConfig().changed(_values_of(table, problems)), problems)
    problems.raise_all()
    return job


def job_config_of_values(
    values: Mapping[str, Any], problems: Problems, base: JobConfig | None = None
) -> JobConfig:
    """Returns a configuration with other values of some settings.

    Args:
        values: The values, by setting.
        problems: Receives what is wrong with them. The default takes the place of a wrong value.
        base: The configuration to change. None: the defaults.
    """
    return _checked((base or JobConfig()).changed(values), problems)


def mixer_is_chosen(flags: set[str]) -> bool:
    """Returns whether flags choose a mixer and do not set n_basis.

    The n_basis of a file belongs to the file's mixer.

    Args:
        flags: The settings that are set on a command line.
    """
    choosing = {"mixer.condition", "mixer.layers", "mixer.state_heads"}
    return bool(flags & choosing) and "mixer.n_basis" not in flags


def names_of(flags: Iterable[str]) -> set[str]:
    """Returns the settings that are set on a command line.

    Args:
        flags: The words of a command line.
    """
    return {flag[2:].partition("=")[0].replace("-", "_") for flag in flags}


def apply_step_overrides(values: Mapping[str, Any], flags: set[str]) -> dict[str, Any]:
    """Lets a length in steps on the command line win over the file's length in tokens.

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
    """Returns the values of our settings in a TOML table.

    Other settings are ignored if they change nothing. Else they are added to `problems`.

    Args:
        table: The table of a TOML file.
        problems: Receives what is wrong.
    """
    in_file = dict(pairs(table))

    def value_in_file(setting: str) -> Any:
        return in_file.get(setting, TORCHTITAN_DEFAULTS.get(setting))

    values = {}
    for setting, value in in_file.items():
        if setting in SETTINGS:
            values[setting] = value
        elif not is_off(setting, value_in_file):
            with problems.collect():
                _check_unknown(setting, value)
    return values


def _check_unknown(setting: str, value: Any) -> None:
    """Raises a ValueError for a setting that is not ours.

    TorchTitan's settings at values that change nothing are allowed.

    Args:
        setting: Its name, such as training.dataset.
        value: Its value in the file.
    """
    default = TORCHTITAN_DEFAULTS.get(setting)
    as_ours = AS_OURS.get(setting, default)
    is_theirs = setting in TORCHTITAN_DEFAULTS
    if setting in IGNORED or (is_theirs and value in (default, as_ours)):
        return
    removal = removal_of(setting)
    if removal:
        raise ValueError(removal)
    if is_theirs:
        instead = INSTEAD.get(setting, "")
        raise ValueError(
            f"{setting} = {value} is a setting of TorchTitan that has no effect here. {instead} "
            "Leave it out."
        )
    near = difflib.get_close_matches(setting, SETTINGS, n=3, cutoff=0.7)
    hint = ""
    if near:
        hint = f" Near to it: {', '.join(near)}."
    raise ValueError(f"there is no setting {setting}.{hint} ./launch.sh --flags lists all.")


def is_off(setting: str, value: Callable[[str], Any]) -> bool:
    """Returns whether nothing reads a setting of TorchTitan's because its feature is off.

    Args:
        setting: Its name.
        value: Returns the value of a setting, by name.
    """
    features = []
    for switch, off, pattern in OFF:
        if setting != switch and re.match(pattern, setting):
            features.append(value(switch) == off)
    return setting in TORCHTITAN_DEFAULTS and any(features)


def _checked(job: JobConfig, problems: Problems) -> JobConfig:
    """Returns the configuration with paths expanded and TorchTitan's names of sizes replaced.

    A wrong value is added to `problems`, and the default takes its place, so that rules about
    several settings can be checked, too.

    Args:
        job: The configuration.
        problems: Receives what is wrong.
    """
    defaults = JobConfig()
    changed = {}
    for setting, declared in SETTINGS.items():
        value = job[setting]
        with problems.collect():
            changed[setting] = defaults[setting]
            if declared.is_path:
                value = expand_setting(setting, value)
            check_value(setting, value, declared)
            changed[setting] = value
    flavor = changed["model.flavor"]
    changed["model.flavor"] = ALIASES.get(flavor, flavor)
    return job.changed(changed)


def check_value(setting: str, value: Any, declared: Setting) -> None:
    """Checks a value against the type and the `Bound` of the schema.

    Args:
        setting: Its name, for the error.
        value: The value.
        declared: The setting in the schema.

    Raises:
        ValueError: The schema does not allow it.
    """
    removal = removal_of(f"{setting} = {value}")
    if removal:
        raise ValueError(removal)
    check_setting(setting, value, declared.kind, declared.bound)
    if declared.is_path and "://" in str(value):
        raise ValueError(
            f"{setting} = {value} is an address, and must be a path of this machine. "
            "docs/clusters.md shows how to copy checkpoints to an object store and back."
        )


def expand_setting(setting: str, value: Any) -> Any:
    """Returns a path, or a list of paths, with `~` and `$NAME` expanded.

    A string may hold several paths with commas between them, as a list is written on the command
    line.

    Args:
        setting: The name of the setting, for the error.
        value: A path, or a list of paths. Anything else is returned as it is.

    Raises:
        ValueError: An environment variable or a user does not exist.
    """
    if isinstance(value, list):
        return [expand_setting(setting, path) for path in value]
    if not isinstance(value, str):
        return value
    try:
        return ",".join(map(expand_path, value.split(",")))
    except ValueError as e:
        raise ValueError(f"{setting} = {e}") from e


def read_toml(file: str | Path) -> dict[str, Any]:
    """Returns a TOML file's table.

    The wheel brings train_configs/. A file that is not in the current folder is looked for there.

    Args:
        file: Path of the file, with `~` and `$NAME` if wanted.

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
            f"{file} is not valid TOML: {e}. Correct that place: strings in quotes, true and false in "
            "lower case, one `key = value` per line, as in train_configs/debug.toml."
        ) from e


def pairs(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields name and value of every setting in a TOML table, such as ("training.steps", 10).

    Args:
        table: The table, with a table for each section.
        prefix: Put before each name.
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from pairs(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


TORCHTITAN_DEFAULTS = dict(pairs(TORCHTITAN_SETTINGS))  # TorchTitan's own values, by setting
