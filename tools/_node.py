"""What srun starts on every node: python -m interdomain.tools._node RANKS TORCHRUN'S COMMAND"""

import os
import shutil
import sys

from . import launch
from ._cli import user_errors
from ._supervise import supervise


@user_errors
def main(argv=None) -> int:
    ranks, *torchrun = sys.argv[1:] if argv is None else argv
    binding = [flag for flag in torchrun if flag.startswith("--numa-binding=")]
    if binding and shutil.which("numactl") is None:  # a container may lack it, and torchrun would not start
        torchrun.remove(binding[0])
        print(
            f"{os.uname().nodename}: {binding[0]} is left out, for it needs numactl, which is not on PATH here: ranks may "
            "run far from their GPUs' memory.",
            file=sys.stderr,
        )
    first = os.environ["SLURM_NODEID"] == "0"
    # By number, not by torchrun's guess from the host's names, of which a node with several networks has several.
    ours = {"PET_RDZV_CONF": f"is_host={str(first).lower()}"}
    return supervise(torchrun, {**ours, **launch.environment(int(ranks))})


if __name__ == "__main__":
    sys.exit(main())
