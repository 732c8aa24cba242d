"""What the command-line tools share: a user's mistake is one paragraph on standard error and exit status 2."""

import functools
import os
import re
import select
import signal
import sys


def visible(text: str) -> str:
    """Text for a terminal: names out of files, and what a model writes, may hold what a terminal obeys."""
    return re.sub(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", lambda found: f"\\x{ord(found[0]):02x}", text)


def reader_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def user_errors(main):
    """Decorate a tool's `main`: ValueError and OSError say what was wrong; anything else is ours and keeps its traceback."""

    @functools.wraps(main)
    def guarded(argv=None) -> int:
        try:
            return main(argv)
        except (ValueError, OSError) as e:
            if isinstance(e, BrokenPipeError) and reader_left():
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would complain
                return 128 + signal.SIGPIPE
            message = str(e)
            if isinstance(e, OSError) and e.strerror:  # Python's own: the file stands apart from the words
                message = f"{e.strerror}."  # an OSError that we raised says it all there
                if e.filename is not None:
                    message = f"{e.filename}: {e.strerror}. Check this path, its permissions and the space on its disk."
            print(f"error: {visible(message)}", file=sys.stderr)
            return 2

    return guarded
