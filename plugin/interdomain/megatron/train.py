"""A program that was removed. It says what to do instead."""

import sys

from interdomain.removed import removal_of

if __name__ == "__main__":
    sys.exit(f"error: {removal_of(__spec__.name)}")  # pyright: ignore[reportOptionalMemberAccess]
