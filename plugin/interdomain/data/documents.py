"""How documents begin and end in the tokens that a model is trained on: `Documents(begin=(1,), end=(2,))`.

Loaders differ. `prepare-data` writes a text and EOS, TorchTitan's loader writes BOS, a text and EOS. A model expects the start
of a text behind the tokens that stood there in training, so a run records them under "documents".

A `Tokenizer` has a `Documents`, so tokenizers and corpora are arguments here, and not imported.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SAMPLES = 1000  # documents of a corpus that `documents_in` looks at, and one of each shard


@dataclass(frozen=True)
class Documents:
    """Tokens around the text of every document.

    Attributes:
        begin: ids before the text.
        end: ids behind the text.
        recorded: False if the record of the model does not say so, and these are the ones of `prepare-data`.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    recorded: bool = True

    @property
    def start(self) -> list[int]:
        """What stands before a text that nothing precedes: the beginning of a document, or the end of the one before."""
        return list(self.begin or self.end)

    @property
    def stop(self) -> int | None:
        """The token that shows that a text is over: the first that comes behind it. None if nothing does."""
        return next(iter((*self.end, *self.begin)), None)

    def to_dict(self) -> dict[str, list[int]]:
        """The form in records; `recorded_documents` is the inverse."""
        return {"begin": list(self.begin), "end": list(self.end)}


def prepared_documents(tokenizer: Any, recorded: bool = True) -> Documents:
    """Documents as `prepare-data` writes them; without an EOS token, BOS is all that a text can begin with."""
    if tokenizer.eos_id is not None:
        return Documents((), (tokenizer.eos_id,), recorded)
    begin = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    return Documents(begin, (), recorded)


def recorded_documents(run: dict[str, Any], tokenizer: Any) -> Documents:
    """Documents of the data that trained a model, by the "run" of its record.

    A record from before this was recorded has none: then `recorded` is False. Raises: ValueError for a damaged record.
    """
    described = run.get("documents")
    if described is None:
        return prepared_documents(tokenizer, recorded=False)
    try:
        begin, end = (tuple(described[name]) for name in ("begin", "end"))
    except (KeyError, TypeError) as e:
        raise ValueError(
            f"the record's documents are {described!r}: they must have a begin and an end."
        ) from e
    for token in (*begin, *end):
        if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
            raise ValueError(
                f"the record's documents name {token!r}, which is no token of {tokenizer.vocab_size:,}."
            )
    return Documents(begin, end)


def documents_in(corpora: Iterable[Any], tokenizer: Any) -> Documents | None:
    """Documents as they are in corpora (`TokenCorpus`), also in shards that something else made. None if they begin or end in
    several ways."""
    first_tokens = set()
    last_tokens = set()
    for corpus in corpora:
        for shard in corpus.shards:
            # Documents that lie evenly over the shard.
            count = min(len(shard), 1 + SAMPLES // len(corpus.shards))
            for i in range(count):
                document = shard[i * len(shard) // count]
                if len(document):
                    first_tokens.add(int(document[0]))
                    last_tokens.add(int(document[-1]))
    begin = first_tokens & {tokenizer.bos_id}
    end = last_tokens & {tokenizer.eos_id}
    if begin not in (set(), first_tokens) or end not in (set(), last_tokens):
        return None  # only some documents have the token
    return Documents(tuple(begin), tuple(end))
