"""Training straight from a Hugging Face dataset, tokenised on the way: for a first look, through TorchTitan's own class.

What it does not do, and a prepared corpus does: shuffle beyond what the dataset is, continue on another number of ranks,
tell whether the data changed since the checkpoint, read as fast as training goes. What it does: start at once, and
continue on the same number of ranks where it stopped.
"""

import json
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from interdomain.data import Tokenizer
from interdomain.data.pieces import open_stream

from .errors import one_paragraph
from .host import DATASETS, BaseDataLoader, DatasetConfig, HuggingFaceTextDataset, logger

SHORT_NAMES = {"fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT"}


class _EosOnly:
    """Documents end in EOS and begin with nothing, as in prepared corpora; TorchTitan's class asks for BOS too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_eos=add_eos)


class StreamLoader(BaseDataLoader):
    """({"input": [B, T]}, labels [B, T]); rank r reads its own part of the dataset, over and over.

    The state is every rank's position, as text: TorchTitan's own loader would have it unpickled. `load_state_dict` refuses
    another number of ranks, dataset or sequence length.

    Args:
        source: NAME[@REVISION][:CONFIG[:SPLIT]] of a dataset with a field `text`, a local folder, or one of SHORT_NAMES.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, seq_len: int, local_batch: int, rank: int, ranks: int
    ) -> None:
        logger.warning(
            "streaming %s: this run can be continued on %d data-parallel rank(s) only, and cannot tell whether the data "
            "changed.",
            source,
            ranks,
        )
        path = SHORT_NAMES.get(source, source)
        DATASETS[source.lower()] = DatasetConfig(path, loader=open_stream, sample_processor=lambda row: row["text"])
        self.local_batch, self.rank, self.ranks = local_batch, rank, ranks
        self.fingerprint = json.dumps({"stream": source, "seq_len": seq_len, "tokenizer": tokenizer.sha256})
        eos_only = cast(Any, _EosOnly(tokenizer))
        self.dataset = HuggingFaceTextDataset(source, None, eos_only, seq_len, rank, ranks, infinite=True)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        windows = iter(self.dataset)
        while True:
            taken = [self._take(windows) for _ in range(self.local_batch)]
            yield {"input": torch.stack([x["input"] for x, _ in taken])}, torch.stack([y for _, y in taken])

    @one_paragraph
    def _take(self, windows: Iterator[Any]) -> tuple[dict[str, Tensor], Tensor]:
        try:
            return next(windows)
        except KeyError as e:
            raise ValueError(
                f"the rows of {self.fingerprint} have no field {e}; streaming reads the field 'text'."
            ) from e

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank. Collective."""
        states = [json.dumps(self.dataset.state_dict())] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(states, states[0])
        return {"ranks": self.ranks, "identity": self.fingerprint, "states": json.dumps(states)}

    @one_paragraph
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (state_dict["ranks"], state_dict["identity"]) != (self.ranks, self.fingerprint):
            raise ValueError(
                f"the checkpoint was streaming {state_dict['identity']} on {state_dict['ranks']} rank(s), this run streams "
                f"{self.fingerprint} on {self.ranks}: a stream cannot be continued otherwise than it was. Restore these, "
                "prepare a corpus (python -m interdomain.tools.prepare_data), which continues on any number of ranks, or "
                "start over in the data with --checkpoint.exclude_from_loading dataloader."
            )
        self.dataset.load_state_dict(json.loads(json.loads(state_dict["states"])[self.rank]))
