"""python -m interdomain.megatron.run pretrain_gpt.py --spec interdomain.megatron.spec interdomain --model.size 125M ...

Runs a training script of Megatron-LM as it is. It adds to Megatron's arguments the mixer's settings, `--model.size` and
`--data.corpus`, gives it this project's parameter groups and schedule, and refuses at the start what would fail or be ignored.
"""

import runpy
import sys
from pathlib import Path

from . import require_megatron


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"error: give Megatron-LM's training script: {str(__doc__).splitlines()[0]}")
    require_megatron()
    from .patches import install

    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
