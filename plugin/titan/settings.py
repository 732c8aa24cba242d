"""Reads the job configuration from a TOML file and flags, and refuses settings that this plugin cannot honour."""

import difflib
import tomllib
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from torch._dynamo import list_backends

from .field_types import Bound, OneOf, Unused
from .schema import JobConfig

NAME = "interdomain"
LIST_ALL = "./launch.sh --flags lists all that there are."

# Pairs that say the same in two units. A value on the command line replaces the file's in either; a default says nothing.
COUNTERPARTS = (
    ("training.steps", "training.tokens"),
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_tokens"),
    ("lr_scheduler.min_lr_factor", "lr_scheduler.min_lr"),
)
# Settings of [checkpoint] that ask for something where it is on, and TorchTitan passes over where it is off.
WITH_CHECKPOINTS = {
    "initial_load_path": None,
    "load_step": -1,
    "load_only": False,
    "exclude_from_loading": [],
    "create_seed_checkpoint": False,
}
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")  # of a checkpoint, beside the model

_registry = tyro.constructors.ConstructorRegistry()


@_registry.primitive_rule
def _lists_with_commas(info: tyro.constructors.PrimitiveTypeInfo):
    if info.type != list[str]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="A,B,C,...",
        instance_from_str=lambda args: args[0].split(","),
        is_instance=lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
        str_from_instance=lambda value: [",".join(value)],
    )


def read_job_config(arguments: list[str]) -> JobConfig:
    """The job configuration from command-line arguments: a TOML file (--job.config_file F), and flags over what it says.

    Raises: ValueError for a file that is no TOML or has a value that cannot be, or a key or flag that does not exist;
        FileNotFoundError; SystemExit for --help, and after saying why, for a flag's value of another type.
    """
    base, given, rest = JobConfig(), set(), []
    left = list(arguments)
    while left:
        flag, equals, value = (argument := left.pop(0)).partition("=")
        if not flag.startswith("--") or flag == "--help":
            rest.append(argument)
            continue
        setting, kind = _setting_of(flag)
        given.add(setting)
        if setting == "job.config_file":
            _fill(base, _read(value if equals else left[0]))
            _refuse_values(base)
        if unused := _mark(kind, Unused):
            if not equals:
                value = left.pop(0) if left and not left[0].startswith("--") else str(not _negated(flag))
            if value not in (str(value_of(JobConfig(), setting)), *unused.harmless):
                raise ValueError(_not_used(setting, f"{flag[2:]} = {value}", unused))
        else:
            rest.append(argument)
    job = tyro.cli(
        JobConfig,
        args=rest,
        default=base,
        registry=_registry,
        prog="./launch.sh FILE.toml",
        description="Settings of a run: keys of the sections of FILE.toml; a flag wins over the file.",
    )
    job.given = frozenset(given)
    default = JobConfig()
    for pair in COUNTERPARTS:
        for one, other in (pair, pair[::-1]):
            if one in given and other not in given and value_of(job, one) != value_of(default, one):
                section, name = other.split(".")
                setattr(getattr(job, section), name, value_of(default, other))
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


def _fill(target, values: dict[str, Any], prefix: str = "") -> None:
    """Set a dataclass's fields from a TOML table."""
    known = {f.name for f in fields(target)}
    for key, value in values.items():
        setting = prefix + key
        if key not in known:
            raise ValueError(_unknown(setting))
        inner = getattr(target, key)
        if is_dataclass(inner):
            if not isinstance(value, dict):
                raise ValueError(f"{setting} must be a section, [{setting}]: got {value!r}.")
            _fill(inner, value, f"{setting}.")
        else:
            setattr(target, key, value)


# setting -> annotated type
KINDS = {f"{section.name}.{f.name}": f.type for section in fields(JobConfig) for f in fields(section.type)}


def _setting_of(flag: str) -> tuple[str, Any]:
    """(setting, annotated type) that a flag means: --training.max-norm, --validation.no-enable."""
    given = flag[2:].replace("-", "_")
    setting = given.replace(".no_", ".", 1) if _negated(flag) else given
    table = ".".join(setting.split(".")[:2])  # --training.dataloader.num_workers is of a table that is not used
    if setting not in KINDS and table in KINDS and _mark(KINDS[table], Unused):
        setting = table
    if setting not in KINDS:
        raise ValueError(_unknown(given, "--"))
    return setting, KINDS[setting]


def _negated(flag: str) -> bool:
    setting = flag[2:].replace("-", "_")
    return setting not in KINDS and ".no_" in setting


def _unknown(setting: str, prefix: str = "") -> str:
    usable = [known for known, kind in KINDS.items() if not _mark(kind, Unused)]
    name = setting.rpartition(".")[2]
    near = difflib.get_close_matches(setting, usable, n=3, cutoff=0.7)
    near += [known for known in usable if known.rpartition(".")[2] == name and known not in near]
    hint = f" Near to it: {', '.join(prefix + one for one in near)}." if near else ""
    return f"there is no setting {prefix}{setting}.{hint} {LIST_ALL}"


