"""Tokenizers as the files that transformers' AutoTokenizer loads: tokenizer.json and tokenizer_config.json.

The class is named PreTrainedTokenizerFast, which takes the file as it is; LlamaTokenizer would build another from it.
Text that names control tokens stays text (split_special_tokens). No BOS is added: the model card says what a text begins with.
transformers' own converters are not used: TikTokenConverter gives control tokens and long numbers other ids, and
LlamaConverter wants one of transformers' classes, not a model file.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from interdomain.data.tokenizer import CONFIG_FILE, SPECIALS, Tokenizer
from interdomain.folders import write_whole

# What conversions go wrong at: spaces, control characters and tokens, digits, repeats, scripts, half characters' bytes.
PROBES = (
    *(
        "",
        " ",
        "  a  b ",
        "\n",
        " \n\n x\r\n\ty",
        "a b",
        " a",
        "\u2581",
        "\ufeff\0\u00a0\u3000",
        "\ufffd",
    ),
    *("1234567 3.14 0x0A", "<s> </s> <unk> <0x0A> <|endoftext|>", "don't WE'LL", "🙂👩‍👩‍👧🇯🇵"),
    *(
        "漢字 ελληνικά עברית e\u0301",
        "aaaaaaaaaaa     !!!!!!",
        "def f(x):\n    if x:\n        return  x[0]\n\n\n# ...",
    ),
)


def write_for_transformers(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Writes both files into `folder`.

    Raises: NotImplementedError, having written nothing, if the tokenizer is of a kind that has no exact counterpart; the
        counterpart is compared with the original over a set of texts, and over every token.
    """
    try:
        made = tokenizer.converted()
    except ImportError as e:
        raise NotImplementedError(f"the library {e.name} is not installed") from e
    contents = json.loads(made.to_str())
    _compare(tokenizer, made, contents["added_tokens"])
    ids = (tokenizer.bos_id, tokenizer.eos_id, padding_id(tokenizer), tokenizer.unk_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            name: made.id_to_token(i)
            for name, i in zip(SPECIALS, ids, strict=True)
            if i is not None
        },
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    for name, described in (("tokenizer.json", contents), (CONFIG_FILE, config)):
        write_whole(
            Path(folder) / name,
            (json.dumps(described, ensure_ascii=False, indent=1) + "\n").encode(),
        )


def refuse_in_transformers(folder: Path | str) -> None:
    """Makes AutoTokenizer refuse `folder`: from a .model alone transformers 5 builds a tokenizer of its own, with other ids.

    The class that the configuration names is in no file; the error has the file's name.
    """
    config = {"auto_map": {"AutoTokenizer": ["no_exact_tokenizer_for_transformers.Refused", None]}}
    write_whole(Path(folder) / CONFIG_FILE, (json.dumps(config, indent=1) + "\n").encode())


def padding_id(tokenizer: Tokenizer) -> int | None:
    """The token that stands for padding in transformers; where there is none, one that no text encodes to.

    Not the end of text, if there is another: what fine-tunes a model leaves padding out of the loss.
    """
    return next(
        (i for i in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.eos_id) if i is not None), None
    )


def _compare(tokenizer: Tokenizer, made: Any, added: list[dict]) -> None:
    made.encode_special_tokens = True
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    texts = [
        *PROBES,
        *(token["content"] for token in added),
        *tokens,
        *map("".join, itertools.pairwise(tokens)),
    ]
    texts += [" ".join(pair) for pair in itertools.pairwise(PROBES)]
    ours = [tokenizer.encode(text) for text in texts]
    theirs = made.encode_batch_fast(texts, add_special_tokens=False)
    for text, ids, encoding, decoded in zip(
        texts, ours, theirs, made.decode_batch(ours), strict=True
    ):
        if ids != encoding.ids or decoded != tokenizer.decode(ids):
            raise NotImplementedError(
                f"the conversion differs from the original, for one in the text {text[:40]!r}"
            )
