"""Any of our tokenizers as the files that transformers' AutoTokenizer loads: tokenizer.json and tokenizer_config.json.

The class is named PreTrainedTokenizerFast, which takes the file as it is; LlamaTokenizer would build another from it.
Text that names control tokens stays text (split_special_tokens), and no BOS is added: the model was trained so.
"""

import itertools
import json
import re
from pathlib import Path

from interdomain.data.tokenizer import SPACE, SentencePieceTokenizer
from interdomain.data.tokenizer_json import CONFIG_FILE, SPECIALS, JsonTokenizer
from interdomain.data.tokenizer_tiktoken import TiktokenTokenizer
from interdomain.folders import write_whole

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # sentencepiece's types of pieces
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
        "1234567 3.14 0x0A",
        "\ufffd",
    ),
    *(
        "<s> </s> <unk> <0x0A> <|endoftext|>",
        "don't WE'LL",
        "🙂👩‍👩‍👧🇯🇵",
        "漢字 ελληνικά עברית e\u0301",
        "aaaaaaaaaaa     !!!!!!",
    ),
    "def f(x):\n    if x:\n        return  x[0]\n\n\n# ...",
)


def write_for_transformers(tokenizer, folder):
    """Writes both files into `folder`.

    Raises: NotImplementedError, having written nothing, if the tokenizer is of a kind that has no exact counterpart; the
        counterpart is compared with the original over a set of texts, and over every token.
    """
    try:
        import tokenizers
    except ImportError as e:
        raise NotImplementedError("the tokenizers library is not installed") from e
    kinds = {SentencePieceTokenizer: _from_sentencepiece, TiktokenTokenizer: _from_tiktoken, JsonTokenizer: _from_json}
    described = kinds[type(tokenizer)](tokenizer)
    made = tokenizers.Tokenizer.from_str(json.dumps(described))
    _compare(tokenizer, made, described["added_tokens"])
    ids = (tokenizer.bos_id, tokenizer.eos_id, padding_id(tokenizer), tokenizer.unk_id)
    by_name = zip(SPECIALS, ids, strict=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: made.id_to_token(token) for name, token in by_name if token is not None},
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    for name, contents in (("tokenizer.json", described), (CONFIG_FILE, config)):
        write_whole(Path(folder) / name, (json.dumps(contents, ensure_ascii=False, indent=1) + "\n").encode())


def refuse_in_transformers(folder):
    """Makes AutoTokenizer refuse `folder`: from a .model alone transformers 5 builds a tokenizer of its own, with other ids.

    The class that the configuration names is in no file; the error has the file's name.
    """
    config = {"auto_map": {"AutoTokenizer": ["no_exact_tokenizer_for_transformers.Refused", None]}}
    write_whole(Path(folder) / CONFIG_FILE, (json.dumps(config, indent=1) + "\n").encode())


def padding_id(tokenizer):
    """The token that stands for padding in transformers; where there is none, one that no text encodes to. None: none is left.

    Not the end of text, if there is another: what fine-tunes a model leaves padding out of the loss.
    """
    return next((i for i in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.eos_id) if i is not None), None)


def _compare(tokenizer, made, added):
    made.encode_special_tokens = True
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    pairs = map("".join, itertools.pairwise(tokens))
    texts = [
        *PROBES,
        *(token["content"] for token in added),
        *(" ".join(pair) for pair in itertools.pairwise(PROBES)),
        *tokens,
        *pairs,
    ]
    # One thread: tiktoken's are five times as slow over so many short texts.
    ours = tokenizer.encode_batch(texts, num_threads=1)
    theirs = made.encode_batch_fast(texts, add_special_tokens=False)
    decoded = made.decode_batch(ours)
    for text, wanted, found, again in zip(texts, ours, theirs, decoded, strict=True):
        if wanted != found.ids or again != tokenizer.decode(wanted):
            raise NotImplementedError(f"the conversion differs from the original, for one in the text {text[:40]!r}")
    for token in added:
        if made.token_to_id(token["content"]) != token["id"]:
            raise NotImplementedError(
                f"the conversion gives the token {token['content']!r} another id than {token['id']}"
            )


