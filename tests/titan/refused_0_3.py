"""What TorchTitan 0.3.0's entry says to command lines: refused_0_3.py LINE..., which prints a JSON list.

A process of its own, because one that has imported TorchTitan 0.2.2 cannot import 0.3.0. No group of processes is made.
"""

import contextlib
import io
import json
import os
import sys
from unittest import mock

from torchtitan.config import ConfigManager

from tests.titan import driver  # noqa: F401 (stand-ins for PyTorch 2.14)


def start(arguments):
    config = ConfigManager().parse_args(arguments)
    if "tests.titan.own_config" in arguments:
        # The first hook that TorchTitan calls, once it has made a process group.
        config.model_spec.model.update_from_config(config=config)
    else:
        config.build()


def answer(arguments):
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
        mock.patch.object(sys, "argv", ["torchtitan.train", *arguments]),
    ):
        try:
            start(arguments)
        except SystemExit:
            return said.getvalue()
        except ValueError as e:
            return str(e)
    return "nothing is wrong"


if __name__ == "__main__":
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "OWN_DATA": "."}
    lines = sys.argv[1:]
    print(json.dumps([answer(line.split()) for line in lines]))
