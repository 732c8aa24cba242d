"""A rank of a tutorial's run: rank.py STEP THE ENTRY'S ARGUMENTS. Before training step STEP it gets SIGTERM; 0: never."""

import gc
import sys

from interdomain.titan import entry
from tests.titan.disturbed import disturb

if __name__ == "__main__":
    gc.freeze()  # the collector need not look through what the fork inherited
    if step := int(sys.argv.pop(1)):
        disturb("step", step, 0, "SIGTERM", "rank")
    entry.main()
