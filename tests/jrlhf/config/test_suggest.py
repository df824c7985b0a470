"""What is suggested in place of a key that is not known: a peer's name, a key of another section, a similar one."""

from pathlib import Path

import pytest

from jrlhf.config import load_config
from jrlhf.config.peers import PEERS
from jrlhf.errors import UserError


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names_of_trl_and_verl_lead_to_ours(tmp_path):
    path = write(tmp_path, "stages: [sft, ppo, grpo]\nsft: {}\nppo: {}\ngrpo: {}\ndata: {source: datasets}")
    for name in PEERS:
        with pytest.raises(UserError) as refused:
            load_config(path, [f"{name}=1"])
        given = PEERS[name]
        answer, first = str(refused.value), given if isinstance(given, str) else given[0]
        ours, _, note = first.partition(", ")
        if " " in ours:
            assert answer == f"{name} is not a known key: {first}"
            continue
        assert answer.endswith(f", {note}?" if note else "?")
        meant = answer.split("did you mean ")[1].removesuffix("?").removesuffix(f", {note}").split(" or ")
        assert all(key == ours or key.endswith(f".{ours}") for key in meant), (name, meant)
    for key, meant in {
        "grpo.output_dir": "run_dir",
        "dpo.beta": "dpo.algorithm.beta",
        "dpo.bf16": "compute.dtype, write bfloat16",
        "lora.r": "lora.rank",
    }.items():
        with pytest.raises(UserError, match=rf"^{key} is not a known key: did you mean {meant}\?$"):
            load_config("quickstart-dpo", [f"{key}=1"])


PER = "per_device_train_batch_size times"
OF_A_PEER = {  # config and key -> the whole suggestion
    "arithmetic-grpo": {
        "actor_rollout_ref.rollout.n": "did you mean grpo.algorithm.samples?",
        "grpo.num_generations": "did you mean grpo.algorithm.samples?",
        "num_generations": "did you mean grpo.algorithm.samples?",
        "max_steps": "did you mean grpo.iterations, each of which has epochs times minibatches updates?",
        "importance_sampling_level": "did you mean grpo.algorithm.ratio, where sequence is sequence-mean?",
        "grpo.actor.adam_beta2": "did you mean grpo.actor.b2?",
        "per_device_train_batch_size": f"did you mean grpo.rollout_batch, which is {PER} devices times "
        "steps_per_generation (by default gradient_accumulation_steps)?",
        "sync_ref_model": "the reference is the policy before the stage and does not change, leave it out",
        "delta": "did you mean grpo.algorithm.dual_clip?",
        "scale_rewards": "did you mean grpo.algorithm.divide_by_std, where group is true, none is false, batch false "
        "with whiten_advantages=true?",
        "loss_type": "did you mean grpo.algorithm.aggregation, where grpo is seq-mean-token-mean, dapo token-mean and "
        "dr_grpo constant; cispo is surrogate=cispo, and there is no bnpo, luspo, sapo or vespo?",
        "num_train_epochs": "did you mean grpo.iterations, of which one epoch has the prompts times samples divided by "
        "rollout_batch?",
        "grpo.actor.warmup_ratio": "did you mean grpo.actor.warmup, a number of updates?",
        "grpo.save_strategy": "did you mean grpo.save_every?",
        "multi_objective_aggregation": "did you mean grpo.scores.combine, where sum_then_normalize is sum, the other "
        "normalise_then_sum?",
        "resume_from_checkpoint": "--resume on the command line continues a run, leave it out",
        "lora.modules_to_save": "LoRA trains its matrices, and the heads of critics and reward models, leave it out",
    },
    "quickstart-dpo": {
        "dpo.loss_type": "did you mean dpo.algorithm.loss, which is sigmoid or ipo?",
        "dpo.algorithm.loss_type": "did you mean dpo.algorithm.loss, which is sigmoid or ipo?",
        "sft.num_train_epochs": "did you mean sft.steps, of which one epoch has the stage's rows divided by batch?",
        "dpo.actor.learning_rate": "did you mean dpo.learning_rate?",
        "dpo.per_device_train_batch_size": f"did you mean dpo.batch, which is {PER} devices times "
        "gradient_accumulation_steps?",
        "epsilon": "no stage of this run has such a setting, leave it out",
    },
    "quickstart": {
        "ppo.vf_coef": "the critic has an optimizer of its own in the section critic, leave it out",
        "ppo.total_episodes": "did you mean ppo.iterations, each of which has rollout_batch episodes?",
        "lr": "did you mean sft.learning_rate or reward_model.learning_rate or ppo.actor.learning_rate or "
        "ppo.critic.learning_rate?",
    },
}


