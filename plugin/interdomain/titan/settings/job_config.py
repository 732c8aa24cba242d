"""Reads the job configuration from a TOML file and flags, and refuses settings that this plugin cannot honour."""

import argparse
import contextlib
import difflib
import importlib.util
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

import interdomain
from interdomain.folders import expand_path
from interdomain.model.config import FIXED_STATE
from interdomain.removed import removal_of

from ..host import TORCHTITAN_SETTINGS
from .schema import ALIASES, PATH, Bound, JobConfig

# setting -> its annotated type
KINDS: dict[str, Any] = {
    f"{section}.{name}": kind
    for section, table in get_type_hints(JobConfig).items()
    for name, kind in get_type_hints(table, include_extras=True).items()
}
# Settings that are paths, or lists of paths.
PATHS = [name for name, kind in KINDS.items() if get_origin(kind) is Annotated and PATH in kind.__metadata__]
# What to set instead of a setting that files written for TorchTitan's own models have.
INSTEAD = {
    "training.dataset": "data.corpus",
    "training.dataset_path": "data.corpus",
    "training.mixed_precision_param": "training.precision",
    "validation.dataset": "data.validation_corpus",
    "validation.steps": "validation.tokens",
    "model.hf_assets_path": "data.tokenizer",
    "lr_scheduler.min_lr_factor": "lr_scheduler.min_lr",
    "parallelism.pipeline_parallel_microbatch_size": "training.local_batch_size",
}
# Old files name these for TorchTitan's own entry point. They change nothing.
IGNORED = ("job.custom_config_module", "experimental.custom_import")
# Settings of TorchTitan's alone, at the one value that this plugin's trainer has. Others have TorchTitan's default.
OF_OUR_TRAINER = {"checkpoint.last_save_model_only": False}
MILESTONES = ("keep_every", "keep_every_tokens", "keep_steps")  # settings of [checkpoint]
# These count in tokens or in steps. Tokens win in a file; steps on the command line win over a file's tokens.
IN_TOKENS = {
    "training.steps": "training.tokens",
    "lr_scheduler.warmup_steps": "lr_scheduler.warmup_tokens",
    "checkpoint.keep_every": "checkpoint.keep_every_tokens",
}


def read_job_config(arguments: list[str]) -> JobConfig:
    """The job configuration from a TOML file and flags, which win over the file.

    Args:
        arguments: of the command line: `--job.config_file FILE`, and flags such as `--training.steps=10`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no TOML, or has a key that does not exist, or a value that is not allowed.
        SystemExit: `--help`; or a flag that does not exist or has a wrong value, after saying so.
    """
    refuse(removal for name in sorted(names_of(arguments)) if (removal := removal_of(name)))
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--job.config_file", "--job.config-file", dest="path")
    path = file.parse_known_args(arguments)[0].path
    _refuse_removed_flags(arguments)
    job, problems = _read_table(read_toml(path) if path else {})
    let_steps_win(job, arguments)
    job = tyro.cli(
        JobConfig,
        args=arguments,
        default=job,
        prog="./launch.sh FILE.toml",
        description="Settings of a run. Each is a key in a section of FILE.toml and a flag.\n\n"
        "A flag wins over the file. The defaults shown are those of the file.",
        config=(tyro.conf.HelptextFromCommentsOff,),  # there are none: without this it would parse our source for them
    )
    if problems:
        with noting(problems):
            refuse_unsupported(job)
        refuse(problems)
    replace_aliases(job)
    expand_paths(job)
    drop_unread_n_basis(job, arguments)
    return job


def drop_unread_n_basis(job: JobConfig, arguments: list[str]) -> None:
    """The file's n_basis belongs to its size; a condition that a flag chooses may have none."""
    flags = names_of(arguments)
    chosen = flags & {"mixer.condition", "mixer.layers", "mixer.state_heads"}
    if chosen and "mixer.n_basis" not in flags and not reads_n_basis(vars(job.mixer)):
        set_value(job, "mixer.n_basis", None)


def reads_n_basis(mixer: Mapping[str, Any]) -> bool:
    """True if a layer of a table [mixer] reads n_basis: not softmax, and with state_heads, of the baselines mamba2 alone."""
    unread = {"softmax"} | ({*FIXED_STATE} - {"mamba2"} if mixer.get("state_heads") else set())
    return not unread.issuperset(mixer.get("layers") or [mixer.get("condition", "interdomain")])


def _refuse_removed_flags(arguments: list[str]) -> None:
    """Raises: ValueError for a flag, or a value of a flag, that an earlier version had."""
    for flag, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if not flag.startswith("--"):
            continue
        name, has_value, value = flag[2:].partition("=")
        setting = name.replace("-", "_").replace(".no_", ".")
        value = value if has_value else following
        if removal := removal_of(setting) or removal_of(f"{setting} = {value}"):
            raise ValueError(removal)


def names_of(flags: list[str]) -> set[str]:
    """The settings that are set on a command line."""
    return {flag[2:].partition("=")[0].replace("-", "_") for flag in flags}


