"""The program that every rank runs: torchrun ... -m interdomain.titan.entry --job.config_file FILE.toml FLAGS"""

import sys

from .errors import one_paragraph


@one_paragraph
def read(arguments: list[str]):
    """(what trains, its configuration)"""
    from .settings import read_job_config
    from .trainer import run

    return run, read_job_config(arguments)


def main() -> None:
    run, job = read(sys.argv[1:])
    run(job)


if __name__ == "__main__":
    main()
