"""interdomain convert outputs/debug --output exports/debug

Convert a checkpoint into an exported model, or back.

An exported model holds weights (safetensors), config.json, a tokenizer, a model card and the code
that transformers runs. Checkpoints of this project and of Megatron-Core are read. You can convert
while the run goes on. The result is read back and compared with the source: the model, and every
value.

    interdomain convert outputs/debug/checkpoint/step-400 --output exports/debug-400 --dtype bfloat16
    interdomain convert exports/debug --to-checkpoint --output outputs/start
    interdomain convert exports/softmax --to-checkpoint --uptrain hybrid.toml --output outputs/start

Documentation: docs/checkpoints.md; for Megatron-Core docs/megatron.md
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import interdomain
from interdomain.checkpoint import pretrained, step_folder
from interdomain.checkpoint.index import read_tensors, write_tensors
from interdomain.checkpoint.model_card import write_card
from interdomain.checkpoint.model_code import write_code
from interdomain.checkpoint.training_checkpoint import TrainingCheckpoint, open_checkpoint
from interdomain.data import Tokenizer
from interdomain.data.tokenizer_export import (
    padding_id,
    refuse_in_transformers,
    write_for_transformers,
)
from interdomain.folders import new_folder
from interdomain.megatron import checkpoint as megatron
from interdomain.model import ModelConfig, cell_of, meta_model
from interdomain.model.initialize import initial_value
from interdomain.tools._cli import (
    OUTPUT,
    argument_parser,
    note_documents,
    path_argument,
    user_errors,
)
from interdomain.tools._progress import progress_bar

MAX_FILE_BYTES = 4 * 10**9  # the largest file of weights; more weights make several files


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__, "SOURCE --output DIR")
    p.add_argument(
        "source",
        type=path_argument,
        metavar="SOURCE",
        help="checkpoint (step-N), or a run's folder: its newest complete one. With --to-...: an exported model",
    )
    p.add_argument(
        "--output",
        type=path_argument,
        required=True,
        metavar="DIR",
        help=OUTPUT,
    )
    p.add_argument(
        "--dtype",
        choices=pretrained.DTYPES,
        help="data type to store the weights in (default: float32); the recurrence's parameters stay float32",
    )
    p.add_argument(
        "--license",
        metavar="NAME",
        help="licence of the weights, for the model card (cc-by-4.0, apache-2.0, other); default: the card names none",
    )
    back = p.add_mutually_exclusive_group()
    back.add_argument(
        "--to-checkpoint",
        action="store_true",
        help="write a checkpoint to train from (--checkpoint.initial_load_path DIR)",
    )
    p.add_argument(
        "--uptrain",
        type=path_argument,
        metavar="RUN.toml",
        help="with --to-checkpoint: start another model of that size, which this run's TOML file describes, such as a hybrid",
    )
    back.add_argument(
        "--to-megatron",
        nargs="?",
        const="gpt",
        choices=("gpt", "hybrid"),
        help="write a checkpoint for Megatron-Core (--load DIR): for its GPTModel, or with the word hybrid for HybridModel",
    )
    p.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="PATH",
        help="tokenizer of the prepared corpus (file or folder), for checkpoints of Megatron-Core: required there only",
    )
    args = p.parse_args(argv)

    # Options of the other direction would be ignored: refuse them.
    is_back = args.to_checkpoint or args.to_megatron
    if is_back and (args.dtype or args.tokenizer or args.license):
        raise ValueError(
            "--dtype, --tokenizer and --license are for making an exported model. A checkpoint to train from is float32, and "
            "the folder has its tokenizer: leave them out."
        )
    if args.uptrain and not args.to_checkpoint:
        raise ValueError("--uptrain makes a checkpoint to train from: add --to-checkpoint.")
    args.dtype = args.dtype or "float32"
    return args


def to_folder(source: Path, output: Path, args: argparse.Namespace) -> str:
    """Converts a checkpoint into an exported model, and returns a summary.

    Args:
        source: A checkpoint, or the folder of a run.
        output: The folder to write, which must be new or empty.
        args: The options of the command.
    """
    # Open the checkpoint, and compare its bytes with their checksums.
    if megatron_folder := megatron.find_checkpoint(source):
        checkpoint, tokenizer = megatron.open_checkpoint(megatron_folder, args.tokenizer)
    elif args.tokenizer:
        raise ValueError(
            f"--tokenizer is for checkpoints of Megatron-Core. {source} has its own tokenizer: leave it out."
        )
    else:
        checkpoint, tokenizer = open_checkpoint(source)
    config = checkpoint.config
    record = checkpoint.record
    dtype = pretrained.DTYPES[args.dtype]
    names = list(meta_model(config).state_dict())
    checkpoint.check_bytes(names)

    with new_folder(output) as folder:
        # The weights.
        title = checkpoint.folder.name
        with progress_bar(total=len(names), desc=title, unit=" tensors") as bar:

            def read(names: list[str]) -> dict[str, Tensor]:
                bar.update(len(names))
                return checkpoint.read(names)

            count = pretrained.write_weights(folder, config, dtype, read, MAX_FILE_BYTES)

        # The tokenizer, also as transformers reads it.
        tokenizer.write(folder)
        try:
            write_for_transformers(tokenizer, folder)
        except NotImplementedError as e:
            refuse_in_transformers(folder)
            print(
                f"note: no tokenizer.json was written, AutoTokenizer refuses the folder: {e}",
                file=sys.stderr,
            )
        note_documents(checkpoint.folder, tokenizer)

        # What is known of the run.
        facts = {name: record[name] for name in step_folder.RECORD_FACTS}
        facts["size"], facts["condition"] = cell_of(config, record["size"])
        facts["converted_by"] = f"interdomain {interdomain.__version__}"
        validation = checkpoint.folder / step_folder.VALIDATION
        facts["validation"] = None
        if validation.is_file():
            facts["validation"] = json.loads(validation.read_text())

        # Configuration, code and card. Then read the whole folder back.
        pretrained.write_config(folder, config, args.dtype, tokenizer, facts)
        write_generation_config(folder, config, tokenizer)
        write_code(folder)
        configuration = record.get("configuration", {})
        write_card(folder, config, args.dtype, tokenizer, facts, configuration, args.license)
        check_folder(folder, checkpoint, dtype)
    return f"{count} tensors, step {record['step']}"


def write_generation_config(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Writes generation_config.json, the defaults of transformers' `generate`.

    Args:
        folder: The exported model.
        config: The model's configuration.
        tokenizer: The model's tokenizer.
    """
    record = {
        # A text without a prompt begins as a document in training. transformers takes a single
        # token.
        "bos_token_id": next(reversed(tokenizer.documents.start), None),
        "eos_token_id": tokenizer.documents.stop,
        "pad_token_id": padding_id(tokenizer),
        # Rows of a vocabulary that was padded to a round number mean nothing.
        "suppress_tokens": list(range(tokenizer.vocab_size, config.vocab_size)) or None,
    }
    known = {name: value for name, value in record.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(known, indent=2) + "\n")


