"""The demands of a config's sections on each other, and on the devices."""

from pathlib import Path

from jrlhf.config import Config, load_config
from jrlhf.config.check import mesh_sizes, validate
from jrlhf.errors import UserError
from jrlhf.roles.pretrained import fresh_model

SHORT = {
    "GRPO": "stages=[sft, grpo] ; rewards=[{name: a, function: exact_match}]",
    "SUMS": "data.source=arithmetic",
    "SETS": "data.source=datasets ; model.path=m",
    "GIVEN": "stages=[grpo] ; rewards=[{name: a, function: f}]",
}
# Overrides, and indented below them the sentence that refuses them on four devices, or its beginning.
REFUSED = """
mesh.tensor=3
    mesh data=1, fsdp=-1, tensor=3 does not fit 4 device(s): choose sizes whose product is 4 (its divisors are 1, 2,
    4), or set device.simulated=3 to simulate that many on the CPU
mesh.tensor=-1
    mesh data=1, fsdp=-1, tensor=-1: only one axis may be -1
mesh.fsdp=8
    mesh data=1, fsdp=8, tensor=1 does not fit 4 device(s): choose sizes whose product is 4 (its divisors are 1, 2,
    4), or mesh.fsdp=-1 for all that remain, or set device.simulated=8 to simulate that many on the CPU
model.kv_heads=3
    model kv_heads=3 must divide heads=4
data.max_prompt=50 ; data.max_response=50
    data.max_prompt=50 and data.max_response=50 need 100 positions, and model has max_positions=64: lower
model.embed=126
    model.embed=126 does not divide over mesh.fsdp=4: choose another model, or mesh.fsdp from 1, 2, 3
mesh.tensor=4 ; model.heads=6
    model.heads=6 does not divide over mesh.tensor=4
mesh.tensor=4 ; model.heads=12 ; model.kv_heads=6
    model.kv_heads=6 does not divide over mesh.tensor=4
mesh.tensor=4 ; model.heads=12 ; model.kv_heads=3
    model.kv_heads=3 does not divide over mesh.tensor=4
mesh.tensor=4 ; model.mlp=30
    model.mlp=30 does not divide over mesh.tensor=4
sft.batch=30
    sft.batch=30 does not divide over 4 device(s): choose a multiple of 4, such as 28 or 32
sft.pipeline.stages=3
    sft.pipeline.stages=3 does not divide mesh.fsdp=4: choose stages from 2, 4, or leave pipeline out
mesh.fsdp=1 ; mesh.tensor=4 ; reward_model.pipeline.stages=2
    reward_model.pipeline.stages=2 does not divide mesh.fsdp=1: choose a larger mesh.fsdp, or leave pipeline out
sft.batch=12 ; sft.pipeline.stages=2 ; sft.micro_batches=4
    sft.batch=12 does not divide over 2 device(s) x 4 micro-batches: choose a multiple of 8, such as 8 or 16
sft.pipeline.stages=1
    sft.pipeline.stages=1: it must be at least 2
sft.decay=0.5
    sft.decay=0.5 has no effect with sft.schedule=cosine: leave it out
sft.schedule=constant ; sft.final=0.5
    sft.final=0.5 has no effect with sft.schedule=constant: leave it out
ppo.actor.schedule=linear
    ppo.actor.final=1.0: it must be below 1 with schedule=linear, which falls to it
sft.pipeline.schedule=gpipe
    sft.pipeline.schedule=gpipe has no effect with sft.pipeline.stages=null: leave it out
reward_model.pipeline.stages=2 ; reward_model.micro_batch_tokens=64
    reward_model.micro_batch_tokens=64 has no effect with reward_model.pipeline, whose parts have equally many rows:
    leave it out
stages=[sft, dpo] ; dpo.pipeline.stages=2 ; dpo.algorithm.micro_batch_tokens=64
    dpo.algorithm.micro_batch_tokens=64 has no effect with dpo.pipeline, whose parts have equally many rows: leave
ppo.rollout_batch=24 ; ppo.algorithm.minibatches=2 ; ppo.algorithm.micro_batches=2
    ppo.rollout_batch=24 does not divide over 4 device(s) x 2 minibatches x 2 micro-batches: choose a multiple of
    16, such as 16 or 32, or ppo.algorithm.micro_batches=1
ppo.rollout_batch=20 ; ppo.algorithm.minibatches=2 ; ppo.algorithm.micro_batches=2
    ppo.rollout_batch=20 does not divide over 4 device(s) x 2 minibatches x 2 micro-batches: choose a multiple of
    16, such as 16 or 32
ppo.algorithm.kl_horizon=25 ; ppo.algorithm.kl_target=4
    ppo.algorithm.kl_horizon=25 must exceed a fifth of ppo.rollout_batch=128: the KL coefficient could turn
    negative, raise the horizon
stages=[]
    stages=[]: name at least one of sft, reward_model, dpo or an algorithm, such as ppo
stages=[sft, sft]
    stages=[sft, sft]: sft is named more than once, keep one
stages=[reward_model, sft]
    stages=[reward_model, sft]: each starts from the result of those before it, write them in the order sft,
    reward_model, ppo
sampling.min_new_tokens=25
    sampling.min_new_tokens=25 exceeds data.max_response=24: lower it
sampling.top_k=2000
    sampling.top_k=2000 exceeds the vocabulary of 1024: lower it, or null
stages=[reward_model, ppo]
    stages=[reward_model, ppo]: reward_model would start from random weights, name sft before it or give model.path
rewards=[{name: a, function: exact_match}, {name: a, function: exact_match}]
    rewards[0].name=a is taken: it names metrics, choose another
rewards=[{name: reward_model, function: exact_match}]
    rewards[0].name=reward_model is taken by the stage: it names metrics, choose another
rewards=[{name: a}]
    rewards[0] (a) must be a model, an adapter or a function: give one
data.source=datasets
    data.source=datasets needs a tokenizer: give model.path
model.path=x
    model.path=x: the built-in task trains a tokenizer and a model of its own
ppo.scores.combine=normalise_then_sum
    ppo.scores.combine=normalise_then_sum compares the responses to a prompt, and ppo has one: leave it out
GRPO ; grpo.scores.combine=normalise_then_sum
    grpo.scores.combine=normalise_then_sum divides by deviations, and grpo.algorithm.divide_by_std=true divides
    again: set that to false
ppo.scores.overlong_buffer=25
    ppo.scores.overlong_buffer=25 exceeds data.max_response=24: lower it
stages=[sft, reward_model, dpo]
    stages=[sft, reward_model, dpo]: dpo learns from the pairs themselves and uses no reward model, leave
    reward_model out, or name another algorithm
sampling.batch=8
    sampling.batch=8 has no effect with ppo.rollout_batch: leave it out
stages=[sft, dpo] ; rewards=[{name: a, function: exact_match}]
    rewards have no effect with stages=[sft, dpo]: leave them out, or name an algorithm, such as ppo
stages=[sft, reward_model] ; reward_model.weight=2
    reward_model.weight=2.0 has no effect with stages=[sft, reward_model]: leave it out
stages=[sft] ; compute.shared_passes=true
    compute.shared_passes=True has no effect with stages=[sft]
stages=[sft] ; roles.reference=x
    roles.reference=x has no effect with stages=[sft]: leave it out
ppo.algorithm.kl_horizon=2000
    ppo.algorithm.kl_horizon=2000.0 has no effect with ppo.algorithm.kl_target=null: leave it out
stages=[sft, dpo] ; validation.every=2
    validation.every=2 has no effect with stages=[sft, dpo]: leave
stages=[sft, dpo] ; roles.critic=x
    roles.critic=x has no effect with stages=[sft, dpo]: leave it out
stages=[sft, grpo, mine] ; mine.dataflow=d.py:f
    stages=[sft, grpo, mine]: a run has one algorithm, keep grpo or mine
stages=[mine, sft] ; mine.dataflow=d.py:f
    stages=[mine, sft]: each starts from the result of those before it, write them in the order sft, reward_model, mine
stages=[sft, mine] ; mine.dataflow=d.py:f ; mine.rollout_batch=6
    mine.rollout_batch=6 does not divide over 4 device(s)
stages=[sft, mine] ; mine.dataflow=d.py:f ; compute.shared_passes=true
    compute.shared_passes has a dataflow of its own in place of mine.dataflow=d.py:f: leave one of them out
GRPO ; roles.critic=x
    roles.critic=x has no effect with grpo, which has none: leave it out
lora={rank: 4, critic: false}
    lora.critic=False has no effect with fresh weights, which have no
stages=[dpo] ; model.path=x ; data.source=datasets ; lora={rank: 4, critic: false}
    lora.critic=False has no effect with stages=[dpo]: leave it out
ppo.algorithm.importance_cap=3
    ppo.algorithm.importance_cap=3.0 has no effect with ppo.algorithm.importance=null and old_logprobs=recompute:
    leave it out
ppo.scores.overlong_penalty=2
    ppo.scores.overlong_penalty=2.0 has no effect with ppo.scores.overlong_buffer=null: leave it out
ppo.scores.missing_eos_penalty=2 ; ppo.algorithm.truncation=mask
    ppo.scores.missing_eos_penalty=2.0 has no effect with ppo.algorithm.truncation=mask, which leaves such responses
    out: leave it out
ppo.algorithm.old_logprobs=rollout ; sampling.top_p=0.9
    sampling.top_p=0.9 draws from another distribution than the log-probabilities are of, which
    ppo.algorithm.old_logprobs=rollout would correct: leave one of them out
ppo.algorithm.ptx_coef=0.5 ; sampling.temperature=0.7
    ppo.algorithm.ptx_coef=0.5 would imitate texts by the distribution that sampling.temperature=0.7 scales: set the
    temperature to 1, or ptx_coef to 0
ppo.algorithm={kl_coef: 0, kl_in: loss, kl_estimator: k3}
    ppo.algorithm.kl_in=loss has no effect with ppo.algorithm.kl_coef=0: leave it out
ppo.algorithm={kl_coef: 0, kl_estimator: k2}
    ppo.algorithm.kl_estimator=k2 has no effect with ppo.algo
stages=[dpo] ; model.path=x ; data.source=datasets ; compute.fused_loss=false
    compute.fused_loss=False has no effect with stages=[dpo]: leave
SETS ; stages=[gspo] ; rewards=[{name: a, function: f}] ; compute.fused_loss=false
    compute.fused_loss=False has no effect with gspo.algorithm.ratio=sequence-mean: leave it out
stop.metric=val-core/all/score/mean@1
    stop.metric=val-core/all/score/mean@1 has no effect with validation.every=null: leave it out
checkpoints.best=val-core/all/score/mean@1
    checkpoints.best=val-core/all/score/mean@1 has no effect with validation.every=null: leave it out
checkpoints.best=-dpo/eval_loss
    checkpoints.best=-dpo/eval_loss has no effect with stages=[sft, reward_model, ppo], which do not log it: leave
stages=[sft, dpo] ; checkpoints.best=val-core/all/score/mean@1
    checkpoints.best=val-core/all/score/mean@1 has no effect with stages=[sft, dpo], which do not log it: leave it out
stages=[sft] ; compute.score_rows=8
    compute.score_rows=8 has no effect with stages=[sft]: leave it out
compute.score_rows=24
    compute.score_rows=24 does not cut ppo.rollout_batch=128 into equal parts: choose from 1, 2, 4, 8, 16, 32, 64, 128
compute.score_rows=16
    compute.score_rows=16 scores rows between two chunks of decode steps, and rollout.chunk=64 decodes all
    data.max_response=24 tokens in one: set rollout.chunk below 24
compute.score_rows=16 ; rollout.chunk=8 ; ppo.asynchronous.staleness=1
    compute.score_rows=16 scores rollouts that are learned from at once, and not ppo.asynchronous: leave one out
ppo.solved_score=0.9 ; ppo.asynchronous.staleness=1
    ppo.solved_score=0.9 leaves out prompts by scores that ppo.asynchronous does not have yet when it draws ahead:
    leave one out
compute.score_rows=16 ; rollout.chunk=8 ; sleep.reward=host
    compute.score_rows=16 would bring the weights of sleep.reward=host to the devices for every part: leave one of them
    out
rollout.last_groups=1
    rollout.last_groups=1 frees devices that score while the last rows decode, and nothing does: set
    compute.score_rows, or leave it out
rollout.last_rows=4
    rollout.last_rows=4 has no effect with rollout.last_groups=null: leave it out
SETS ; stages=[ppo] ; rewards=[{name: a, function: f}] ; compute={fused_loss: false, shared_passes: true}
    compute.fused_loss=False has no effect with compute.shared_passes: leave it out
rewards=[{name: a, model: m, workers: 2}]
    rewards[0].workers=2 has no effect with rewards[0].model:
rewards=[{name: a, model: m, options: {k: 1}}]
    rewards[0].options={'k': 1} has no effect with rewards[0].model:
rewards=[{name: a, adapter: m, batch: 2}]
    rewards[0].batch=2 has no effect with rewards[0].adapter:
rewards=[{name: a, adapter: m, special_tokens: true}]
    rewards[0].special_tokens=True has no effect with rewards[0].adapter:
rewards=[{name: a, adapter: m, on_failure: 3.5e38}]
    rewards[0].on_failure=3.5e+38: it must be finite in float32
rewards=[{name: a, function: f, batch: 2}]
    rewards[0].batch=2 has no effect with rewards[0].function:
stages=[sft, reward_model, safe_rlhf] ; costs=[{name: a, function: f, batch: 2}]
    costs[0].batch=2 has no effect with costs[0].function: leave it out
stages=[sft] ; sampling.batch=30
    sampling.batch=30 (so many answers are sampled at a time) does not divide over 4 device(s): choose a multiple of
    4, such as 28 or 32
GRPO ; grpo.algorithm={samples: 6, minibatches: 4} ; grpo.rollout_batch=64
    grpo.rollout_batch=64 does not divide over 4 device(s) x 4 minibatches and into 6 samples of each prompt on 4
    group(s) of devices: choose a multiple of 48, such as 48 or 96
GRPO ; grpo.algorithm.samples=3 ; grpo.rollout_batch=48 ; mesh.tensor=2 ; rollout.slots=4
    rollout.slots=4 has no room for 3 samples of a prompt on each of 2 group(s) of devices: choose a multiple of 4,
    8 or more
GRPO ; grpo.asynchronous.staleness=1001
    grpo.asynchronous.staleness=1001: it must be at most 1000
GRPO ; grpo.asynchronous.staleness=2
    grpo.asynchronous.staleness=2 without an off-policy correction learns from tokens of older weights as if the
    present ones had drawn them: set grpo.algorithm.old_logprobs=rollout, or grpo.algorithm.importance=token; or
    grpo.asynchronous.uncorrected=true, to do so although runs were seen to fail
GRPO ; grpo.asynchronous={staleness: 2, uncorrected: true} ; grpo.algorithm.importance=token
    grpo.asynchronous.uncorrected=true has no effect with a correction, or with grpo.asynchronous.staleness=2: leave it
    out
GRPO ; grpo.asynchronous.update_steps=10000000
    grpo.asynchronous.update_steps=10000000: it must be at most 1000000
GRPO ; SUMS ; validation={every: 5, max_response: 50}
    data.max_prompt=20 and validation.max_response=50 need 70 positions, and model has max_positions=64: lower them
GRPO ; SUMS ; validation={every: 5, max_response: 4} ; sampling.min_new_tokens=5
    sampling.min_new_tokens=5 exceeds validation.max_response=4: lower it
GRPO ; SUMS ; validation={every: 5, top_k: 2000}
    validation.top_k=2000 exceeds the vocabulary of 1024: lower it, or null
GRPO ; SUMS ; validation={every: 5, temperature: 0, top_p: 0.5}
    validation.top_p=0.5 has no effect with validation.temperature=0: leave it out
SETS ; GIVEN ; data.prompts=[]
    data.prompts=[] has no prompts: name at least one dataset
SETS ; GIVEN ; data.prompts=[{path: a}, {weight: 2}]
    data.prompts[1] has no path: name a file or a dataset
SETS ; GIVEN ; data.prompts=[{path: a/q.jsonl}, {path: b/q.json}]
    data.prompts[1] has the name q of an earlier one: give it another name
SETS ; stages=[dpo] ; data.prompts=[{path: a}, {path: b}]
    data.prompts=[a, b] has no effect with stages=[dpo]: leave it out
SETS ; GIVEN ; data.sft.path=s
    data.sft.path=s has no effect with stages=[grpo]: leave it out
SETS ; stages=[sft] ; rollout.slots=16
    rollout.slots=16 has no effect with stages=[sft], which sample nothing: leave it out
SUMS ; stages=[sft, dpo]
    data.source=arithmetic has no preferences for stage dpo: leave it out, and give rewards to an algorithm such as
    grpo
SUMS ; GRPO ; validation.every=2 ; data.heldout_rows=0
    validation.every=2 has no prompts to validate on: raise data.heldout_rows, or set it to null
"""
# Overrides that pass.
PASS = """
mesh.tensor=2
mesh.tensor=4 ; model.kv_heads=2
sft.batch=8 ; sft.pipeline.stages=2 ; sft.micro_batches=4
sft.pipeline.stages=null ; sft.micro_batch_tokens=64
sampling.top_k=20
stages=[sft, ppo] ; rewards=[{name: a, function: exact_match}]
stages=[sft, dpo] ; data.annotator.prompts=9 ; sampling={batch: 64, temperature: 0.7}
GRPO ; data.annotator.prompts=9
stages=[sft] ; ppo.iterations=9 ; rewards=[{name: a, function: exact_match}]
stages=[sft, dpo] ; roles.reference=x
ppo.algorithm.importance_cap=3 ; ppo.algorithm.importance=token
ppo.algorithm.importance_cap=3 ; ppo.algorithm.old_logprobs=rollout
ppo.scores={overlong_penalty: 2, overlong_buffer: 4}
stages=[sft, reward_model, remax] ; remax.scores.missing_eos_penalty=2 ; remax.algorithm.truncation=mask
ppo.algorithm.old_logprobs=rollout ; sampling.top_p=1.0
ppo.algorithm.ptx_coef=0.5 ; data.renaming=0.1
stages=[sft, reward_model, dr_grpo]
compute.fused_loss=false
compute.fused_loss=false ; stages=[sft]
stop.metric=val-core/all/score/mean@1 ; validation.every=2
stop.metric=-sft/eval_loss
checkpoints.best=-sft/eval_loss
checkpoints.best=val-core/all/score/mean@1 ; validation.every=2
compute.fused_loss=false ; stages=[sft, reward_model, gspo]
compute={fused_loss: false, shared_passes: true}
stages=[sft] ; compute.score_tokens=64 ; rollout.slots=16
rewards=[{name: a, model: m, batch: 2, on_failure: 0}]
rewards=[{name: a, function: f, workers: 2, deadline: 2, on_failure: 0, options: {k: 1}}]
GRPO ; grpo.algorithm={samples: 6, minibatches: 4} ; grpo.rollout_batch=48
GRPO ; grpo.algorithm={samples: 6, minibatches: 4} ; grpo.rollout_batch=96
SETS ; stages=[sft] ; data.preferences.path=p ; data.prompts.path=q
GRPO ; SUMS ; validation={every: 5, max_response: 40, temperature: 0.5, top_p: 0.9, top_k: 7, min_p: 0.1}
SETS ; stages=[sft] ; data.prompts=[{path: q}, {path: p, weight: 2}]
SETS ; GIVEN ; data.prompts=[{path: a/q.jsonl}, {path: b/q.jsonl, name: other}]
SETS ; GIVEN ; data.sft.path=s ; grpo.algorithm.ptx_coef=0.1
"""


