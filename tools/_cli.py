"""Parts that the commands share: common options, and the printing of a user's mistake.

A mistake is printed as one paragraph, and the exit status is 2.
"""

import argparse
import functools
import itertools
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interdomain.folders import expand_path
from interdomain.launcher import keep_freed_memory
from interdomain.removed import removal_of

if TYPE_CHECKING:
    import torch

    from interdomain.data import Tokenizer

# Help texts of common arguments.
OUTPUT = "folder to write; it must be new or empty"
RESULTS = "folder to write; existing results are never overwritten"
DEVICE = "auto (a GPU if there is one, else the CPU), cpu, cuda or cuda:N"
# An exported model is a folder: weights, configuration, tokenizer and model code.
EXPORTED_MODEL = "exported model (a folder that interdomain convert made)"

# The end of each command's help. A wheel does not have the pages.
PAGES = "The folder docs is in the repository and in the source distribution."

# Prefixes of an input of prepare-data; the name of a data set or a folder follows.
KINDS_OF_SOURCES = ("hf:", "debian:")
# The packages of each optional dependency (`pip install 'interdomain[train]'`) that commands import
# only when they need them.
EXTRAS = {
    "train": ("torchtitan", "torchdata", "tyro", "tensorboard", "matplotlib", "triton"),
    "data": ("pyarrow", "datasets", "tokenizers", "tiktoken", "google"),
    "eval": ("lm_eval", "accelerate", "transformers"),
}


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a docstring, and adds its default to the text of an option."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        """Returns the help text of an option with its default.

        argparse calls this method of the formatter for each option.

        Args:
            action: The option.
        """
        text = action.help or ""
        # Switches, and options without a default, have none to show.
        default = action.default
        if isinstance(default, list):
            default = " ".join(map(str, default))
        has_default = default not in (None, "", argparse.SUPPRESS) and not isinstance(default, bool)
        if has_default:
            text += f" (default: {default})"
        # argparse formats the text with the % operator.
        return text.replace("%", "%%")


class Parser(argparse.ArgumentParser):
    """A parser that says what to use instead of an option that an earlier version had."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses a command line.

        Args:
            args: The words after the command's name. None takes those of the process.
            namespace: As in argparse.

        Raises:
            ValueError: An option, or the value of an option, was removed.
        """
        words = sys.argv[1:] if args is None else args
        command = self.prog.removeprefix("interdomain ")
        for word, following in itertools.pairwise([*words, ""]):
            option = word.partition("=")[0]
            removal = removal_of(f"{command} {option}")
            removal = removal or removal_of(f"{command} {option} {following}")
            if removal:
                raise ValueError(removal)
        return super().parse_args(words, namespace)


def argument_parser(doc: str | None, usage: str = "") -> Parser:
    """Makes a tool's parser.

    Args:
        doc: The docstring of its module: a line to paste, paragraphs above the options, more lines
            to paste (indented), and paragraphs below the options.
        usage: The arguments that the command needs, before [OPTIONS].
    """
    assert doc is not None
    # The parts of the docstring.
    line, _, text = doc.strip().partition("\n\n")
    above, _, below = text.partition("\n\n    ")
    name = " ".join(line.split()[:2])  # interdomain COMMAND, or python -m
    return Parser(
        name,
        usage=" ".join([name, *usage.split(), "[OPTIONS]"]),
        description=above,
        epilog=f"examples:\n    {line}\n    {below.rstrip()}\n{PAGES}",
        formatter_class=Help,
        # An option of an older version must not be taken for the beginning of another.
        allow_abbrev=False,
    )


def path_argument(text: str) -> Path:
    """Converts an argument that is a path, as `path_or_name` does."""
    return Path(path_or_name(text))


def path_or_name(text: str) -> str:
    """Converts an argument that is a path, a name or an address, whose `//` a Path would not keep.

    `~` and `$NAME` are expanded, which a shell leaves in `--output=~/x`. Prefixes such as `hf:`
    stay.

    Raises:
        argparse.ArgumentTypeError: An environment variable or a user does not exist.
    """
    # A shell's `*.txt` may find an existing file with a `$` in its name: that is no variable.
    if "$" in text and os.path.lexists(text):
        return text
    kind = ""
    for prefix in KINDS_OF_SOURCES:
        if text.startswith(prefix):
            kind = prefix
    try:
        return kind + expand_path(text.removeprefix(kind))
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def add_device(parser: argparse.ArgumentParser, text: str = DEVICE) -> None:
    """Adds --device with a help text."""
    parser.add_argument("--device", default="auto", metavar="NAME", help=text)


def add_dtype(parser: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Adds --dtype, for a tool that reads an exported model.

    Args:
        parser: The parser of the tool.
        dtypes: The names that can be chosen.
    """
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        help="data type of the weights; the recurrence's parameters stay float32 (default: as stored)",
    )


