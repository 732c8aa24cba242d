"""Parts that the command-line tools share: options of one kind, and a user's mistake as one paragraph with exit status 2."""

import argparse
import functools
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

from interdomain.folders import expand_path
from interdomain.removed import removal_of

OUTPUT = "folder to write; it must be new or empty"
RESULTS = "folder to write; existing results are never overwritten"
DEVICE = "auto (a GPU if there is one, else the CPU), cpu, cuda or cuda:N"
STANDALONE = "standalone folder (made by interdomain convert)"
KINDS_OF_SOURCES = ("hf:", "debian:")  # a folder may follow
# Extras, with the modules that commands import late from each.
EXTRAS = {
    "train": ("torchtitan", "torchdata", "tyro", "tensorboard", "triton"),
    "data": ("pyarrow", "datasets", "tokenizers", "tiktoken", "google"),
    "eval": ("lm_eval", "accelerate", "transformers"),
}


class Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a docstring, and adds its default to the text of an option."""

    def _split_lines(self, text, width):
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _get_help_string(self, action):
        text = action.help or ""
        default = action.default
        if isinstance(default, list):
            default = " ".join(map(str, default))
        if default not in (None, "", argparse.SUPPRESS) and not isinstance(default, bool):
            text += f" (default: {default})"
        return text.replace("%", "%%")


class Parser(argparse.ArgumentParser):
    def parse_args(self, args=None, namespace=None) -> Any:
        """Raises: ValueError for an option, or an option's value, that an earlier version had."""
        words = sys.argv[1:] if args is None else args
        command = self.prog.removeprefix("interdomain ")
        for option, value in zip(words, [*words[1:], ""], strict=True):
            option = option.partition("=")[0]
            if removal := removal_of(f"{command} {option}") or removal_of(
                f"{command} {option} {value}"
            ):
                raise ValueError(removal)
        return super().parse_args(words, namespace)


def argument_parser(doc: str | None, usage: str = "") -> Parser:
    """A tool's parser.

    Args:
        doc: Its module's docstring: a line to paste, paragraphs above the options, more lines to paste (indented), and
            paragraphs below the options.
        usage: What the command needs, before [OPTIONS].
    """
    assert doc is not None
    line, _, text = doc.strip().partition("\n\n")
    above, _, below = text.partition("\n\n    ")
    name = " ".join(line.split()[:2])  # interdomain COMMAND
    return Parser(
        name,
        usage=" ".join([name, *usage.split(), "[OPTIONS]"]),
        description=above,
        epilog=f"examples:\n    {line}\n    {below}",
        formatter_class=Help,
        allow_abbrev=False,  # an option of an older version must not pass for the beginning of another
    )


def path_argument(text: str) -> Path:
    """The type of an argument that is a path. `~` and `$NAME` are expanded, which a shell leaves in `--output=~/x`."""
    return Path(path_or_name(text))


def path_or_name(text: str) -> str:
    """The type of an argument that is a path, an address (whose `//` a Path would not keep) or a name."""
    if "$" in text and os.path.lexists(text):  # A shell's `*.txt` names files as they are.
        return text
    kind = next((kind for kind in KINDS_OF_SOURCES if text.startswith(kind)), "")
    try:
        return kind + expand_path(text.removeprefix(kind))
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def add_device(parser, text: str = DEVICE) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help=text,
    )


def add_dtype(parser, dtypes) -> None:
    """--dtype of a tool that reads a standalone folder."""
    parser.add_argument(
        "--dtype",
        choices=dtypes,
        help="data type of the weights; the recurrence's parameters stay float32 (default: as stored)",
    )


def require_at_least(args: argparse.Namespace, **least: int) -> None:
    """Raises: ValueError for a number, or one of a list, below the least that its option allows."""
    for name, low in least.items():
        option = getattr(args, name)
        values = option if isinstance(option, list) else [option]
        for value in values:
            if isinstance(value, int) and value < low:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {low}: got {value}.")


def choose_device(name: str):
    """The torch.device that --device names, made the current one. Raises: ValueError for one that is not there."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    if name != "cpu" and name not in gpus and not (name == "cuda" and gpus):
        raise ValueError(
            f"--device {name} cannot be used here: PyTorch sees {', '.join(gpus) or 'no GPU(s)'}. Choose cpu, one of these, "
            "or auto. If this machine has a GPU, install a CUDA build of PyTorch that fits the driver."
        )
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    return device


def python_here() -> str:
    """This interpreter, by a path relative to the working folder where it lies inside."""
    python = Path(sys.executable)
    return str(python.relative_to(Path.cwd())) if python.is_relative_to(Path.cwd()) else str(python)


def install_command(extra: str) -> str:
    """The command that installs an extra: in a checkout with its exact versions."""
    place = (
        f"-c constraints.txt -e '.[{extra}]'"
        if Path("constraints.txt").is_file()
        else f"'interdomain[{extra}]'"
    )
    return f"{python_here()} -m pip install {place}"


def documents_note(folder, tokenizer) -> str | None:
    """A note for a model whose record does not say how documents began in training; None if it does."""
    if tokenizer.documents.recorded:
        return None
    start = tokenizer.documents.start
    first = f"token {start[0]}" if start else "nothing"
    return (
        f"{folder} does not record how documents began in training. Texts begin with {first} here, as they do after "
        "prepare-data; with other training data the first tokens are predicted worse."
    )


def note_documents(folder, tokenizer) -> None:
    """Print `documents_note` to standard error."""
    if note := documents_note(folder, tokenizer):
        print(f"note: {note}", file=sys.stderr)


def visible(text: str) -> str:
    """Text without the control characters that a terminal would obey: file names and a model's text may hold some."""
    return re.sub(
        r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", lambda match: f"\\x{ord(match[0]):02x}", text
    )


def user_errors(main):
    """Decorates a tool's `main`: ValueError, OSError and a package that an extra has say what was wrong, with exit status 2.

    Anything else is ours and keeps its traceback.
    """

    @functools.wraps(main)
    def guarded(argv=None) -> int:
        try:
            return main(argv)
        except BrokenPipeError:  # as after `| head`
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # or Python's last flush would complain
            return 128 + signal.SIGPIPE
        except ModuleNotFoundError as e:
            module = str(e.name).partition(".")[0]
            for extra, modules in EXTRAS.items():
                if module in modules:
                    message = (
                        f"this needs {module}, which is not installed. The extra `{extra}` has it"
                    )
                    return report(f"{message}: {install_command(extra)}")
            raise
        except OSError as e:
            if not e.strerror:  # one of ours
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
    """Prints an error. Returns: its exit status."""
    print(f"error: {visible(error)}", file=sys.stderr)
    return 2
