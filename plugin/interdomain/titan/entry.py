"""The program that our trainer runs on every rank.

torchrun --nproc-per-node 8 -m interdomain.titan.entry train_configs/125M.toml --mixer.condition s4d
"""

import sys
from collections.abc import Callable
from typing import Any

from .errors import user_errors


@user_errors
def read(argv: list[str]) -> tuple[Callable[[Any], None], Any]:
    """Reads a command line.

    Args:
        argv: FILE.toml FLAGS, or --job.config_file FILE.toml FLAGS.

    Returns:
        The function that trains, and the configuration for it.
    """
    # Imported here, so that `user_errors` also reports a wrong version of TorchTitan.
    from .settings.job_config import read_job_config
    from .trainer import run

    if argv and not argv[0].startswith("-"):
        argv = ["--job.config_file", *argv]
    return run, read_job_config(argv)


def main() -> None:
    run, job = read(sys.argv[1:])
    run(job)


if __name__ == "__main__":
    main()
