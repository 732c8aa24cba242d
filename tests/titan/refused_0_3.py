"""Prints what TorchTitan 0.3.0's entry says to command lines: refused_0_3.py LINE... An answer follows the line "> LINE".

A process of its own, because one that has imported TorchTitan 0.2.2 cannot import 0.3.0. No group of processes is made.
"""

import os
import sys

from torchtitan.config import ConfigManager

from tests.titan import driver  # noqa: F401 (stand-ins for PyTorch 2.14)


def start(arguments):
    config = ConfigManager().parse_args(arguments)
    if "tests.titan.own_config" in arguments:
        # The first hook that TorchTitan calls, once it has made a process group.
        config.model_spec.model.update_from_config(config=config)
    else:
        config.build()


if __name__ == "__main__":
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "OWN_DATA": "."}
    for line in sys.argv[1:]:
        print(">", line, file=sys.stderr)
        sys.argv = ["torchtitan.train", *line.split()]
        try:
            start(sys.argv[1:])
        except (SystemExit, ValueError) as e:  # SystemExit: the reason is printed
            print(e, file=sys.stderr)
