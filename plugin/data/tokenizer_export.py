"""Any of our tokenizers as the files that transformers' AutoTokenizer loads: tokenizer.json and tokenizer_config.json.

The class is named PreTrainedTokenizerFast, which takes the file as it is; LlamaTokenizer would build another from it.
Text that names control tokens stays text (split_special_tokens), and no BOS is added: the model was trained so.

These are not transformers' converters: TikTokenConverter numbers control tokens anew (cl100k_base's <|endofprompt|> is
100276, not 100261) and gives long numbers other ids, for it takes the pattern's {1,3}+ as it is; LlamaConverter wants one
of transformers' classes, not a model file; and neither is there on a machine that has only what training needs.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from interdomain.data.tokenizer_base import Tokenizer
from interdomain.data.tokenizer_json import CONFIG_FILE, SPECIALS, JsonTokenizer
from interdomain.data.tokenizer_sentencepiece import SentencePieceTokenizer
from interdomain.data.tokenizer_tiktoken import TiktokenTokenizer
from interdomain.folders import write_whole

SPACE = "\u2581"  # sentencepiece's visible space
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # sentencepiece's types of pieces
# What conversions go wrong at: spaces, control characters and tokens, digits, repeats, scripts, half characters' bytes.
PROBES = (
    *("", " ", "  a  b ", "\n", " \n\n x\r\n\ty", "a b", " a", "\u2581", "\ufeff\0\u00a0\u3000", "\ufffd"),
    *("1234567 3.14 0x0A", "<s> </s> <unk> <0x0A> <|endoftext|>", "don't WE'LL", "🙂👩‍👩‍👧🇯🇵"),
    *("漢字 ελληνικά עברית e\u0301", "aaaaaaaaaaa     !!!!!!", "def f(x):\n    if x:\n        return  x[0]\n\n\n# ..."),
)


def write_for_transformers(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Writes both files into `folder`.

    Raises: NotImplementedError, having written nothing, if the tokenizer is of a kind that has no exact counterpart; the
        counterpart is compared with the original over a set of texts, and over every token.
    """
    try:
        made = _converted(tokenizer)
    except ImportError as e:
        raise NotImplementedError(f"the library {e.name} is not installed") from e
    contents = json.loads(made.to_str())
    _compare(tokenizer, made, contents["added_tokens"])
    ids = (tokenizer.bos_id, tokenizer.eos_id, padding_id(tokenizer), tokenizer.unk_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: made.id_to_token(i) for name, i in zip(SPECIALS, ids, strict=True) if i is not None},
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    for name, described in (("tokenizer.json", contents), (CONFIG_FILE, config)):
        write_whole(Path(folder) / name, (json.dumps(described, ensure_ascii=False, indent=1) + "\n").encode())


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
    return next((i for i in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.eos_id) if i is not None), None)


def _converted(tokenizer: Tokenizer) -> Any:
    import tokenizers

    if isinstance(tokenizer, SentencePieceTokenizer):
        return _from_sentencepiece(tokenizer)
    if isinstance(tokenizer, TiktokenTokenizer):
        return _from_tiktoken(tokenizer)
    assert isinstance(tokenizer, JsonTokenizer)
    # The post-processor adds BOS in many files.
    described = tokenizer.described | {"truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(described))


def _compare(tokenizer: Tokenizer, made: Any, added: list[dict]) -> None:
    made.encode_special_tokens = True
    tokens = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    texts = [*PROBES, *(token["content"] for token in added), *tokens, *map("".join, itertools.pairwise(tokens))]
    texts += [" ".join(pair) for pair in itertools.pairwise(PROBES)]
    # One thread: tiktoken's are five times as slow over so many short texts.
    ours = tokenizer.encode_batch(texts, num_threads=1)
    theirs = made.encode_batch_fast(texts, add_special_tokens=False)
    for text, wanted, found, again in zip(texts, ours, theirs, made.decode_batch(ours), strict=True):
        if wanted != found.ids or again != tokenizer.decode(wanted):
            raise NotImplementedError(f"the conversion differs from the original, for one in the text {text[:40]!r}")


def _from_sentencepiece(tokenizer: SentencePieceTokenizer) -> Any:
    import tokenizers
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import decoders, normalizers

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
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
    normal = {piece.piece for piece in model.pieces if piece.type == NORMAL}
    # sentencepiece joins any two neighbours whose join is a piece, the best score first: every split of every piece is
    # a merge, in that order.
    merges = []
    for piece in sorted((p for p in model.pieces if p.type == NORMAL), key=lambda p: -p.score):
        splits = ((piece.piece[:n], piece.piece[n:]) for n in range(1, len(piece.piece)))
        merges += sorted((s for s in splits if normal.issuperset(s)), key=lambda s: (vocab[s[0]], vocab[s[1]]))
    unknown = None if tokenizer.unk_id is None else model.pieces[tokenizer.unk_id].piece
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend(SPACE)] if normalizer.add_dummy_prefix else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens(_special(p.piece for p in model.pieces if p.type in (UNKNOWN, CONTROL)))
    return made


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> Any:
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    # The character that stands for each byte in byte-level vocabularies: itself where it can be seen, else from 256 on.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    character = {b: chr(b) for b in seen} | {b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*seen}))}
    ranks = tokenizer.ranks
    name = {token: "".join(character[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        splits = ((token[:n], token[n:]) for n in range(1, len(token)))
        merges += [(rank, ranks[a], ranks[b], name[a], name[b]) for a, b in splits if a in ranks and b in ranks]
    # Control tokens too: to those that are not in this table the library gives ids from its size on, taken or not.
    vocab = tokenizer.specials | {name[token]: rank for token, rank in ranks.items()}
    pairs = [(a, b) for *_, a, b in sorted(merges)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs, ignore_merges=True))
    # Another engine reads the pattern there: to it X{1,3}+ is (X{1,3})+ and not possessive. Elsewhere + is as here.
    pattern = tokenizers.Regex(re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", tokenizer.pattern))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_special(sorted(tokenizer.specials, key=lambda text: tokenizer.specials[text])))
    return made


def _special(contents: Any) -> list:
    import tokenizers

    return [tokenizers.AddedToken(text, normalized=False, special=True) for text in contents]