def check_folder(
    folder: Path, checkpoint: TrainingCheckpoint | megatron.MegatronCheckpoint, dtype: torch.dtype
) -> None:
    """Reads the folder back as a user would, and compares it with the checkpoint.

    The model's configuration and every value must be the same. Of the folder, one tensor is in
    memory at a time; of the checkpoint, the tensors of one file of the folder.

    Args:
        folder: The exported model.
        checkpoint: The checkpoint that it was made from.
        dtype: The data type of the weights in the folder.

    Raises:
        ValueError: Something differs, or a value is not finite.
    """
    config, record = pretrained.read_config(folder)
    pretrained.load_checked_tokenizer(folder, config, record)
    pretrained.check_weights(folder, record)
    if config != checkpoint.config:
        raise ValueError(
            f"the folder holds {config}, and the checkpoint {checkpoint.config}. Nothing was kept."
        )

    missing = set(meta_model(config).state_dict())
    with progress_bar(total=len(missing), desc="checking", unit=" tensors") as bar:
        for path in pretrained.weight_files(folder):
            for name in compare_file(path, checkpoint, dtype):
                missing.remove(name)
                bar.update()
    if missing:
        raise ValueError(f"{folder} lacks {min(missing)}: this machine's disk or memory is faulty.")


def compare_file(
    path: Path, checkpoint: TrainingCheckpoint | megatron.MegatronCheckpoint, dtype: torch.dtype
) -> Iterator[str]:
    """Compares the tensors of one file of the folder with the checkpoint's.

    Args:
        path: The file.
        checkpoint: The checkpoint that it was made from.
        dtype: The data type of the weights in the file.

    Yields:
        The name of each tensor that is the same.

    Raises:
        ValueError: A tensor differs, or a value is not finite.
    """
    with pretrained.open_weights(path) as file:
        stored = {name.removeprefix(pretrained.MODEL_PREFIX): name for name in file.keys()}  # noqa: SIM118
        sources = checkpoint.read(list(stored))
        for name, stored_name in stored.items():
            tensor = file.get_tensor(stored_name)
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{checkpoint.folder}: {name} holds values that are not finite, or too large "
                    f"for {tensor.dtype}. Nothing was kept. Convert with --dtype float32, or take "
                    "an earlier step."
                )
            expected = sources.pop(name).to(pretrained.storage_dtype(name, dtype))
            check_same(name, tensor, expected)
            yield name


def check_same(name: str, tensor: Tensor, expected: Tensor) -> None:
    """Raises ValueError unless a tensor that was read back is the one that was written.

    Args:
        name: The tensor's name, for the error's text.
        tensor: The tensor that was read.
        expected: The tensor that was written.
    """
    if tensor.dtype != expected.dtype or not torch.equal(tensor, expected):
        raise ValueError(
            f"{name} did not read back as written: this machine's disk or memory is faulty."
        )


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer]:
    """Reads an exported model for training.

    Returns:
        The model's configuration, its tensors in float32, and the tokenizer.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged.
    """
    model, tokenizer = pretrained.load_pretrained(folder)
    # Training keeps its master weights in float32.
    tensors = {name: tensor.float() for name, tensor in model.state_dict().items()}
    return model.config, tensors, tokenizer