def let_steps_win(job_config: Any, flags: list[str]) -> None:
    """Lengths in steps on the command line win over a file's in tokens."""
    named = names_of(flags)
    for steps, tokens in IN_TOKENS.items():
        if steps in named and tokens not in named:
            set_value(job_config, tokens, 0)


def job_config_of(table: dict[str, Any]) -> JobConfig:
    """The job configuration of what a TOML file says, by section. Raises: ValueError with all that is wrong."""
    job, problems = _read_table(table)
    refuse(problems)
    return job


def _read_table(table: dict[str, Any]) -> tuple[JobConfig, list[str]]:
    """The job configuration of a TOML file, with defaults in the place of what is wrong, and what that is."""
    job, problems, given = JobConfig(), [], dict(pairs(table))

    def value_in_file(setting: str) -> Any:
        return given.get(setting, TORCHTITAN_DEFAULTS.get(setting))

    for setting, value in given.items():
        if setting in KINDS:
            set_value(job, setting, value)
        elif not is_off(setting, value_in_file):
            with noting(problems):
                _refuse_unknown(setting, value)
    replace_aliases(job)
    with noting(problems):
        expand_paths(job)
    for setting, problem in wrong_values(job).items():
        problems.append(problem)
        set_value(job, setting, value_of(JobConfig(), setting))
    return job, problems


class SettingsError(ValueError):
    """Problems of a configuration, each in words of its own."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = [f"{len(problems)} problems of the settings:", *(f"  - {problem}" for problem in problems)]
        super().__init__(problems[0] if len(problems) == 1 else "\n".join(lines))


def refuse(problems: Iterable[str]) -> None:
    """Raises: SettingsError with all problems, if there are any."""
    if problems := list(dict.fromkeys(problems)):
        raise SettingsError(*problems)


@contextlib.contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """Add what a check within refuses to `problems`, so that the checks after it are made, too."""
    try:
        yield
    except SettingsError as e:
        problems += e.problems
    except ValueError as e:
        problems.append(str(e))


# Settings of a feature that is off change nothing, and TorchTitan's own files are full of them: the feature's switch, the value
# of it that means off, and TorchTitan's settings that are read only while it is on.
OFF = (
    ("model.converters", [], r"quantize\."),
    ("fault_tolerance.enable", False, r"fault_tolerance\.|checkpoint\.enable_ft_"),
    ("memory_estimation.enable", False, r"memory_estimation\."),
    ("validation.enable", False, r"validation\."),
    ("checkpoint.enable", False, r"checkpoint\."),
    ("compile.enable", False, r"compile\."),
    ("profiling.enable_profiling", False, r"profiling\.(save_traces|profile)"),
    ("activation_checkpoint.mode", "none", r"activation_checkpoint\."),
    ("parallelism.pipeline_parallel_degree", 1, r"parallelism\.(pipeline_parallel_|module_fqns)"),
    ("parallelism.context_parallel_degree", 1, r"parallelism\.context_parallel_"),
    ("parallelism.tensor_parallel_degree", 1, r"parallelism\.(disable_loss_parallel|enable_async_tensor)"),
    ("parallelism.expert_parallel_degree", 1, r"parallelism\.expert_"),
)


def is_off(setting: str, value: Callable[[str], Any]) -> bool:
    """True for a setting of TorchTitan's that nothing reads, because its feature is off. value: that of a setting."""
    if setting not in TORCHTITAN_DEFAULTS:
        return False
    return any(re.match(pattern, setting) and value(switch) == off for switch, off, pattern in OFF)


def replace_aliases(job_config: Any) -> None:
    """Replace TorchTitan's name of a size by the size."""
    job_config.model.flavor = ALIASES.get(job_config.model.flavor, job_config.model.flavor)


def expand_paths(job_config: Any, also: Sequence[str] = ()) -> None:
    """Expand `~` and `$NAME` in all settings that are paths. Raises: ValueError for a variable that is not set.

    Args:
        also: Settings of TorchTitan that are paths.
    """
    for setting in (*PATHS, *also):
        set_value(job_config, setting, _expanded(setting, value_of(job_config, setting)))


def _expanded(setting: str, value: Any) -> Any:
    """Values of other types are left for the check of types. A string may be a list: on the command line lists have commas."""
    if isinstance(value, list):
        return [_expanded(setting, path) for path in value]
    if not isinstance(value, str):
        return value
    try:
        return ",".join(map(expand_path, value.split(",")))
    except ValueError as e:
        raise ValueError(f"{setting} = {e}") from e


def read_toml(file: str | Path) -> dict[str, Any]:
    """A file's table. The wheel brings train_configs/: a file that is not here is looked for there.

    Raises: ValueError for a file that is no TOML, and as `expand_path`; FileNotFoundError.
    """
    file = expand_path(str(file))
    brought = Path(interdomain.__file__).parent / file
    try:
        with open(brought if brought.is_file() and not Path(file).exists() else file, "rb") as f:
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


