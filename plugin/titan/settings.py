"""Reads the job configuration from a TOML file and flags, and refuses settings that this plugin cannot honour."""

import difflib
import functools
import operator
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from torch._dynamo.backends.registry import list_backends

from .host import torchtitan_default
from .schema import UNUSED, Bound, JobConfig

# setting -> its annotated type
KINDS: dict[str, Any] = {
    f"{section}.{name}": kind
    for section, table in get_type_hints(JobConfig).items()
    for name, kind in get_type_hints(table, include_extras=True).items()
}
# Pairs that say the same in two units. A value on the command line replaces the file's in either; a default says nothing.
COUNTERPARTS = (
    ("training.steps", "training.tokens"),
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_tokens"),
)
# Old files name these for TorchTitan's own entry point. They change nothing.
IGNORED = ("job.custom_config_module", "experimental.custom_import")
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")  # of a checkpoint, beside the model


def read_job_config(arguments: list[str]) -> JobConfig:
    """The job configuration from command-line arguments: a TOML file (--job.config_file F), and flags over what it says.

    Raises: ValueError for a file that is no TOML or has a value that cannot be, or a key or flag that does not exist;
        FileNotFoundError; SystemExit for --help, and after saying why, for a flag's value of another type.
    """
    base, given, unused, rest = JobConfig(), set(), {}, []
    left = list(arguments)
    while left:
        flag, equals, value = (argument := left.pop(0)).partition("=")
        if not flag.startswith("--") or flag == "--help":
            rest.append(argument)
            continue
        setting = _setting_of(flag)
        given.add(setting)
        if setting == "job.config_file":
            for key, read in _pairs(_read(value if equals else left[0])):
                if key in KINDS:
                    _set(base, key, read)
                elif _instead(key):
                    unused[key] = read
                else:
                    raise ValueError(_unknown(key))
            _refuse_values(base)
        if setting in KINDS:
            rest.append(argument)
        elif equals or not left or left[0].startswith("--"):
            unused[setting] = value or str(not re.search(r"\.no[-_]", flag))
        else:
            unused[setting] = left.pop(0)
    job = tyro.cli(
        JobConfig,
        args=rest,
        default=base,
        prog="./launch.sh FILE.toml",
        description="Settings of a run: keys of the sections of FILE.toml; a flag wins over the file.",
    )
    job.given, job.unused = frozenset(given), unused
    for setting in (setting for setting, kind in KINDS.items() if kind == list[str]):  # on the command line with commas
        _set(job, setting, [name for names in value_of(job, setting) for name in names.split(",")])
    for pair in COUNTERPARTS:
        for one, other in (pair, pair[::-1]):
            if one in given and other not in given and value_of(job, one) != value_of(JobConfig(), one):
                _set(job, other, value_of(JobConfig(), other))
    return job


def _read(file: str) -> dict[str, Any]:
    try:
        with open(file, "rb") as f:
            return tomllib.load(f)
    except tomllib.TOMLDecodeError as e:
        raise ValueError(
            f"{file} is not valid TOML: {e}. Correct that place: strings in quotes, true and false in lower case, one "
            "`key = value` to a line, as in train_configs/debug.toml."
        ) from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not valid TOML: it is not text in UTF-8 ({e}).") from e


