"""Stop strings of a tokenizer: the table by which rows end at them, and texts of responses without them."""

import re
from collections.abc import Sequence
from dataclasses import replace

from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Ids, Response, Stop
from jrlhf.errors import UserError
from jrlhf.models.generation.stops import stop_table

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of one byte, of vocabularies with "byte fallback"
# The letter that stands for each byte in byte-level vocabularies, such as GPT-2's.
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_LETTERS = {chr(byte): byte for byte in _SHOWN} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


def with_stop(tokenizer: Tokenizer, texts: Sequence[str], *, keep: bool) -> Tokenizer:
    """Returns a tokenizer whose responses end at these texts. keep: they stay in the text of a response.

    Raises UserError for a text with a special token, which the text of a response lacks.
    """
    if not texts:
        return replace(tokenizer, stop=None)
    for special in [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special]:
        for text in [text for text in texts if special in text]:
            raise UserError(
                f"stop={text!r} holds the special token {special!r}, which texts of responses lack: let responses end "
                "at that token, by data.eos (jrlhf.generate: stop_ids)"
            )
    table = stop_table([text.encode() for text in texts], token_bytes(tokenizer))
    return replace(tokenizer, stop=Stop(tuple(texts), keep, table))


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Returns for each id the bytes that its token adds to a text, in which a letter comes before it.

    They are those of the decoder's text. A token with a part of a character has no text; its bytes are in its name.
    """
    backend, ids = tokenizer.backend, tokenizer.encode("a")[-1:]
    begun = tokenizer.decode(ids)
    texts = backend.decode_batch([[*ids, token] for token in range(tokenizer.vocab_size)], skip_special_tokens=True)
    return [
        text.removeprefix(begun).encode() if "\ufffd" not in text else _named_bytes(str(backend.id_to_token(token)))
        for token, text in enumerate(texts)
    ]


def _named_bytes(name: str) -> bytes:
    """Returns the bytes that a token's name stands for, in a vocabulary of bytes; else the name's own."""
    if (byte := _BYTE.fullmatch(name)) is not None:
        return bytes([int(byte[1], 16)])
    return bytes(_LETTERS[letter] for letter in name) if _LETTERS.keys() >= {*name} else name.encode()


def without_stop(tokenizer: Tokenizer, prompt: Sequence[int], response: Response) -> Response:
    """Returns a finished response whose texts end before the stop string that its last token completed, if one did."""
    stop, ids = tokenizer.stop, response.ids
    if stop is None or stop.keep or ids[-1] in tokenizer.eos_ids:
        return response
    marked = None if response.marked is None else _cut(tokenizer, stop, prompt, ids, response.marked, special=True)
    return replace(response, text=_cut(tokenizer, stop, prompt, ids, response.text), marked=marked)


def _cut(tokenizer: Tokenizer, stop: Stop, prompt: Sequence[int], ids: Ids, text: str, *, special: bool = False) -> str:
    """Returns the text up to the first stop string that ends within its last token."""
    before = len(tokenizer.continuation(prompt, ids[:-1], special=special).rstrip("\ufffd"))
    starts = [text.find(one, max(before - len(one) + 1, 0)) for one in stop.texts]
    return text[: min((start for start in starts if start >= 0), default=len(text))]


def shown(stop: Stop | None, text: str) -> str:
    """Returns what of a growing text is no beginning of a stop string, and may be shown."""
    if stop is None or stop.keep:
        return text
    begun = (end for one in stop.texts for end in range(len(one) - 1, 0, -1) if text.endswith(one[:end]))
    return text[: len(text) - max(begun, default=0)]