def _refuse_unknown(setting: str, value: Any) -> None:
    """Raises: ValueError unless it is a setting of TorchTitan's at a value that changes nothing."""
    unchanged = OF_OUR_TRAINER | TORCHTITAN_DEFAULTS
    if setting in IGNORED or (setting in unchanged and value in (unchanged[setting], OF_OUR_TRAINER.get(setting))):
        return
    if removal := removal_of(setting):
        raise ValueError(removal)
    if setting in TORCHTITAN_DEFAULTS:
        instead = f"Set {INSTEAD[setting]} instead, and leave" if setting in INSTEAD else "Leave"
        raise ValueError(
            f"{setting} = {value} is a setting of TorchTitan that this plugin does not use. {instead} it out."
        )
    near = difflib.get_close_matches(setting, KINDS, n=3, cutoff=0.7)
    hint = f" Near to it: {', '.join(near)}." if near else ""
    raise ValueError(f"there is no setting {setting}.{hint} ./launch.sh --flags lists all.")


def value_of(job_config: Any, setting: str) -> Any:
    return operator.attrgetter(setting)(job_config)


def set_value(job_config: Any, setting: str, value: Any) -> None:
    section, _, name = setting.rpartition(".")
    setattr(value_of(job_config, section), name, value)


def refuse_wrong_values(job_config: JobConfig) -> None:
    """Check every setting by its annotation: type and `Bound`. Raises: ValueError with all that are wrong."""
    refuse(wrong_values(job_config).values())


def wrong_values(job_config: JobConfig) -> dict[str, str]:
    """The settings whose values their annotations do not allow, and the problem with each."""
    wrong = {}
    for setting, kind in KINDS.items():
        try:
            refuse_wrong_value(setting, value_of(job_config, setting), kind)
        except ValueError as e:
            wrong[setting] = str(e)
    return wrong


def refuse_wrong_value(setting: str, value: Any, kind: Any) -> None:
    """Check a value by the annotation of its setting: type and `Bound`. Raises: ValueError."""
    bound = None
    if get_origin(kind) is Annotated:
        bound = next((extra for extra in kind.__metadata__ if isinstance(extra, Bound)), None)
        kind = kind.__origin__
    if removal := removal_of(f"{setting} = {value}"):
        raise ValueError(removal)
    if not _fits(value, kind):
        words = kind.__name__ if type(kind) is type else str(kind).replace("typing.", "")
        raise ValueError(f"{setting} must be {words}: got {value!r}.")
    if bound and not bound.allows(value):
        raise ValueError(f"{setting} must be {bound.words}: got {value}.")


def _fits(value: Any, kind: Any) -> bool:
    """True if a value is of a type. A bool is an int to Python, but `steps = true` is no number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, *arguments) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def refuse_unsupported(job_config: JobConfig) -> None:
    """Raises: ValueError with every setting that is not possible, what was got, and what is allowed."""
    refuse_wrong_values(job_config)
    problems: list[str] = []
    if job_config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        problems.append(
            "metrics.enable_wandb needs the package wandb, which is not installed: pip install wandb, or leave the setting out."
        )
    optimizer = job_config.optimizer
    if optimizer.name != "Muon" and optimizer.momentum != JobConfig().optimizer.momentum:
        problems.append(
            f"optimizer.momentum = {optimizer.momentum} has no effect with {optimizer.name}, which has beta1. Set "
            "optimizer.name = Muon, or leave it out."
        )
    if optimizer.name == "Muon" and job_config.training.enable_cpu_offload:
        problems.append(
            "optimizer.name = Muon with training.enable_cpu_offload: the CPU would compute Newton-Schulz of every matrix. Turn "
            "the offload off, or set AdamW."
        )
    n_basis, checkpoint = value_of(job_config, "mixer.n_basis"), job_config.checkpoint
    if n_basis is not None and not reads_n_basis(vars(job_config.mixer)):
        problems.append(
            f"mixer.n_basis = {n_basis} is not possible: no layer reads it. It is not for softmax, and with "
            "mixer.state_heads not for gla, deltanet and gated-deltanet. Choose another condition; or leave it out."
        )
    if job_config.compile.enable and not job_config.compile.components:
        problems.append(
            "compile.enable has no effect while compile.components is empty. Set model, loss or both, or turn it off."
        )
    if checkpoint.enable and job_config.comm.mode == "fake_backend":
        problems.append(
            "checkpoint.enable is not possible with comm.mode = fake_backend: one process has not what the others would save. "
            "Set --checkpoint.no-enable."
        )
    for name in ("initial_load_path", "load_step", *MILESTONES):
        # TorchTitan would pass over it.
        if getattr(checkpoint, name) not in (None, "", 0, -1, []) and not checkpoint.enable:
            problems.append(
                f"checkpoint.{name} has no effect while checkpoint.enable is off: nothing is loaded or saved. "
                f"Turn it on (--checkpoint.enable), or leave checkpoint.{name} out."
            )
    if checkpoint.exclude_from_loading and (not checkpoint.initial_load_path or checkpoint.initial_load_model_only):
        problems.append(
            "checkpoint.exclude_from_loading is for a run that starts from another run's checkpoint. Set "
            "checkpoint.initial_load_path and --checkpoint.no-initial_load_model_only, or leave it out."
        )
    refuse(problems)