def test_a_name_of_a_peer_leads_to_a_setting_of_the_runs_stages(tmp_path):
    for name, cases in OF_A_PEER.items():
        for key, meant in cases.items():
            with pytest.raises(UserError) as refused:
                load_config(name, [f"{key}=1"])
            assert str(refused.value).partition(" is not a known key: ")[2] == meant, (name, str(refused.value))
    for key, meant in {
        "beta": "dpo.algorithm.beta",
        "loss_type": "dpo.algorithm.loss, which is sigmoid or ipo",
    }.items():
        with pytest.raises(UserError, match=rf"did you mean {meant}\?$"):
            load_config(write(tmp_path, "stages: [dpo]"), [f"{key}=1"])


ELSEWHERE = {
    "grpo.stages": "did you mean stages, at the top level?",
    "grpo.rewards": "did you mean rewards, at the top level?",
    "data.seed": "did you mean seed, at the top level?",
    "grpo.algorithm.rollout_batch": "did you mean grpo.rollout_batch?",
    "rollout.temperature": "did you mean sampling.temperature or validation.temperature?",
    "rollout.n": "did you mean grpo.algorithm.samples?",
    "grpo.critic.learning_rate": "it is a setting of ppo, safe_rlhf only",
    "grpo.algorithm.gae_lambda": "it is a setting of ppo, safe_rlhf only",
    "actor.learning_rate": "did you mean grpo.actor.learning_rate?",
    "trainer.total_epochs": "did you mean grpo.iterations, of which one epoch has the prompts times samples divided by",
    "trainer.unheard_of": "known are name, seed, run_dir",
    "vllm_modes": "known are name, seed, run_dir",  # nothing is similar enough
    "data.truncation": "did you mean data.overlong?",
    "critic.model.path": "did you mean roles.critic?",
    "grpo.steps": "did you mean grpo.iterations?",
    "grpo.batch_size": "did you mean grpo.rollout_batch?",
    "grpo.eval_every": "did you mean validation.every?",
    "dpo.iterations": "did you mean dpo.steps?",
    "dpo.rollout_batch": "did you mean dpo.batch?",
    "dpo.epochs": "did you mean dpo.steps, of which one epoch has the stage's rows divided by batch?",
    "sft.epochs": "did you mean sft.steps, of which one epoch has the stage's rows divided by batch?",
}


def test_a_key_in_the_wrong_section_leads_to_its_own(tmp_path):
    path = write(tmp_path, "stages: [grpo]\ngrpo: {}\ndata: {source: datasets}")
    for key, meant in ELSEWHERE.items():
        with pytest.raises(UserError) as refused:
            load_config(path, [f"{key}=1"])
        assert str(refused.value).partition(" is not a known key: ")[2].startswith(meant), (key, str(refused.value))
    for entry, meant in {
        "option: {}": "rewards[0].options?",
        "extract: last": "arguments are written in options",
    }.items():
        with pytest.raises(UserError) as refused:
            load_config(path, [f"rewards=[{{function: numeric_answer, {entry}}}]"])
        assert str(refused.value).endswith(meant)
