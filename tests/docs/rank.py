"""A rank of a tutorial's run: rank.py STEP THE ENTRY'S ARGUMENTS. Before training step STEP it gets SIGTERM; 0: never."""

import sys

from interdomain.titan import entry
from tests.titan.disturbed import disturb

if __name__ == "__main__":
    if step := int(sys.argv.pop(1)):
        disturb("step", step, 0, "SIGTERM", "rank")
    entry.main()
