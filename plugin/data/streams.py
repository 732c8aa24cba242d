"""Decoders that give text token by token, one per kind of tokenizer; `interdomain.data.StreamDecoder` is their door."""

import codecs


class SentencePieceStream:
    """Bytes that are no UTF-8 become U+FFFD each, and a control token ends a run of bytes."""

    def __init__(self, tokenizer):
        self._tokenizer, self._pending, self._at_start = tokenizer, b"", True

    def push(self, token_id):
        data = self._tokenizer.token_bytes(token_id, at_start=self._at_start)
        if data is None:
            return self.flush()
        self._at_start = False
        self._pending += data
        return self._take(final=False)

    def flush(self):
        return self._take(final=True)

    def _take(self, final):
        out, data, i = [], self._pending, 0
        while i < len(data):
            lead = data[i]
            size = 1 if lead < 0x80 else 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4
            part = data[i : i + size]
            # Not complete, and nothing so far speaks against it: the next token may bring the rest.
            if not final and len(part) < size and 0xC2 <= lead < 0xF5 and all(b & 0xC0 == 0x80 for b in part[1:]):
                break
            try:
                out.append(part.decode())
                i += size
            except UnicodeDecodeError:
                out.append("\ufffd")
                i += 1
        self._pending = data[i:]
        return "".join(out)


class ByteStream:
    """Bytes that are no UTF-8 become U+FFFD as `bytes.decode(errors="replace")` has it; control tokens end a run too."""

    def __init__(self, tokenizer):
        self._tokenizer, self._decoder = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id):
        data = self._tokenizer.token_bytes(token_id)
        return self.flush() if data is None else self._decoder.decode(data)

    def flush(self):
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For a decoder that is known only as a function of a list of ids: decodes the last few again with each new one.

    Text is given out when it no longer ends in U+FFFD, which more bytes may turn into a character.
    """

    LONGEST = 64  # ids; so many without a whole character are no text, and are not decoded again and again

    def __init__(self, decode):
        self._decode, self._context, self._new = decode, [], []

    def push(self, token_id):
        self._new.append(token_id)
        text = self._text()
        if text.endswith("\ufffd") and len(self._new) < self.LONGEST:
            return ""
        # A token without text (a control token) gives the next one no context: keep what came before it.
        if text:
            self._context, self._new = self._new, []
        return text

    def flush(self):
        text, self._context, self._new = self._text(), [*self._context, *self._new], []
        return text

    def _text(self):
        before = self._decode(self._context)
        return self._decode(self._context + self._new)[len(before) :]
