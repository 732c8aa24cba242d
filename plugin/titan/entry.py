"""What every rank runs: torchrun --nproc-per-node 8 -m interdomain.titan.entry train_configs/125M.toml --mixer.condition s4d"""

import sys
from collections.abc import Callable
from typing import Any

from .errors import one_paragraph


def arguments_of(argv: list[str]) -> list[str]:
    """FILE.toml FLAGS, or --job.config_file FILE.toml FLAGS, as the latter."""
    return ["--job.config_file", *argv] if argv and not argv[0].startswith("-") else list(argv)


@one_paragraph
def read(argv: list[str]) -> tuple[Callable[[Any], None], Any]:
    """(what trains, its configuration)"""
    # Imported in here: another version of TorchTitan is refused in a paragraph, too.
    from .settings import read_job_config
    from .trainer import run

    return run, read_job_config(arguments_of(argv))


def main() -> None:
    run, job = read(sys.argv[1:])
    run(job)


if __name__ == "__main__":
    main()