def defaults(tmp_path: Path, overrides: list[str]) -> Config:
    """The defaults with these settings."""
    path = tmp_path / "seed.yaml"
    path.write_text("seed: 0\n")
    return load_config(str(path), overrides)


def test_mesh_sizes(tmp_path):
    for mesh, devices, sizes in (
        ([], 4, (1, 4, 1)),
        (["mesh.tensor=2"], 4, (1, 2, 2)),
        (["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"], 8, (2, 2, 2)),
    ):
        assert mesh_sizes(defaults(tmp_path, mesh).mesh, devices) == sizes


def test_what_the_sections_demand_of_each_other(tmp_path):
    cases: list[list[str]] = [[row, ""] for row in ["", *PASS.strip().splitlines()]]
    for line in REFUSED.strip().splitlines():
        if line.startswith(" "):
            cases[-1][1] = f"{cases[-1][1]} {line.strip()}".strip()
        else:
            cases.append([line, ""])
    assert len(cases) > 75
    for row, message in cases:
        overrides = [part for word in row.split(" ; ") for part in SHORT.get(word, word).split(" ; ") if part]
        try:
            config = defaults(tmp_path, overrides)
            validate(config, 4, {"actor": fresh_model(config.model)})
            sentence = ""
        except UserError as error:
            sentence = str(error)
        assert sentence.startswith(message) and bool(sentence) == bool(message), (row, sentence)
        assert "\n" not in sentence
