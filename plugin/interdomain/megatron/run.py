"""python -m interdomain.megatron.run SCRIPT --spec interdomain.megatron.spec interdomain ...

Runs a training script of Megatron-LM as it is. Megatron's arguments then include the mixer's
settings, `--model.size` and `--data.corpus`, and the script has this project's parameter groups and
schedule. Settings that would fail or be ignored are errors at the start.
"""

import runpy
import sys
from pathlib import Path

from . import require_megatron


def main() -> None:
    """Runs the script that the command line names, with the changes of `patches.install`."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"error: give Megatron-LM's training script: {str(__doc__).splitlines()[0]}")
    require_megatron()
    from .patches import install

    # As if the script had been started itself.
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
