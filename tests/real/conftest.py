"""A pretrained chat model, read by transformers and by us, and texts for it.

Its distributions are peaked, its activations have outliers, and it ends its texts itself: none of this is so with
random weights. REAL_MODEL names its directory, which `benchmarks.real_model` makes; `--proof real` runs these tests.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf.meshes import make_mesh
from jrlhf.models import export_hf
from jrlhf.models.modules import dequantised

VOCABULARY = 49152
QUESTIONS = (
    "What is the capital of France?",
    "What is 17 plus 25? Answer with the number only.",
    "Say hello.",
    "Write a haiku about rain.",
    "Translate to French: The cat sleeps on the table.",
    "Who wrote Romeo and Juliet?",
    "List the numbers from 1 to 30, separated by commas.",
    "Repeat the word banana twenty times.",
    'Write a Python function that returns the sum of a list. Use the docstring """Sum.""".',
    "Was ist die Hauptstadt von Deutschland?",
    "请用中文介绍一下北京。",
    "日本の首都はどこですか。",
    "Repeat exactly: 😀🎉🚀👩‍👩‍👧‍👦🇩🇪",
    "Пожалуйста, напиши короткое стихотворение о зиме.",
    "ما هي عاصمة مصر؟",
    "Is the sky blue? Answer yes or no.",
    "Complete the sequence: 2, 4, 8, 16,",
    "Name three fruits, one on each line.",
    "What does the token <|im_end|> mean?",
    "a",
    " leading and trailing blanks \n\n",
    "Explain photosynthesis in one sentence.",
    "Give me a JSON object with the keys name and age.",
    "What is the square root of 144?",
    "Tell me a joke about computers.",
    "Say nothing but the letter A.",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "Spell the word 'necessary' letter by letter.",
    "Count down from ten to one.",
    "How many days has a week?",
    "Write the LaTeX of the quadratic formula.",
    "What is 9 - 14?",
)
TURNS = (
    (
        {"role": "system", "content": "Answer with the number only."},
        {"role": "user", "content": "What is 7 times 8?"},
    ),
    (
        {"role": "user", "content": "My name is Zoë."},
        {"role": "assistant", "content": "Hello, Zoë! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ),
    ({"role": "system", "content": ""}, {"role": "user", "content": "Name a colour."}),
)
CHATS: tuple[Any, ...] = (*(({"role": "user", "content": question},) for question in QUESTIONS), *TURNS)
# Ordinary prose, code, other scripts, and what a model that has begun to repeat itself writes.
TEXTS = (
    "The history of the bicycle begins in the nineteenth century. In 1817 Karl von Drais built a machine with two "
    "wheels in line, which its rider pushed along with the feet. Pedals came in the 1860s, the chain in 1885, and "
    "pneumatic tyres in 1888, after which the bicycle became a means of transport for everyone.",
    "def quicksort(values):\n    if len(values) < 2:\n        return values\n    pivot, *rest = values\n"
    "    low = [x for x in rest if x < pivot]\n    high = [x for x in rest if x >= pivot]\n"
    "    return quicksort(low) + [pivot] + quicksort(high)\n\n\nprint(quicksort([3, 1, 4, 1, 5, 9, 2, 6]))\n",
    "北京是中华人民共和国的首都。😀🎉🚀 Здравствуй, мир! ¿Dónde está la biblioteca? ﷽ नमस्ते दुनिया",
    "I do not know. " * 24,
    "zxqj 0x7f!! ;;;;; <|im_start|>user\n<|im_end|><|im_end|><|im_end|> \u200b\u200b\ufffd qwrtp vbnm",
)


@dataclass(frozen=True)
class Peer:
    """The model and its tokenizer as transformers reads them."""

    directory: Path

    @cached_property
    def tokenizer(self) -> Any:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(self.directory)

    @cached_property
    def model(self) -> Any:
        return self.load()

    def load(self, directory: Path | None = None, **options: Any) -> Any:
        """The model in float32; of another directory, or with other options, too."""
        import torch
        import transformers

        options = {"dtype": torch.float32} | options
        return transformers.AutoModelForCausalLM.from_pretrained(directory or self.directory, **options).eval()

    def chat(self, messages: Any) -> list[int]:
        """The token ids of a conversation that an answer is to follow."""
        return self.tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False)

    def rows(self, texts: Any = TEXTS, width: int = 96) -> np.ndarray:
        """The first tokens of texts, [B, width]; a text that is too short is repeated."""
        encoded = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        return np.array([(ids * width)[:width] for ids in encoded], np.int32)

    def chosen(self, tokens: np.ndarray, model: Any = None, temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities [B, T - 1] of the tokens after the first, of rows without padding, in float64."""
        import torch

        model, ids, parts = model or self.model, torch.tensor(tokens, dtype=torch.long), []
        with torch.inference_mode():
            hidden = model.model(ids).last_hidden_state
            for start in range(0, ids.shape[1] - 1, 256):  # all words of all tokens would be gigabytes
                end = min(start + 256, ids.shape[1] - 1)
                every = torch.log_softmax(model.lm_head(hidden[:, start:end]).double() / temperature, -1)
                parts.append(every.gather(-1, ids[:, start + 1 : end + 1, None])[..., 0])
        return torch.cat(parts, 1).numpy()

    def greedy(self, prompts: list[list[int]], new: int) -> list[tuple[int, ...]]:
        """The most likely answers of at most `new` tokens, the end of the text included, as `generate` gives them."""
        import torch

        width, end = max(map(len, prompts)), self.tokenizer.eos_token_id
        ids = torch.tensor([[end] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        answers = self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)[:, width:].tolist()
        ends = [answer.index(end) + 1 if end in answer else new for answer in answers]  # the pad is the end, too
        return [tuple(answer[:stop]) for answer, stop in zip(answers, ends, strict=True)]

    def rounded(self, int8: Any, config: Any, directory: Path, stored: Any = None) -> Any:
        """The model with the numbers of an int8 base, each of which is at most half a step from that of `stored`.

        stored: the model that was rounded; default: this one.

        A step is 1/127 of the largest number of an output channel. Which of two neighbours a number half way between
        them becomes is not checked.
        """
        import torch

        whole = {**int8, "layers": dequantised(int8["layers"], np.float32)}
        model = self.load(export_hf(whole, config, directory))
        for (name, own), first in zip(model.named_parameters(), (stored or self.model).parameters(), strict=True):
            step = first.abs().amax(-1, keepdim=True) / 127
            inside = own.ndim == 2 and "layers" in name
            assert torch.all((own - first).abs() <= (step * 0.50001 if inside else 0)), name
            if inside:
                assert torch.all((own / step - torch.round(own / step)).abs() < 1e-4), name
        return model

    def gradients(self, model: Any, tokens: np.ndarray, mask: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The mean loss of a model of `load` for the tokens in `mask`, and its gradient by the weights' names.

        transformers takes the token that pads for no token, and leaves its embedding out of the gradient. Here it is
        the end of a turn, too.
        """
        import torch

        ids = torch.tensor(tokens, dtype=torch.long)
        model.model.embed_tokens.padding_idx = None
        logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -logprobs[torch.tensor(mask[:, 1:])].mean()
        loss.backward()
        return loss.item(), {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a torch model for rows without padding, in its dtype or float32."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits
        return (logits if logits.dtype == torch.float64 else logits.float()).numpy()


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """In float64."""
    wide = logits.astype(np.float64) / temperature
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def chosen(logprobs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities [B, T - 1] of the tokens after the first, from those of all words [B, T, V]."""
    return np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1, first: int = 0) -> Any:
    count = data * fsdp * tensor
    return make_mesh(data, fsdp, tensor, devices=jax.devices()[first : first + count])


@pytest.fixture(scope="session")
def peer() -> Peer:
    for package in ("torch", "transformers", "peft"):
        pytest.importorskip(package, reason="the peers of these tests: pip install 'jrlhf[dev]'")
    import torch

    torch.set_num_threads(1)  # threads that wait for each other are slow beside other test processes
    directory = Path(os.environ.get("REAL_MODEL", ""))
    if not (directory / "config.json").is_file():
        pytest.fail("REAL_MODEL must name the directory that `python -m benchmarks.real_model` makes")
    return Peer(directory)