def refuse_unsupported(job_config) -> None:
    """Raises: ValueError with the setting, what was got, and what is allowed."""
    _refuse_values(job_config)
    _refuse_profiling(job_config.profiling)
    _refuse_checkpointing(job_config.checkpoint)
    _refuse_recomputation(job_config)
    unknown = [name for name in job_config.compile.components if name not in ("model", "loss")]
    if unknown:
        raise ValueError(f"compile.components = {unknown} is unknown; allowed: model, loss.")
    backend = job_config.compile.backend
    if job_config.compile.enable and backend not in list_backends(exclude_tags=()):
        raise ValueError(f"compile.backend = {backend!r} is unknown; allowed: {', '.join(list_backends())}.")
    if job_config.metrics.enable_wandb and not find_spec("wandb"):  # TorchTitan would train on without curves
        raise ValueError("metrics.enable_wandb needs wandb, not installed here: pip install wandb, or leave it out.")


def value_of(job_config, setting: str):
    for name in setting.split("."):
        job_config = getattr(job_config, name)
    return job_config


def _refuse_values(job_config) -> None:
    """What each setting's annotation says: the one loop over all settings."""
    default = JobConfig()
    for setting, kind in KINDS.items():
        value, plain = value_of(job_config, setting), _plain(kind)
        if unused := _mark(kind, Unused):
            if value != value_of(default, setting) and value not in unused.harmless:
                raise ValueError(_not_used(setting, f"{setting} = {value!r}", unused))
            continue
        if get_origin(plain) is Literal:
            _refuse_other(setting, value, get_args(plain))
        elif not _fits(value, plain):
            raise ValueError(f"{setting} must be {_words(plain)}: got {value!r}.")
        if allowed := _mark(kind, OneOf):
            _refuse_other(setting, value, allowed)
        if value is not None and (bound := _mark(kind, Bound)) and not bound.allows(value):
            raise ValueError(f"{setting} must be {bound.words}: got {value}.")


def _not_used(setting: str, got: str, unused: Unused) -> str:
    return f"{got} is not used by this plugin. {unused.instead}, and leave {setting} out."


def _refuse_other(setting: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{setting} = {value!r} is unknown; allowed: {', '.join(map(str, allowed))}.")


def _mark(kind, mark: type):
    """What an annotated type, or a part of a union, carries of class `mark`."""
    if get_origin(kind) is Annotated:
        return next((one for one in kind.__metadata__ if isinstance(one, mark)), None)
    if get_origin(kind) in (Union, UnionType):
        return next((found for one in get_args(kind) if (found := _mark(one, mark))), None)
    return None


def _plain(kind):
    """A type without its annotations."""
    if get_origin(kind) is Annotated:
        return _plain(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(_plain(one) for one in get_args(kind))]  # noqa: UP007
    return kind


def _words(kind) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_words, get_args(kind)))
    return "None" if kind is type(None) else kind.__name__ if type(kind) is type else str(kind)


def _fits(value, kind) -> bool:
    """Whether a value is of a type. A bool is an int to Python, but `steps = true` is no number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, *arguments) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _refuse_profiling(profiling) -> None:
    if profiling.enable_profiling and profiling.profile_freq < profiling.profiler_warmup + profiling.profiler_active:
        raise ValueError(
            f"profiling.profile_freq = {profiling.profile_freq} must be at least profiling.profiler_warmup + "
            f"profiling.profiler_active = {profiling.profiler_warmup} + {profiling.profiler_active}."
        )


def _refuse_checkpointing(checkpoint) -> None:
    for name, unset in WITH_CHECKPOINTS.items():
        value = getattr(checkpoint, name)
        if value != unset and not checkpoint.enable:
            raise ValueError(
                f"checkpoint.{name} = {value!r} does nothing where checkpoint.enable is off: nothing is loaded and nothing "
                f"saved. Turn it on (--checkpoint.enable), or leave checkpoint.{name} out."
            )
    if checkpoint.enable and checkpoint.last_save_model_only:
        raise ValueError(
            "checkpoint.last_save_model_only = true leaves a last checkpoint that no run can continue from. Set it "
            "to false; python -m interdomain.tools.convert extracts the model from a full checkpoint."
        )
    unknown = [name for name in checkpoint.exclude_from_loading if name not in PARTS]
    if unknown:
        raise ValueError(f"checkpoint.exclude_from_loading = {unknown} is unknown; allowed: {', '.join(PARTS)}.")


def _refuse_recomputation(job_config) -> None:
    ac = job_config.activation_checkpoint
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
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if ac.mode == "memory_budget" and not compiled:
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' is a setting of the compiler: add compile.enable = true, or "
            "choose none, selective or full."
        )
