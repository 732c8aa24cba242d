"""python -m interdomain.tools.main convert outputs/debug --output exports/debug

All tools behind one name: once the project is installed, `interdomain COMMAND ...` is `python -m interdomain.tools.MODULE ...`.
"""

import importlib
import sys

from ._cli import user_errors

COMMANDS = {  # name: (module, what it does)
    "train": ("launch", "check a run, say what it is, and start it under TorchTitan"),
    "prepare": ("prepare_data", "turn text into a prepared corpus of tokens"),
    "convert": ("convert", "turn a checkpoint into a standalone folder, and back"),
    "generate": ("generate", "continue text with a standalone folder"),
    "evaluate": ("evaluate", "tasks of lm-evaluation-harness, and perplexity by context length"),
    "study": ("study", "one table and one plot of many runs, beside the paper's figures"),
    "compare": ("compare_runs", "find the first step at which two runs differ"),
    "check-kernels": ("check_kernels", "compare every kernel with float64 on this machine"),
    "bench kernels": ("bench_kernels", "time the mixer core, beside PyTorch's attention"),
    "bench training": ("bench_training", "time whole training steps"),
    "bench inference": ("bench_inference", "time whole models at inference"),
    "bench gpu": ("bench_gpu", "check and time everything on a GPU, in ten minutes"),
}


def usage() -> str:
    lines = ["usage: interdomain COMMAND [OPTIONS]", "", "`interdomain COMMAND --help` lists a command's options.", ""]
    return "\n".join([*lines, *(f"  {name:<19}{what}" for name, (_, what) in COMMANDS.items())])


@user_errors
def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv in ([], ["-h"], ["--help"], ["bench"], ["bench", "-h"], ["bench", "--help"]):
        print(usage(), flush=True)
        return 0
    words = 2 if argv[0] == "bench" else 1
    name = " ".join(argv[:words])
    if name not in COMMANDS:
        raise ValueError(f"there is no command '{name}'. `interdomain --help` lists the commands.")
    sys.argv[0] = f"interdomain {name}"  # what the tool's --help and errors call it
    # Imported only now: some tools need libraries that others do without.
    return importlib.import_module(f"interdomain.tools.{COMMANDS[name][0]}").main(argv[words:])


if __name__ == "__main__":
    sys.exit(main())
