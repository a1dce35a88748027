"""Changes a tokenizer in memory so that no text yields certain tokens: those that end and begin documents.

A tokenizer gives such an id to text that spells the token's name if the name is matched before anything else (an added token
of Hugging Face that is not special, a user-defined symbol of SentencePiece), or if merges or whole words lead to it. Here
the name is taken out of every table that encoding looks at, and the id stays what it was: text that spells the name is
encoded in other pieces, as any other text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator

#: SentencePiece's ModelProto, by field number: its pieces, a piece's type; and the type of a control piece
_PIECES, _PIECE_TYPE = 1, 3
_CONTROL = 3
#: kinds of a protocol buffer's field: a number, or so many bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def unspellable_json(content: str, tokens: Collection[str]) -> tuple[str, dict[str, str]]:
    """A `tokenizer.json` in which no text meets `tokens`: (its new content, new name of each token).

    Tokens get names of 128 random bits, and merges that make them or go on from them are dropped. Where one of them also
    stands for unknown text, unknown text still yields it.
    """
    tokenizer = json.loads(content)
    names = {token: f"<{secrets.token_hex(16)}>" for token in tokens}
    for added in tokenizer["added_tokens"]:
        if added["content"] in names:
            # ids of added tokens follow from their order, so it keeps its place; special ones are not looked for in text
            added.update(content=names[added["content"]], special=True, normalized=False)
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        skipped = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            (left, right)
            for left, right in (tuple(pair.split(" ")) if isinstance(pair, str) else pair for pair in model["merges"])
            if not {left, right, left + right[skipped:]} & names.keys()
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokenizer["post_processor"] = None  # it adds tokens, which nobody asks for, by their old names
    return json.dumps(tokenizer), names


def unspellable_proto(model: bytes, ids: Collection[int]) -> bytes:
    """A serialised SentencePiece model whose pieces `ids` are control pieces, which no text yields."""
    out, number = bytearray(), 0
    for start, body, end, field in _fields(model):
        if field != _PIECES:
            out += model[start:end]
            continue
        piece = model[body:end]
        if number in ids:
            piece += bytes([_PIECE_TYPE << 3 | _VARINT, _CONTROL])  # of a field that comes twice, the last counts
        out += bytes([_PIECES << 3 | _BYTES]) + _varint(len(piece)) + piece
        number += 1
    return bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """(start, start of its content, end, number) of each field of a serialised protocol buffer."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        body = at
        if tag & 7 == _VARINT:
            _, at = _read_varint(message, at)
        elif tag & 7 == _BYTES:
            size, body = _read_varint(message, at)
            at = body + size
        else:
            at += {_FIXED64: 8, _FIXED32: 4}[tag & 7]
        yield start, body, at, tag >> 3


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """(number, where it ends)."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
