"""Writes tokenizers for transformers' AutoTokenizer: tokenizer.json and tokenizer_config.json.

The configuration names the class PreTrainedTokenizerFast, which takes tokenizer.json as it is;
LlamaTokenizer would build another tokenizer from it. Text that names control tokens stays text
(split_special_tokens). No BOS is added: the model card says how a text begins. transformers' own
LlamaConverter cannot be used, because it needs one of transformers' classes and not a model file.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from interdomain.data.tokenizer import CONFIG_FILE, SPECIALS, Tokenizer
from interdomain.folders import write_atomically

# Texts that conversions get wrong: spaces, control characters and tokens, digits, repeats, scripts,
# parts of characters.
PROBES = (
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
    "1234567 3.14 0x0A",
    "<s> </s> <unk> <0x0A> <|endoftext|>",
    "don't WE'LL",
    "🙂👩‍👩‍👧🇯🇵",
    "漢字 ελληνικά עברית e\u0301",
    "aaaaaaaaaaa     !!!!!!",
    "def f(x):\n    if x:\n        return  x[0]\n\n\n# ...",
)


def write_for_transformers(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Writes both files into `folder`.

    Raises:
        NotImplementedError: The tokenizer has no exact counterpart. Nothing was written. The
            counterpart is compared with the original over every token and a set of texts.
    """
    try:
        made = tokenizer.converted()
    except ImportError as e:
        raise NotImplementedError(f"the library {e.name} is not installed") from e
    contents = json.loads(made.to_str())
    _compare(tokenizer, made, contents["added_tokens"])

    # The control tokens are named by their text.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    ids = (tokenizer.bos_id, tokenizer.eos_id, padding_id(tokenizer), tokenizer.unk_id)
    for name, token_id in zip(SPECIALS, ids, strict=True):
        if token_id is not None:
            config[name] = made.id_to_token(token_id)
    config |= {
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    _write_json(Path(folder) / "tokenizer.json", contents)
    _write_json(Path(folder) / CONFIG_FILE, config)


def refuse_in_transformers(folder: Path | str) -> None:
    """Makes AutoTokenizer refuse `folder`, which has a tokenizer without an exact counterpart.

    Without this, transformers 5 builds another tokenizer from a .model file.
    The configuration names a class in a file that does not exist. The error of transformers shows
    that file's name.
    """
    config = {"auto_map": {"AutoTokenizer": ["no_exact_tokenizer_for_transformers.Refused", None]}}
    _write_json(Path(folder) / CONFIG_FILE, config)


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    text = json.dumps(contents, ensure_ascii=False, indent=1) + "\n"
    write_atomically(path, text.encode())


def padding_id(tokenizer: Tokenizer) -> int | None:
    """Returns the id that transformers uses for padding.

    If there is no padding token, it is a token that no text encodes to.
    The end of text comes last, because programs that fine-tune a model leave padding out of the
    loss.
    """
    for token_id in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.eos_id):
        if token_id is not None:
            return token_id
    return None


def _compare(tokenizer: Tokenizer, made: Any, added_tokens: list[dict]) -> None:
    """Raises NotImplementedError if a conversion encodes or decodes one of many texts differently.

    Args:
        tokenizer: The original.
        made: The conversion, a `tokenizers.Tokenizer`.
        added_tokens: The conversion's control tokens, as in tokenizer.json.
    """
    made.encode_special_tokens = True
    # The texts are: probes, control tokens, all tokens, and pairs of neighbours of tokens and of
    # probes.
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    texts = [*PROBES, *(token["content"] for token in added_tokens), *tokens]
    for pair in itertools.pairwise(tokens):
        texts.append("".join(pair))
    for pair in itertools.pairwise(PROBES):
        texts.append(" ".join(pair))

    # Compare the ids of each text, and the text that these decode to.
    ids = [tokenizer.encode(text) for text in texts]
    made_encodings = made.encode_batch_fast(texts, add_special_tokens=False)
    made_texts = made.decode_batch(ids)
    for i, text in enumerate(texts):
        same_ids = made_encodings[i].ids == ids[i]
        same_text = made_texts[i] == tokenizer.decode(ids[i])
        if not same_ids or not same_text:
            raise NotImplementedError(
                f"the conversion differs from the original, for one in the text {text[:40]!r}"
            )
