"""Training straight from a Hugging Face dataset, tokenised on the way: for a first look, through TorchTitan's own class.

What it does not do, and a prepared corpus does: shuffle beyond what the dataset is, continue on another number of ranks,
tell whether the data changed since the checkpoint, read as fast as training goes. What it does: start at once, and
continue on the same number of ranks where it stopped.
"""

import json

import torch
import torch.distributed as dist

from interdomain.data.readers import open_stream

from .errors import one_paragraph
from .host import DATASETS, BaseDataLoader, DataloaderExhaustedError, DatasetConfig, HuggingFaceTextDataset

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu:sample-10BT"


def register(name: str, source: str) -> None:
    """`name` in TorchTitan's table: text of `source`, NAME[@REVISION][:CONFIG[:SPLIT]] or a local folder."""
    DATASETS[name.lower()] = DatasetConfig(path=source, loader=open_stream, sample_processor=lambda row: row["text"])


register("fineweb-edu", FINEWEB_EDU)


class _OnlyEos:
    """Documents end in EOS and begin with nothing, as in prepared corpora; TorchTitan's class asks for BOS too."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_eos=add_eos)


class StreamLoader(BaseDataLoader):
    """({"input": [B, T]}, labels [B, T]); rank r reads its own part of the dataset, over and over.

    The state is every rank's position, as text: TorchTitan's own loader would have it unpickled. `load_state_dict` refuses
    another number of ranks, dataset or sequence length.
    """

    def __init__(self, source: str, tokenizer, *, seq_len: int, local_batch: int, rank: int, ranks: int) -> None:
        if source.lower() not in DATASETS:
            register(source, source)
        self.local_batch, self.rank, self.ranks = local_batch, rank, ranks
        self.identity = self.fingerprint = json.dumps(
            {"stream": source, "seq_len": seq_len, "tokenizer": tokenizer.sha256}
        )
        self.dataset = HuggingFaceTextDataset(source, None, _OnlyEos(tokenizer), seq_len, rank, ranks, infinite=True)

    def __iter__(self):
        windows = iter(self.dataset)
        while True:
            taken = [self._take(windows) for _ in range(self.local_batch)]
            yield {"input": torch.stack([x["input"] for x, _ in taken])}, torch.stack([y for _, y in taken])

    @one_paragraph
    def _take(self, windows):
        try:
            return next(windows)
        except KeyError as e:
            raise ValueError(f"the rows of {self.identity} have no field {e}; streaming reads the field 'text'.") from e
        except StopIteration as e:
            raise DataloaderExhaustedError from e

    def state_dict(self) -> dict:
        """The same on every rank. Collective."""
        states = [None] * self.ranks
        own = json.dumps(self.dataset.state_dict())
        if self.ranks > 1:
            dist.all_gather_object(states, own)
        else:
            states = [own]
        return {"ranks": self.ranks, "identity": self.identity, "states": json.dumps(states)}

    @one_paragraph
    def load_state_dict(self, state: dict) -> None:
        if (state["ranks"], state["identity"]) != (self.ranks, self.identity):
            raise ValueError(
                f"the checkpoint was streaming {state['identity']} on {state['ranks']} rank(s), this run streams "
                f"{self.identity} on {self.ranks}: a stream cannot be continued otherwise than it was. Restore these, "
                "prepare a corpus (python -m interdomain.tools.prepare_data), which continues on any number of ranks, or "
                "start over in the data with --checkpoint.exclude_from_loading dataloader."
            )
        self.dataset.load_state_dict(json.loads(json.loads(state["states"])[self.rank]))