def _pairs(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(setting, value) of everything in a TOML table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _pairs(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _setting_of(flag: str) -> str:
    """The setting that a flag means: --training.max-norm, --validation.no-enable."""
    name = flag[2:].replace("-", "_")
    setting = name if name in KINDS else name.replace(".no_", ".", 1)
    if setting not in KINDS and not _instead(setting):
        raise ValueError(_unknown(name, "--"))
    return setting


def _instead(setting: str) -> str | None:
    """What to do instead of a setting of TorchTitan's that is not read here."""
    return next((words for pattern, words in UNUSED.items() if re.match(pattern, setting)), None)


def _unknown(setting: str, prefix: str = "") -> str:
    name = setting.rpartition(".")[2]
    near = difflib.get_close_matches(setting, KINDS, n=3, cutoff=0.7)
    near += [known for known in KINDS if known.rpartition(".")[2] == name and known not in near]
    hint = f" Near to it: {', '.join(prefix + one for one in near)}." if near else ""
    return f"there is no setting {prefix}{setting}.{hint} ./launch.sh --flags lists all that there are."


def value_of(job_config: Any, setting: str) -> Any:
    for name in setting.split("."):
        job_config = getattr(job_config, name)
    return job_config


def _set(job_config: JobConfig, setting: str, value: Any) -> None:
    section, name = setting.split(".")
    setattr(getattr(job_config, section), name, value)


def refuse_unsupported(job_config: JobConfig) -> None:
    """Raises: ValueError with the setting, what was got, and what is allowed."""
    _refuse_values(job_config)
    for setting, value in job_config.unused.items():
        if setting not in IGNORED and str(value) != str(torchtitan_default(setting)):
            raise ValueError(
                f"{setting} = {value} is not used by this plugin. {_instead(setting)}, and leave {setting} out."
            )
    _refuse_checkpointing(job_config.checkpoint)
    _refuse_recomputation(job_config)
    _refuse_other("compile.components", job_config.compile.components, ("model", "loss"))
    backend = job_config.compile.backend
    if job_config.compile.enable and backend not in list_backends(exclude_tags=()):
        raise ValueError(f"compile.backend = {backend!r} is unknown; allowed: {', '.join(list_backends())}.")
    profiling = job_config.profiling
    least = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < least:
        raise ValueError(
            f"profiling.profile_freq = {profiling.profile_freq} must be at least profiling.profiler_warmup + "
            f"profiling.profiler_active = {least}."
        )
    if job_config.metrics.enable_wandb and not find_spec("wandb"):  # TorchTitan would train on without curves
        raise ValueError("metrics.enable_wandb needs wandb, not installed here: pip install wandb, or leave it out.")


def _refuse_values(job_config: JobConfig) -> None:
    """What each setting's annotation says: the one loop over all settings."""
    for setting, kind in KINDS.items():
        value, (plain, bound) = value_of(job_config, setting), _parts(kind)
        if get_origin(plain) is Literal:
            if value not in get_args(plain):
                allowed = ", ".join(map(str, get_args(plain)))
                raise ValueError(f"{setting} = {value!r} is unknown; allowed: {allowed}.")
        elif not _fits(value, plain):
            words = plain.__name__ if type(plain) is type else plain
            raise ValueError(f"{setting} must be {words}: got {value!r}.")
        if value is not None and bound and not bound.allows(value):
            raise ValueError(f"{setting} must be {bound.words}: got {value}.")


def _parts(kind: Any) -> tuple[Any, Bound | None]:
    """(the type without its annotation, the annotation) of a setting's type; of `Count | None`, too."""
    if get_origin(kind) is Annotated:
        return kind.__origin__, kind.__metadata__[0]
    if get_origin(kind) in (Union, UnionType):
        plain, bounds = zip(*map(_parts, get_args(kind)), strict=True)
        return functools.reduce(operator.or_, plain), next(filter(None, bounds), None)
    return kind, None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type. A bool is an int to Python, but `steps = true` is no number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, *arguments) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _refuse_other(setting: str, values: list[str], allowed: tuple[str, ...]) -> None:
    unknown = [value for value in values if value not in allowed]
    if unknown:
        raise ValueError(f"{setting} = {unknown} is unknown; allowed: {', '.join(allowed)}.")


def _refuse_checkpointing(checkpoint: Any) -> None:
    _refuse_other("checkpoint.exclude_from_loading", checkpoint.exclude_from_loading, PARTS)
    if checkpoint.exclude_from_loading and (not checkpoint.initial_load_path or checkpoint.initial_load_model_only):
        raise ValueError(
            "checkpoint.exclude_from_loading leaves parts out of another run's checkpoint: begin a run in a folder of its own, "
            "with checkpoint.initial_load_path and --checkpoint.no-initial_load_model_only."
        )
    for name in ("initial_load_path", "load_step"):
        value = getattr(checkpoint, name)
        if value not in (None, -1) and not checkpoint.enable:  # TorchTitan would pass over it
            raise ValueError(
                f"checkpoint.{name} = {value!r} does nothing where checkpoint.enable is off: nothing is loaded and nothing "
                f"saved. Turn it on (--checkpoint.enable), or leave checkpoint.{name} out."
            )


def _refuse_recomputation(job_config: JobConfig) -> None:
    ac, compiled = job_config.activation_checkpoint, job_config.compile
    option = ac.selective_ac_option
    if ac.mode == "selective" and option != "op" and (not option.isdigit() or int(option) < 1):
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {option!r} is unknown; allowed: 'op' (saves matrix "
            "products and the scan's output) or a number n (checkpoint every n-th block)."
        )
    if ac.mode == "selective" and option == "op" and ac.debug:
        raise ValueError(
            "activation_checkpoint.debug cannot trace checkpointing by operation: turn it off, or choose another mode or "
            "selective_ac_option."
        )
    if ac.mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' is a setting of the compiler: add compile.enable = true, or "
            "choose none, selective or full."
        )