def documents_of(tokenizer: Tokenizer) -> dict[str, list[int]] | None:
    """Returns how training documents begin and end, as a checkpoint records it.

    None if the exported model does not say.
    """
    return tokenizer.documents.to_dict() if tokenizer.documents.recorded else None


def to_megatron(source: Path, output: Path, args: argparse.Namespace) -> str:
    """Converts an exported model into a checkpoint for Megatron-Core, and returns a summary.

    Args:
        source: The exported model.
        output: The folder to write, which must be new or empty.
        args: The options of the command.
    """
    config, tensors, tokenizer = read_folder(source)
    hybrid = args.to_megatron == "hybrid"
    pattern = ""
    if hybrid:
        pattern = f' --hybrid-layer-pattern "{megatron.hybrid_pattern(config)}"'
    with new_folder(output) as folder:
        # Each layer's record in the checkpoint has the tokenizer's checksum and the documents.
        documents = documents_of(tokenizer)
        megatron.write_checkpoint(folder, config, tensors, tokenizer.sha256, hybrid, documents)
        written = megatron.MegatronCheckpoint(folder / "release")
        # Tensors that the checkpoint stores as one are read together.
        for names in written.stored_together(list(tensors)):
            for name, tensor in written.read(names).items():
                check_same(name, tensor, tensors[name])
    return f"{len(tensors)} tensors; start with Megatron's --load {args.output}{pattern}"


def to_checkpoint(source: Path, output: Path, args: argparse.Namespace) -> str:
    """Converts an exported model into a checkpoint to train from, and returns a summary.

    Args:
        source: The exported model.
        output: The folder to write, which must be new or empty.
        args: The options of the command.
    """
    config, tensors, tokenizer = read_folder(source)
    facts: dict[str, Any] = pretrained.read_config(source)[1].get("facts", {})
    copied = f"{len(tensors)} tensors"
    if args.uptrain:
        config, tensors, copied = uptrained(args.uptrain, config, tensors)

    # The record of a run that has not taken a step.
    record = {
        "format_version": step_folder.RECORD_VERSION,
        "model": config.to_dict(),
        **cell_of(config, facts.get("size", "unknown"))._asdict(),
        "step": 0,
        "tokens": 0,
        "run": {"documents": documents_of(tokenizer), "started_from": facts},
        "tokenizer": {
            "file": tokenizer.file,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "versions": {"interdomain": interdomain.__version__, "torch": torch.__version__},
    }

    # Write the checkpoint, and read every tensor back.
    with new_folder(output) as folder:
        step_folder.write_record(folder, record, tokenizer)
        write_tensors(folder, tensors)
        for name, tensor in tensors.items():
            check_same(name, read_tensors(folder, [name])[name], tensor)
    return f"{copied}; start with --checkpoint.initial_load_path {args.output}"


def uptrained(
    run: Path, source: ModelConfig, tensors: dict[str, Tensor]
) -> tuple[ModelConfig, dict[str, Tensor], str]:
    """Starts a run's model from the tensors of another.

    Tensors of the same name and shape are copied. The others are drawn as at a run's start.

    Args:
        run: The TOML file of the run.
        source: The configuration of the other model.
        tensors: Its tensors by name.

    Returns:
        The configuration of the run's model, its tensors, and a summary.

    Raises:
        ValueError: The models differ in more than their mixers.
    """
    from interdomain.titan.plan.run_plan import model_config  # of the extra `train`
    from interdomain.titan.settings.job_config import job_config_of, read_toml

    # The two models may differ in their mixers and in the length of their sequences.
    job = job_config_of(read_toml(run))
    config = model_config(job)
    source = replace(source, mixers=config.mixers, max_seq_len=config.max_seq_len)
    for field in fields(config):
        of_folder = getattr(source, field.name)
        of_run = getattr(config, field.name)
        if of_folder != of_run:
            raise ValueError(
                "the models must be alike but for their mixers: "
                f"{field.name} {of_folder} in the folder, {of_run} in {run}. Change [model]."
            )

    started = {}
    copied = 0
    for name, tensor in meta_model(config).state_dict().items():
        if name in tensors and tensors[name].shape == tensor.shape:
            started[name] = tensors[name]
            copied += 1
        else:
            started[name] = initial_value(name, tensor.shape, config, job.debug.seed)
    return config, started, f"{copied} tensors copied, {len(started) - copied} drawn"


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    convert = to_folder
    if args.to_checkpoint:
        convert = to_checkpoint
    elif args.to_megatron:
        convert = to_megatron
    summary = convert(args.source, args.output, args)
    size = sum(file.stat().st_size for file in args.output.rglob("*") if file.is_file())
    print(f"wrote {args.output} ({size / 1e6:.1f} MB, {summary})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
