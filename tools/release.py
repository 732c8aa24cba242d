"""interdomain release outputs/debug train_configs/studies/small.toml --output dist/models

Pack trained models for a release: archives of standalone folders, and their hashes.

Of a study every condition gives the run at its best learning rate, whose checkpoint must still be there. Each archive
NAME.tar.gz holds the folder NAME, as `interdomain convert` makes it. The same weights give the same bytes. SHA256SUMS
has the hashes, for `sha256sum -c SHA256SUMS`.

    interdomain release train_configs/studies/small.toml --only '1.4M/*/text/*' --output dist/models --license cc-by-4.0

Documentation: docs/checkpoints.md
"""

import argparse
import fnmatch
import gzip
import hashlib
import json
import re
import sys
import tarfile
import tempfile
from pathlib import Path

from interdomain.files.distributed_checkpoint import finished_steps
from interdomain.files.pretrained import DTYPES
from interdomain.files.run_folder import checkpoints_of
from interdomain.folders import new_folder
from interdomain.markdown import markdown_rows
from interdomain.tools import convert
from interdomain.tools._cli import OUTPUT, argument_parser, path_argument, user_errors


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__, "STUDY.toml|RUN [...] --output DIR")
    text = "a study's file, or the folder of a run (job.dump_folder)"
    p.add_argument("sources", nargs="+", type=path_argument, metavar="STUDY.toml|RUN", help=text)
    p.add_argument("--output", type=path_argument, required=True, metavar="DIR", help=OUTPUT)
    p.add_argument("--only", default="*", metavar="PATTERN", help="of studies only runs of such a name, as '1.4M/*'")
    text = "data type to store the weights in; the recurrence's parameters stay float32"
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=f"{text} (default: bfloat16)")
    p.add_argument("--license", metavar="NAME", help="licence of the weights, for the model cards (as cc-by-4.0)")
    return p.parse_args(argv)


def chosen(sources: list[Path], only: str) -> dict[str, Path]:
    """Folders of the runs to pack, by the names of their archives.

    Raises: ValueError for a run without a checkpoint, two runs of one name, and a choice of none.
    """
    from interdomain.tools._study.definition import read_study  # of the extra `train`
    from interdomain.tools._study.tables import Run, at_best_rates

    folders: dict[str, Path] = {}
    for source in sources:
        if source.suffix != ".toml":
            found = {source.resolve().name: source}
        else:
            runs = {run.name: run for run in read_study(source).runs if fnmatch.fnmatch(run.name, only)}
            records = [
                Run.of(name, json.loads(run.record.read_text()), run.record)
                for name, run in runs.items()
                if run.is_finished
            ]
            best = [cell.runs[0] for cells in at_best_rates(records).values() for cell in cells]
            found = {archive_name(run.labels): runs[run.name].folder for run in best}
        if twice := folders.keys() & found:
            raise ValueError(f"two runs would be packed as {min(twice)}: pack them into two folders.")
        folders |= found
    if not folders:
        raise ValueError(
            f"no finished run was found with --only {only}. `interdomain study plan STUDY.toml` lists a study's."
        )
    if gone := [str(folder) for folder in folders.values() if not finished_steps(checkpoints_of(folder))]:
        raise ValueError(
            f"no checkpoint is left of {', '.join(gone)}. Train again (remove the record first), or choose others by --only."
        )
    return folders


def archive_name(labels: dict[str, str]) -> str:
    """1.4M-interdomain-text, of a run's place in its study: all but the rate."""
    return re.sub(r"[^\w.]+", "-", "-".join(label for axis, label in labels.items() if axis != "rate"))


def pack(folder: Path, archive: Path) -> str:
    """Write a folder as a .tar.gz that depends on its names and contents alone. Returns: its SHA-256."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() else 0o644
        return entry

    with open(archive, "wb") as f, gzip.GzipFile("", "wb", fileobj=f, mtime=0) as packed:
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(folder, folder.name, filter=plain)  # which sorts the names
    with open(archive, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    rows, sums = [["archive", "MB", "checked"]], ""
    with new_folder(args.output) as output, tempfile.TemporaryDirectory() as temporary:
        for name, run in chosen(args.sources, args.only).items():
            options = ["--output", f"{temporary}/{name}", "--dtype", args.dtype]
            options += ["--license", args.license] if args.license else []
            checked = convert.to_folder(run, Path(temporary, name), convert.parse([str(run), *options]))
            archive = output / f"{name}.tar.gz"
            sums += f"{pack(Path(temporary, name), archive)}  {archive.name}\n"
            rows.append([archive.name, f"{archive.stat().st_size / 1e6:.1f}", checked])
        (output / "SHA256SUMS").write_text(sums)
    print("\n".join(markdown_rows(rows)) + f"\nwrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
