"""The text of a response: what it adds to the text of its prompt, for decoders of every kind."""

import random
import re
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jrlhf.data.batches import read_responses
from jrlhf.data.encode import answer_gap, encode_answered
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.data.types import Example, Response
from jrlhf.rewards.types import to_samples

from .conftest import FAMILY, assistant, encode_chat, user

TEXTS = (
    "How many eggs? 16 - 3 = 13",
    "def f(x):\n    if x:\n\treturn x\n",
    "é 日本語、🎈🎈 naïve — œuvre",
    "  two  blanks   three    four",
    "don't stop . the cat sat on the mat !",
)
ENDS = ["<s>", "</s>", "<unk>"]


def trained(model, trainer, before, decoder) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = before, decoder
    backend.train_from_iterator(TEXTS * 5, trainer)
    return backend


def bytewise(*more) -> tokenizers.Tokenizer:
    """Letters, and bytes for all else, decoded as by Llama 2."""
    tokens = [*ENDS, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more
    backend.decoder = decoders.Sequence(list(steps))
    backend.add_special_tokens(ENDS)
    return backend


def kinds() -> Iterator[tuple[str, Tokenizer]]:
    yield from FAMILY.items()
    of_size = {"vocab_size": 150, "special_tokens": ENDS, "show_progress": False}
    backends = {"bytes": bytewise(), "bytes, strip": bytewise(decoders.Strip(" ", 1, 0))}
    for scheme in ("always", "first", "never"):
        trainer = trainers.UnigramTrainer(**of_size, unk_token="<unk>")
        metaspaces = (library.Metaspace(prepend_scheme=scheme) for library in (pre_tokenizers, decoders))
        backends[scheme] = trained(models.Unigram(), trainer, *metaspaces)
    pieces = trainers.WordPieceTrainer(**of_size)
    words = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    backends["pieces"] = trained(models.WordPiece(unk_token="<unk>"), pieces, *words)
    suffixed = trainers.BpeTrainer(**of_size, end_of_word_suffix="</w>")
    suffixes = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    backends["suffixes"] = trained(model, suffixed, *suffixes)
    for name, backend in backends.items():
        yield name, Tokenizer(backend, (ENDS.index("</s>"),))


def test_a_response_is_what_it_adds_to_its_prompt():
    """At every border of two tokens, of texts and of random tokens."""
    rng = random.Random(0)
    for name, tokenizer in kinds():
        drawn = [rng.choices(range(tokenizer.vocab_size), k=rng.randrange(1, 30)) for _ in range(40)]
        for ids in (*map(tokenizer.encode, TEXTS), *drawn):
            whole = tokenizer.decode(ids)
            for border in range(len(ids) + 1):
                text, before = tokenizer.continuation(ids[:border], ids[border:]), tokenizer.decode(ids[:border])
                assert whole.endswith(text), (name, ids, border)
                if whole.startswith(before):
                    assert before + text == whole, (name, ids, border)
                else:  # tokens on both sides make a character, or broken bytes: those belong to the response
                    assert whole == commonprefix((before, whole)) + text, (name, ids, border)
                    assert "\ufffd" in before + text


def rollout_of(prompt: Sequence[int], *rows: Sequence[int | None]) -> SimpleNamespace:
    """Returns a rollout on the host, of the rows as responses to one prompt."""
    width = len(prompt) + max(map(len, rows))
    return SimpleNamespace(
        tokens=np.array([[*prompt, *row, *[0] * (width - len(prompt) - len(row))] for row in rows]),
        prompt_lengths=np.full(len(rows), len(prompt)),
        response_lengths=np.array([len(row) for row in rows]),
        finished=np.ones(len(rows), bool),
    )


def test_blanks_and_characters_at_the_border():
    cases = (
        ("mistral", "the cat", " sat"),
        ("mistral", "def f():\n", "    return"),
        ("mistral", "a ", " b"),
        ("llama", "16", " é"),
        ("gemma", "It is", " 4"),
    )
    for name, prompt, text in cases:
        tokenizer = FAMILY[name]
        ids = tokenizer.encode(prompt + text)
        border = next(n for n in range(len(ids) + 1) if tokenizer.decode(ids[:n]) == prompt)
        (response,) = read_responses(tokenizer, rollout_of(ids[:border], ids[border:]))
        assert response.text == text, (name, prompt)
    llama = FAMILY["llama"]
    ids = llama.encode("16 é")
    (response,) = read_responses(llama, rollout_of(ids[:-1], ids[-1:]))
    assert llama.decode(ids[:-1]) == "16 \ufffd" and response.text == "é"


def test_nothing_but_the_tokenizer_decodes_responses():
    """A module that decoded ids by itself would lose what the prompt says about them."""
    core = Path(__file__).parents[3] / "jrlhf"
    calls = {
        str(file.relative_to(core))
        for folder in ("algorithms", "data", "fleet", "report", "rewards", "roles", "planning", "stages", "tasks", ".")
        for file in (core / folder).glob("*.py")
        if re.search(r"(tokenizer|backend|self)\.decode(_batch)?\(", file.read_text(encoding="utf-8"))
    }
    # The second one decodes single tokens, the third one shows a prompt, and the last one special tokens out of place.
    assert calls == {"data/tokenizer.py", "data/stops.py", "planning/dryrun.py", "data/rendering.py"}


def test_long_prompts_are_not_decoded_again():
    mistral, decoded = FAMILY["mistral"], []

    class Watched(Tokenizer):
        def decode(self, ids, *, special=False):
            decoded.append(len(ids))
            return super().decode(ids, special=special)

    ids = mistral.encode("How many eggs? " * 500)
    watched = Watched(mistral.backend, mistral.eos_ids)
    assert watched.continuation(ids, mistral.encode("How many")) == " How many"
    assert max(decoded) < 20


def test_special_tokens_are_kept_for_those_who_ask():
    qwen = FAMILY["qwen"]
    start, end, text = (qwen.backend.token_to_id(f"<|{name}|>") for name in ("im_start", "im_end", "endoftext"))
    assert qwen.eos_ids == (end, text) and qwen.pad_id == text and qwen.marks == {start}
    before, words = qwen.encode("How many?"), qwen.encode(" eggs")
    rows = [*words, start, *words, end], [start], words, [*words, end], [start, text, *words]
    plain = [" eggs eggs", "", " eggs", " eggs", " eggs"]
    marked = [" eggs<|im_start|> eggs", "<|im_start|>", None, None, "<|im_start|> eggs"]
    responses = read_responses(qwen, rollout_of(before, *rows))
    assert [(one.text, one.marked) for one in responses] == list(zip(plain, marked, strict=True))
    samples = to_samples([Example("How many?")] * len(rows), ["How many?"] * len(rows), responses)
    seen = [many or one for one, many in zip(plain, marked, strict=True)]
    assert [sample.marked.completion for sample in samples] == seen
    assert [sample.completion for sample in samples] == plain


def test_a_message_is_rendered_again_to_the_tokens_that_were_drawn():
    """A blank that the template writes before an answer is no part of the message, or it would be written twice."""
    assert {name: answer_gap(tokenizer) for name, tokenizer in FAMILY.items()} == {
        "qwen": "",
        "llama": "",
        "gemma": "",
        "mistral": "  ",  # one of the template, and one that begins the text after a special token
    }
    prompt = (user("How many eggs?"),)
    for name, tokenizer in FAMILY.items():
        for content in ("16 - 3 = 13", "é\n  b", "It is 4"):
            ids = encode_answered(tokenizer, prompt, (assistant(content),), cut=True)
            begun = encode_chat(tokenizer, prompt, add_generation_prompt=True)
            assert list(ids[: len(begun)]) == begun
            answer = ids[len(begun) :]
            response = Response(answer, tokenizer.continuation(begun, answer), True)
            (sample,) = to_samples([Example(prompt)], [""], [response], answer_gap(tokenizer))
            assert sample.completion == (assistant(content),), name
            assert encode_answered(tokenizer, prompt, sample.completion, cut=True) == ids


def test_a_text_model_reads_the_blank_that_the_policy_wrote():
    read = 0
    for name, tokenizer in kinds():
        plain = Tokenizer(tokenizer.backend, tokenizer.eos_ids)
        for begun, text in (("the cat", " sat"), ("the", " mat"), ("don't", " stop")):
            before, ids = plain.encode(begun), plain.encode(begun + text)
            if ids[: len(before)] == before and plain.decode(ids).lstrip() == begun + text:
                answer = plain.continuation(before, ids[len(before) :])
                assert answer == text and encode_answered(plain, begun, answer, finished=False) == tuple(ids), name
                read += 1
    assert read > 15
