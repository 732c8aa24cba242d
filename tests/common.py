"""What the tests of several packages share."""

import os
from pathlib import Path

from interdomain.data.readers import read_documents
from interdomain.data.tokenizer import train_sentencepiece

REPOSITORY = Path(__file__).parent.parent
# Seconds after which a test gives up a process that it started: for one that hangs, not for a machine that is busy.
TIMEOUT = int(os.environ.get("INTERDOMAIN_TEST_TIMEOUT", "1800"))


def small_tokenizer(path: Path, vocab_size: int = 400) -> Path:
    """Bytes, and a few dozen pieces of the standard library's sources."""
    path.write_bytes(train_sentencepiece(read_documents(["stdlib"], max_bytes=60_000), vocab_size))
    return path
