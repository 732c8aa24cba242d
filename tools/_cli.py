"""What the command-line tools share: options of one kind, and a user's mistake as one paragraph with exit status 2."""

import argparse
import functools
import os
import re
import signal
import sys


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """A tool's parser. doc: its module's docstring, which is a line to paste and then a paragraph on what the tool does."""
    line, description, *_ = doc.split("\n\n")
    name = " ".join(line.split()[:3])  # python -m interdomain.tools.NAME
    if sys.argv[0].startswith("interdomain "):  # tools.main puts `interdomain COMMAND` there
        name = sys.argv[0]
    # No abbreviations: an option of an older version must not pass for the beginning of another.
    return argparse.ArgumentParser(name, description=description, epilog=f"Example: {line}", allow_abbrev=False)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto (default: a GPU if there is one), cpu, cuda, or one of several: cuda:1"
    )


def choose_device(name: str):
    """The torch.device that --device names, made the current one. Raises: ValueError for one that is not there."""
    import torch

    choices = ["cpu"]
    if torch.cuda.is_available():
        choices = ["cuda", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name == "auto":
        name = choices[0]
    if name not in choices:
        raise ValueError(
            f"--device {name} cannot be used here: PyTorch sees {', '.join(choices[2:]) or 'no GPU(s)'}. Choose cpu, one of "
            "these, or auto; for a GPU that is there, PyTorch must be a CUDA build that its driver fits."
        )
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current one
    return device


def visible(text: str) -> str:
    """Text for a terminal: names out of files, and what a model writes, may hold what a terminal obeys."""
    return re.sub(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", lambda found: f"\\x{ord(found[0]):02x}", text)


def user_errors(main):
    """Decorate a tool's `main`: ValueError and OSError say what was wrong; anything else is ours and keeps its traceback."""

    @functools.wraps(main)
    def guarded(argv=None) -> int:
        try:
            return main(argv)
        except BrokenPipeError:  # as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would complain
            return 128 + signal.SIGPIPE
        except (ValueError, OSError) as e:
            message = str(e)
            if isinstance(e, OSError) and e.strerror:  # Python's own: the file stands apart from the words
                message = f"{e.strerror}."  # an OSError that we raised says it all there
                if e.filename is not None:
                    message = f"{e.filename}: {e.strerror}. Check this path, its permissions and the space on its disk."
            print(f"error: {visible(message)}", file=sys.stderr)
            return 2

    return guarded
