"""The program of every rank: torchrun --nproc-per-node 8 -m interdomain.titan.entry train_configs/125M.toml
--mixer.condition s4d"""

import sys
from collections.abc import Callable
from typing import Any

from .errors import user_errors


@user_errors
def read(argv: list[str]) -> tuple[Callable[[Any], None], Any]:
    """The function that trains, and its configuration, from FILE.toml FLAGS or --job.config_file FILE.toml FLAGS."""
    # Imported in here: another version of TorchTitan is refused in a paragraph, too.
    from .settings.job_config import read_job_config
    from .trainer import run

    named = argv and not argv[0].startswith("-")
    return run, read_job_config(["--job.config_file", *argv] if named else argv)


def main() -> None:
    run, job = read(sys.argv[1:])
    run(job)


if __name__ == "__main__":
    main()
