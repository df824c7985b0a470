"""The built-in task's preferences: the policy's samples and real lines, ranked by the annotator."""

from typing import TYPE_CHECKING

import numpy as np

from jrlhf.config.schema import DocstringsData
from jrlhf.data.batches import batch_indices, key_for
from jrlhf.data.task import Ids, Pairs
from jrlhf.errors import Preempted, UserError
from jrlhf.roles.model import Model
from jrlhf.stages.context import Context
from jrlhf.tasks.docstrings.preferences import Pair, build_pairs, pairs_jsonl, with_real_lines
from jrlhf.tasks.docstrings.rubric import Rubric

if TYPE_CHECKING:
    from jrlhf.tasks.docstrings.task import Split


def collect_pairs(
    rubric: Rubric, train: "Split", heldout: "Split", context: Context, policy: Model
) -> tuple[Pairs, Pairs]:
    """Ranked pairs to train on, some with the wrong label, and held-out ones in the rubric's own order."""
    assert isinstance(context.config.data, DocstringsData)
    config = context.config.data.annotator
    # Held-out pairs keep all but exact ties, so that the accuracy can be told with and without the close ones.
    learnt, texts = _rank(rubric, train, context, policy, config.prompts, config.label_flip, config.margin)
    context.run.write("preferences.jsonl", pairs_jsonl(texts))
    measured, _ = _rank(rubric, heldout, context, policy, config.heldout_prompts, 0.0, 0.0, "heldout preferences")
    assert measured.clear is not None
    if not len(learnt) or not measured.clear.any():
        raise UserError(
            f"data.annotator.margin={config.margin:g} leaves {len(learnt)} pairs to learn from and {len(measured)} to "
            "measure with: lower it, or raise data.annotator.prompts and data.annotator.heldout_prompts"
        )
    return learnt, measured


def _rank(
    rubric: Rubric,
    split: "Split",
    context: Context,
    policy: Model,
    prompts: int,
    flip: float,
    margin: float,
    purpose: str = "preferences",
) -> tuple[Pairs, list[Pair]]:
    """Samples for the first so many shuffled prompts, ranked against each other and real lines."""
    assert isinstance(context.config.data, DocstringsData)
    config, tokenizer, seed = context.config.data.annotator, context.task.tokenizer, context.config.seed
    count = min(prompts, len(split.examples))
    rows = batch_indices(len(split.examples), count, 0, seed)
    examples = [split.examples[row] for row in rows]
    prompt_ids = [split.tokens.prompts[row] for row in rows]
    ids: dict[tuple[str, str], Ids] = {}
    samples: list[list[str]] = [[] for _ in rows]
    for number in range(config.samples_per_prompt):
        context.console.line(f"sampling {purpose}: {number * count} of {config.samples_per_prompt * count} responses")
        if context.preemption.agreed():
            raise Preempted("stopped while preferences were sampled; earlier stages are saved")
        responses = context.sampler.sample(policy, prompt_ids, key_for(seed, purpose, number))
        for example, prompt, texts, response in zip(examples, prompt_ids, samples, responses, strict=True):
            text = response.text.strip()
            texts.append(text)
            ids.setdefault((example.prompt, text), prompt + response.ids)
    rng = np.random.default_rng((seed, len(purpose)))
    candidates = with_real_lines(examples, samples, rng, foreign=config.foreign_lines)
    signatures = [example.signature for example in examples]
    pairs = build_pairs(signatures, candidates, rubric, rng, flip=flip, margin=margin)
    ids_of = {example.prompt: prompt for example, prompt in zip(examples, prompt_ids, strict=True)}

    def encode(pair: Pair, text: str) -> Ids | None:
        known = ids.get((pair.prompt, text))
        if known is not None:
            return known
        response = tokenizer.encode(text)
        fits = len(response) < context.config.data.max_response
        return (*ids_of[pair.prompt], *response, tokenizer.eos_id) if fits else None

    def gap(pair: Pair) -> float:
        signature = pair.prompt.removesuffix("\n")
        return abs(rubric.score(signature, pair.chosen) - rubric.score(signature, pair.rejected))

    encoded = [(encode(pair, pair.chosen), encode(pair, pair.rejected), pair) for pair in pairs]
    fitting = [
        (chosen, rejected, len(ids_of[pair.prompt]), gap(pair))
        for chosen, rejected, pair in encoded
        if chosen and rejected
    ]
    chosen, rejected, lengths, gaps = zip(*fitting, strict=True) if fitting else ((), (), (), ())
    return Pairs(chosen, rejected, lengths, clear=np.array(gaps) > config.margin), pairs