def _described(vocab, merges, **parts):
    """A tokenizer.json around a BPE model."""
    names = ("truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **{name: parts.get(name) for name in ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")},
        "vocab": vocab,
        "merges": merges,
    }
    return {"version": "1.0", **{name: parts.get(name) for name in names}, "model": model}


def _special(token_id, content):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


# sentencepiece


def _from_sentencepiece(tokenizer):
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as e:
        raise NotImplementedError("the protobuf library, which reads a sentencepiece model, is not installed") from e
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(tokenizer.data)
    normalizer = model.normalizer_spec
    if (
        model.trainer_spec.model_type != model.trainer_spec.BPE
        or not model.trainer_spec.byte_fallback
        or normalizer.precompiled_charsmap
        or normalizer.remove_extra_whitespaces
        or not normalizer.escape_whitespaces
        or {piece.type for piece in model.pieces} - {NORMAL, UNKNOWN, CONTROL, BYTE}
    ):
        raise NotImplementedError(
            "only sentencepiece BPE models with byte fallback, unchanged text and no user-defined pieces (Llama 2's are "
            "such) have an exact counterpart"
        )
    vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
    # sentencepiece joins any two neighbours whose join is a piece, the best score first: every split of every piece is
    # a merge, in that order.
    merges = []
    for i, piece in enumerate(model.pieces):
        if piece.type == NORMAL:
            text = piece.piece
            splits = ((text[:n], text[n:]) for n in range(1, len(text)))
            splits = [(vocab[a], vocab[b], a, b) for a, b in splits if _is_normal(model, vocab, a, b)]
            merges += [(-piece.score, i, *split) for split in sorted(splits)]
    prefix = [{"type": "Prepend", "prepend": SPACE}] if normalizer.add_dummy_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if normalizer.add_dummy_prefix else []
    control = [(i, piece.piece) for i, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, CONTROL)]
    return _described(
        vocab,
        [[a, b] for *_, a, b in sorted(merges, key=lambda merge: merge[0])],
        unk_token=None if tokenizer.unk_id is None else model.pieces[tokenizer.unk_id].piece,
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=False,
        added_tokens=[_special(*token) for token in control],
        normalizer={
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
    )


def _is_normal(model, vocab, *texts):
    return all(text in vocab and model.pieces[vocab[text]].type == NORMAL for text in texts)


# tiktoken


def _from_tiktoken(tokenizer):
    characters = _byte_characters()
    ranks = tokenizer.ranks
    name = {token: "".join(characters[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        splits = ((token[:n], token[n:]) for n in range(1, len(token)))
        merges += [(rank, ranks[a], ranks[b], name[a], name[b]) for a, b in splits if a in ranks and b in ranks]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    # Another engine reads the pattern there: to it X{1,3}+ is (X{1,3})+ and not possessive. Elsewhere + is as here.
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", tokenizer.pattern)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _described(
        # Control tokens too: to those that are not in this table the library gives ids from its size on, taken or not.
        {**tokenizer.specials, **{name[token]: rank for token, rank in ranks.items()}},
        [[a, b] for *_, a, b in sorted(merges)],
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=True,
        added_tokens=[_special(i, text) for text, i in sorted(tokenizer.specials.items(), key=lambda item: item[1])],
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]},
        decoder=byte_level,
    )


def _byte_characters():
    """The character that stands for each byte in byte-level vocabularies: itself where it can be seen, else from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = (b for b in range(256) if b not in seen)
    return {b: chr(b) for b in seen} | {b: chr(256 + i) for i, b in enumerate(unseen)}


# Hugging Face


def _from_json(tokenizer):
    described = tokenizer.described()
    described |= {"truncation": None, "padding": None, "post_processor": None}  # which adds BOS in many files
    return described
