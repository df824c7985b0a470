"""`python -m jrlhf.export RUN [--step N] [--out DIR] [--push USER/NAME]`: the policy of a checkpoint, also of a run
that has not finished; and its upload to the Hugging Face hub.

The command computes on the CPU, and only reads the run: accelerators may be at work on it meanwhile.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import tokenizers
from jax.sharding import Mesh

from jrlhf.config.load import load_config
from jrlhf.config.places import local
from jrlhf.config.schema import Config, DatasetsData, DeviceConfig
from jrlhf.data.push import account_name, push
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.errors import UserError, beside, exit_code, parse_options
from jrlhf.meshes.mesh import make_mesh
from jrlhf.models.config.decoder import ModelConfig
from jrlhf.report.card import card_of_run
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Architecture, Model
from jrlhf.roles.pretrained import (
    abstract_weights,
    architecture,
    check_origins,
    fresh_model,
    hub_model,
    hub_names,
    own_tokenizer,
)
from jrlhf.run.checkpoints import like, restore_part
from jrlhf.run.console import Console
from jrlhf.run.contents import CONFIG, HUB, TOKENIZER, best_step, read_summary
from jrlhf.run.devices import select
from jrlhf.run.directory import RunDirectory
from jrlhf.run.files import check_writable, saved_steps
from jrlhf.stages.best import weights_of
from jrlhf.stages.finalize import export
from jrlhf.stages.setup import compute_of
from jrlhf.tasks.docstrings.vocabulary import wrap


def export_checkpoint(run: Path, step: int | None = None, out: Path | None = None) -> str:
    """Writes out/model, and out/adapter of a trained adapter, as at the end of a run; returns a line for the console.

    The weights have the bits of the checkpoint. Merging an adapter into its base rounds the sum.

    step: of the newest stage that trains the policy; None: its newest checkpoint, or its best one if the run has ended
    with that (`checkpoints.best`). out: None: the run's directory.
    """
    if not (run / CONFIG).is_file():
        remedy = beside(run, "name a run's directory, such as runs/quickstart")
        raise UserError(f"there is no run in {run} (it has no {CONFIG}): {remedy}")
    config = load_config(str(run / CONFIG))
    check_origins([path for path in hub_names(config) if path == config.model.path], run)
    stage, steps = _newest_stage(run, config)
    summary, usual = read_summary(run), steps[-1]
    if summary.get("steps", {}).get(stage) == usual:  # the run has ended, and exported these
        best = best_step(summary, stage)
        usual = usual if best is None else best
    chosen = usual if step is None else step
    if chosen not in steps:
        available = ", ".join(map(str, steps))
        raise UserError(f"step={chosen}: {run} keeps no such checkpoint of stage {stage}, choose among {available}")
    if out is None and chosen != usual:
        raise UserError(f"step={chosen}: in {run}/model is the place of step {usual}, name another directory in out")
    out = run if out is None else out
    check_writable(f"out={out}", out / "model" / "config.json")

    card = card_of_run(run, config, stage, chosen)
    try:
        devices = jax.local_devices(backend="cpu")
    except RuntimeError:  # this process runs on accelerators alone
        devices = jax.local_devices()
    mesh = make_mesh(1, 1, 1, devices=devices[:1])
    actor = fresh_model(config.model) if config.model.path is None else architecture(config.model.path, "model.path")
    tokenizer = _tokenizer(run, config, actor)
    with jax.set_mesh(mesh):
        policy = _policy(config, mesh, actor)
        params = restore_part(run / "checkpoints" / stage, chosen, weights_of(stage), policy.params)
        try:
            export(RunDirectory(out), config, tokenizer, policy.holding(params), card)
        except OSError as error:
            raise UserError(f"out={out}: {error}") from error
    return f"{out / 'model'} is the policy of {stage} after step {chosen} of {config.length(stage)}"


def _newest_stage(run: Path, config: Config) -> tuple[str, list[int]]:
    """Returns the last stage that trains the policy and has checkpoints, and their steps."""
    stages = [stage for stage in config.stages if stage != "reward_model"]
    if not stages:
        raise UserError(f"{run} trains only a reward model, which it leaves in reward_model/: name a run with a policy")
    for stage in reversed(stages):
        if steps := saved_steps(run / "checkpoints" / stage):
            return stage, steps
    raise UserError(
        f"{run} has no checkpoint of {' or '.join(stages)} yet: wait for the first, or lower {stages[0]}.save_every"
    )


def _tokenizer(run: Path, config: Config, actor: ModelConfig) -> Tokenizer:
    """The run's tokenizer, without reading the data."""
    if not isinstance(config.data, DatasetsData):
        try:
            return wrap(tokenizers.Tokenizer.from_file(str(run / TOKENIZER)))
        except Exception as error:  # the library raises bare `Exception`
            raise UserError(f"{run / TOKENIZER} cannot be read ({error}): bring it back from a backup") from error
    assert config.model.path is not None
    return own_tokenizer(config.model.path, "model.path", config.data, actor.vocab_size)


def _policy(config: Config, mesh: Mesh, actor: ModelConfig) -> Model:
    """Returns the policy with shapes in place of the arrays that checkpoints contain (all weights, or an adapter)."""
    if config.lora is not None:
        policy = InitialModels(config, mesh, compute_of(config.compute), Console(enabled=False)).policy()
        return policy.holding(like(policy.params, mesh))
    return Model(Architecture(actor), abstract_weights(actor, mesh))


def _check_base(run: Path) -> None:
    """Refuses the upload of an adapter whose base is a directory of this machine."""
    from jrlhf.report.read import read_run

    path = load_config(str(run / CONFIG)).model.path
    if hub_model(path, read_run(run).hub) is None:
        raise UserError(
            f"--adapter: {run / HUB} does not list its base, model.path={path}, so nobody else may find it: leave "
            "--adapter out to upload the merged model, or train from a hub name"
        )


def cli(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jrlhf.export", description="Writes the policy of a run's checkpoint in Hugging Face form."
    )
    parser.add_argument("run", help="the directory of a run, such as runs/quickstart")
    parser.add_argument("--step", type=int, help="number of the checkpoint; default: of the model, or the newest")
    parser.add_argument("--out", metavar="DIR", help="directory for model/; default: the run's")
    parser.add_argument("--push", metavar="NAME", help="a repository of the Hugging Face hub, USER/NAME, to upload to")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="the branch to upload to; default: main")
    parser.add_argument("--adapter", action="store_true", help="uploads adapter/ instead of model/")
    options = parse_options(parser, arguments)
    if options.push is None and (options.private or options.revision or options.adapter):
        parser.error("--private, --revision and --adapter say how to --push: add --push USER/NAME")

    def run() -> None:
        name = None if options.push is None else account_name(options.push)
        out = None if options.out is None else local("--out", options.out)
        directory = local("run", options.run)
        select(DeviceConfig(platform="cpu"))
        print(export_checkpoint(directory, options.step, out))
        if name is not None:
            exported = (out or directory) / ("adapter" if options.adapter else "model")
            if not exported.is_dir():
                raise UserError(f"--adapter: {options.run} trains no adapter: leave it out, or set lora.rank in a run")
            if options.adapter:
                _check_base(directory)
            print(push(exported, name, private=options.private, revision=options.revision))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(cli())
