"""First lines of every Python that the tests start (conftest.py puts this folder on their path).

Without the garbage collector, which would look through half-made modules again and again, imports take a quarter less.
"""

import gc

gc.disable()