def require_at_least(args: argparse.Namespace, **minimum: int) -> None:
    """Raises ValueError for an option whose number, or a number of whose list, is too small.

    Args:
        minimum: The smallest number that each option allows. An option that is None is passed over.
    """
    for name, low in minimum.items():
        values = getattr(args, name)
        if not isinstance(values, list):
            values = [values]
        for value in values:
            if isinstance(value, int) and value < low:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {low}: got {value}.")


def choose_device(name: str) -> "torch.device":
    """Returns the device that --device names, and makes it the current one.

    On a CPU the process keeps the memory that it frees.

    Raises:
        ValueError: PyTorch does not see such a device.
    """
    import torch

    # The names that can be given here.
    names = ["cpu"]
    if torch.cuda.is_available():
        names += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name == "auto":
        name = "cuda" if len(names) > 1 else "cpu"
    if name not in names:
        raise ValueError(
            f"--device {name} cannot be used here: PyTorch sees {', '.join(names)}. Choose one of these, or auto. If this "
            "machine has a GPU, install a CUDA build of PyTorch that fits the driver."
        )
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches kernels on the current one
    if device.type == "cpu":
        keep_freed_memory()
    return device


def python_here() -> str:
    """Returns the path of this interpreter, relative to the current folder if it is inside."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return str(python)


def install_command(extra: str) -> str:
    """Returns the command that installs an extra. In a checkout it has the exact versions.

    Args:
        extra: One of EXTRAS.
    """
    source = f"'interdomain[{extra}]'"
    if Path("constraints.txt").is_file():
        source = f"-c constraints.txt -e '.[{extra}]'"
    return f"{python_here()} -m pip install {source}"


def documents_note(folder: Path | str, tokenizer: "Tokenizer") -> str | None:
    """Returns a warning about how texts begin, or None if there is nothing to warn of.

    An exported model records which tokens stood before a document in training. Without this record,
    texts begin as `prepare-data` begins them, which may be wrong.

    Args:
        folder: The exported model, for the text.
        tokenizer: Its tokenizer.
    """
    if tokenizer.documents.recorded:
        return None
    start = tokenizer.documents.start
    first = f"token {start[0]}" if start else "nothing"
    return (
        f"{folder} does not record how documents began in training. Texts begin with {first} here, as they do after "
        "prepare-data; with other training data the first tokens are predicted worse."
    )


def note_documents(folder: Path | str, tokenizer: "Tokenizer") -> None:
    """Prints `documents_note` to standard error."""
    if note := documents_note(folder, tokenizer):
        print(f"note: {note}", file=sys.stderr)


def visible(text: str) -> str:
    """Escapes the control characters that a terminal would obey.

    File names and a model's text may hold some.
    """
    return re.sub(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", _escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


def user_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Decorates a tool's `main`, so that a user's mistake is one paragraph with exit status 2.

    A mistake is a ValueError, an OSError, or a package that is missing and belongs to an extra. Any
    other error is ours and keeps its traceback.

    Args:
        main: Takes the words after the command's name, None for those of the process. Returns an
            exit status.
    """

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except BrokenPipeError:  # as after `| head`
            # Python's last flush would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except ModuleNotFoundError as e:
            module = str(e.name).partition(".")[0]
            for extra, modules in EXTRAS.items():
                if module in modules:
                    return report(
                        f"this needs {module}, which is not installed. The extra `{extra}` has it: {install_command(extra)}"
                    )
            raise
        except OSError as e:
            # An error of the operating system has a number and its text; one that we raise has a
            # message.
            if not e.strerror:
                return report(str(e))
            if e.filename is None:
                return report(f"{e.strerror}.")
            return report(
                f"{e.filename}: {e.strerror}. Check this path, its permissions and the space on its disk."
            )
        except ValueError as e:
            return report(str(e))

    return guarded


def report(error: str) -> int:
    """Prints an error. Returns its exit status."""
    print(f"error: {visible(error)}", file=sys.stderr)
    return 2
