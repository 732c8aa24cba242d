"""python -m interdomain.tools._start.elastic TORCHRUN'S ARGUMENTS

Runs torchrun without its traceback after a signal.

torchrun is meant to end on a signal: the scheduler's, or that of a rank which has said why it stops
(titan.errors).
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException as e:
        sys.exit(128 + e.sigval)
