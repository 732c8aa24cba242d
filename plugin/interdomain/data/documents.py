"""How documents begin and end in training data: `Documents(begin=(1,), end=(2,))`.

Loaders differ. `prepare-data` writes a text and EOS; TorchTitan's loader writes BOS, a text and
EOS. A model expects the same tokens before a text as in training. So a run records them in
interdomain.json, under "documents".
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SAMPLES = 1000  # documents of a corpus that `documents_in` looks at, at least one in each shard


@dataclass(frozen=True)
class Documents:
    """The tokens around the text of every document.

    Attributes:
        begin: Ids before the text.
        end: Ids after the text.
        recorded: False if the model's record does not say; then these are the tokens that
            `prepare-data` writes.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    recorded: bool = True

    @property
    def start(self) -> list[int]:
        """The ids before a first text: those that begin a document, or else those that end one."""
        return list(self.begin or self.end)

    @property
    def stop(self) -> int | None:
        """The id that shows that a text is over: the first after it. None if there is none."""
        return next(iter(self.end + self.begin), None)

    def to_dict(self) -> dict[str, list[int]]:
        """Returns the form in records. `recorded_documents` is the inverse."""
        return {"begin": list(self.begin), "end": list(self.end)}


def prepared_documents(tokenizer: Any, recorded: bool = True) -> Documents:
    """Returns the tokens that `prepare-data` writes.

    A tokenizer without an EOS token cannot prepare data. Then a text begins with BOS, if there is
    one.

    Args:
        tokenizer: A Tokenizer.
        recorded: False if a model's record does not say what its documents are like.
    """
    if tokenizer.eos_id is not None:
        return Documents((), (tokenizer.eos_id,), recorded)
    if tokenizer.bos_id is not None:
        return Documents((tokenizer.bos_id,), (), recorded)
    return Documents((), (), recorded)


def recorded_documents(run: dict[str, Any], tokenizer: Any) -> Documents:
    """Returns the tokens around documents in the data that trained a model.

    Args:
        run: "run" in the model's record. Old records have no "documents"; then `recorded` is False
            in the result.
        tokenizer: The model's Tokenizer.
    """
    described = run.get("documents")
    if described is None:
        return prepared_documents(tokenizer, recorded=False)
    return Documents(tuple(described["begin"]), tuple(described["end"]))


def documents_in(corpora: Iterable[Any], tokenizer: Any) -> Documents | None:
    """Finds the tokens around documents in corpora, also in shards that another program wrote.

    Args:
        corpora: TokenCorpus objects.
        tokenizer: Their Tokenizer.

    Returns:
        The tokens, or None if documents begin or end in several ways.
    """
    # Collect the first and the last token of many documents.
    first_tokens = set()
    last_tokens = set()
    for corpus in corpora:
        for shard in corpus.shards:
            # Look at documents that lie evenly over the shard.
            count = min(len(shard), 1 + SAMPLES // len(corpus.shards))
            for i in range(count):
                document = shard[i * len(shard) // count]
                if len(document):
                    first_tokens.add(int(document[0]))
                    last_tokens.add(int(document[-1]))
    begin = first_tokens & {tokenizer.bos_id}
    end = last_tokens & {tokenizer.eos_id}
    # A token that is there must be in all documents.
    if begin and first_tokens != begin:
        return None
    if end and last_tokens != end:
        return None
    return Documents(tuple(begin), tuple(end))
