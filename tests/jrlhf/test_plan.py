"""`python -m jrlhf.plan`: plans for clusters that are not there, and one sentence for what cannot be."""

import random
import re

import pytest
import yaml

from jrlhf.meshes.plan import plan_of
from jrlhf.plan import cli
from jrlhf.planning.fusion.last_rows import NO_GAIN

ARGUMENTS = ["--config", "llama3-8b-ppo", "--cluster", "8xh100"]


def test_a_plan_is_printed_saved_drawn_and_priced_again(tmp_path, capsys):
    saved, drawn = tmp_path / "plans" / "plan.yaml", tmp_path / "plan.svg"
    assert cli([*ARGUMENTS, "--proposals", "300", "--save", str(saved), "--plot", str(drawn)]) == 0
    output = capsys.readouterr().out
    assert "plan for ppo on 8 x h100: " in output and "bottleneck: " in output and "heuristic" in output
    priced = int(re.findall(r"(\d+) plans priced in [\d.]+ s, in whole turns of 250; what the others lose:", output)[0])
    assert 500 < priced < 750  # the plans that a search starts from, and two turns
    plan = plan_of(yaml.safe_load(saved.read_text()))
    calls = {"actor.generate", "reward.score", "actor.logprobs", "reference.logprobs", "critic.values"}
    assert plan.placements.keys() == calls | {"critic.update", "actor.update"}
    assert plan.devices <= 8 and drawn.read_text().startswith("<?xml")
    assert cli([*ARGUMENTS, "--plan", str(saved)]) == 0
    assert output.startswith(capsys.readouterr().out)
    # Where a budget of tokens divides the rows, a run would refuse micro-batches, and none are saved.
    assert {plan[name].micro_batches for name in calls} != {1}
    assert cli([*ARGUMENTS, "--proposals", "1", "--save", str(saved), "compute.score_tokens=8192"]) == 0
    budgeted = plan_of(yaml.safe_load(saved.read_text()))
    assert {budgeted[name].micro_batches for name in calls} == {1}


def test_stages_are_priced_and_drawn(tmp_path, capsys):
    """The bubble of 1F1B is (S - 1) / (M + S - 1), where all operations take a tick."""
    saved, drawn, roomy = tmp_path / "plan.yaml", tmp_path / "plan.svg", ("--cluster", "8xh200")
    assert cli([*ARGUMENTS, *roomy, "--plan", "colocate", "--save", str(saved)]) == 0
    mapping = yaml.safe_load(saved.read_text())
    update = {"devices": "0-7", "layout": "train", "fsdp": 2, "pipeline": 4, "micro_batches": 8}
    scores = update | {"layout": "score", "fsdp": 4, "pipeline": 2}
    calls = {**mapping["calls"], "actor.update": update, "critic.values": scores}
    saved.write_text(yaml.safe_dump({**mapping, "calls": calls}))
    capsys.readouterr()
    assert cli([*ARGUMENTS, *roomy, "--plan", str(saved), "--plot", str(drawn)]) == 0
    output, picture = capsys.readouterr().out, drawn.read_text()
    assert "fsdp=2 x pipeline=4 by 1f1b" in output and re.search(r"fsdp=4 x pipeline=2 +8", output)
    assert f"actor.update, 1f1b: bubble {100 * 3 / 11:.0f} %" in picture
    assert f"critic.values: bubble {100 * 1 / 9:.0f} %" in picture


@pytest.mark.full
def test_the_move_of_the_last_rows_is_predicted(tmp_path, capsys):
    """It gains where lengths differ and calls have devices that the last rows leave."""
    file, lengths = tmp_path / "plan.yaml", ("--mean-response", "150", "--sigma", "1")
    drawn = tmp_path / "plan.svg"
    kinds = {"actor.update": "train", "critic.update": "train", "actor.generate": "generate"}
    calls = {name: {"devices": "0-7", "layout": layout, "fsdp": 8} for name, layout in kinds.items()}
    reading = "actor.logprobs", "reference.logprobs", "critic.values", "reward.score"
    for devices, spread, move in (
        ({"devices": "4-7", "fsdp": 4}, lengths, "move to 4 of 8 groups of devices once at most 32 are left, "),
        ({"devices": "4-7", "fsdp": 4}, lengths[:2], "stay in their groups, "),
        ({"devices": "0-7", "fsdp": 8}, lengths, "stay in their groups, "),
    ):
        scoring = {name: {**devices, "layout": "score"} for name in reading}
        file.write_text(yaml.safe_dump({"name": "by hand", "calls": calls | scoring}))
        settings = "compute.score_rows=16", "rollout.chunk=32", "rollout.last_groups=auto"
        cli([*ARGUMENTS, "--plan", str(file), *spread, *settings, "--plot", str(drawn)])
        assert ("rows move from devices 0-7 to 0-3" in drawn.read_text()) == ("move" in move)
        assert "actor.generate and the calls that score its rows" in drawn.read_text()
        guarantee, *no_gain, line, at_once = capsys.readouterr().out.split("\n\n")[-1].splitlines()
        assert no_gain == ([NO_GAIN] if scoring["critic.values"]["devices"] == "0-7" else [])
        assert guarantee.endswith("the same bits as with scores of the same tiles after the last row and without moves")
        assert line.startswith(f"actor.generate: the last rows {move}")
        advice = "tiles gain" if "move" in move else "leave compute.score_rows out"
        assert at_once.endswith(f" s if calls score whole batches after the last row: {advice}")
        if "move" in move:
            cli([*ARGUMENTS, "--plan", str(file), *spread, *settings[:2]])
            staying, verdict = capsys.readouterr().out.splitlines()[-2:]
            assert staying == line.replace(":", ", with rollout.last_groups=auto:", 1)
            assert verdict == at_once.replace(advice, "leave compute.score_rows out")


def test_tiles_on_several_hosts_are_predicted(capsys):
    settings = "compute.score_rows=16", "ppo.rollout_batch=512", "rollout.chunk=32", "mesh.fsdp=16"
    assert cli(["--config", "llama3-8b-ppo", "--cluster", "16xh100", "--plan", "colocate", *settings]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(" s if calls score whole batches after the last row: leave compute.score_rows out")


@pytest.mark.full
def test_asynchronous_settings_are_predicted(tmp_path, capsys):
    """A saved plan gives the same table again; with a fleet of processes the search finds the trainer's plan."""
    lengths = "--mean-response", "300", "--sigma", "0.5"
    saved, apart = tmp_path / "plan.yaml", ("--config", "llama3-8b-ppo", "--cluster", "16xh100", *lengths)
    settings = "ppo.asynchronous={staleness: 2, uncorrected: true}", "ppo.rollout_batch=64"
    assert cli([*apart, *settings, "--save", str(saved)]) == 0
    table = capsys.readouterr().out.partition("\nasynchronous: ")[2]
    assert (
        "with staleness=2; lengths of responses are lognormal with sigma 0.5, cut at 1024, and have the mean 300\n"
        in table
    )
    assert cli([*apart, *settings, "--plan", str(saved)]) == 0
    assert capsys.readouterr().out.partition("\nasynchronous: ")[2] == table
    adapters = "lora.rank=16", "mesh.fsdp=16"  # whose base may be in another mesh than the config's
    assert cli([*apart, *settings, *adapters, "fleet.workers=1", "--proposals", "50"]) == 0
    table = capsys.readouterr().out.partition("\nasynchronous: ")[2]
    assert table.endswith("one host, and 16xh100 has 2 hosts: this is a prediction only\n")
    assert cli([*apart, *settings, "fleet.workers=3", "--proposals", "50"]) == 2
    error = capsys.readouterr().err
    assert "rollout.slots=64 must give each of 3 logical worker(s) a multiple of its " in error
    (slots,) = re.findall(r"choose rollout.slots=\d+", error)  # what is advised works
    assert cli([*apart, *settings, "fleet.workers=3", "--proposals", "50", slots.split()[1]]) == 0


def test_shorter_responses_take_less(capsys):
    seconds = []
    for mean in ("1024", "100"):
        assert cli([*ARGUMENTS, "--plan", "colocate", "--mean-response", mean, "rollout.slots=64"]) == 0
        output = capsys.readouterr().out
        assert f"rows of {1024 + int(mean)} tokens in the mean and 2048 at most" in output
        seconds += map(float, re.findall(r"h100: ([\d.]+) s an iteration", output))
    assert seconds[1] < 0.9 * seconds[0]


def test_what_is_proposed_for_several_hosts_runs_in_their_processes(tmp_path, capsys):
    """Slices are faster on two nodes, each of whose processes has its own."""
    saved = tmp_path / "plan.yaml"
    cluster = ["--config", "llama3-8b-ppo", "--cluster", "16xh100", "ppo.algorithm.micro_batches=4"]
    assert cli([*cluster, "--proposals", "1000", "--save", str(saved)]) == 0
    proposed = plan_of(yaml.safe_load(saved.read_text()))
    slices = {(place.devices.start, place.devices.stop) for place in proposed.placements.values()}
    assert len(slices) > 1 and all(16 % (stop - start) == 0 for start, stop in slices)
    assert cli([*cluster, "--plan", str(saved)]) == 0


def test_a_plan_that_does_not_fit_is_printed_and_refused(capsys):
    assert cli([*ARGUMENTS, "--plan", "colocate", "ppo.rollout_batch=8192"]) == 2
    captured = capsys.readouterr()
    assert "bottleneck: " in captured.out
    assert captured.err.startswith("error: plan colocate needs ") and "rest for actor.generate: choose " in captured.err


CONFIGS = "llama3-8b-ppo", "llama3-70b-ppo", "qwen3-8b-lora"
CLUSTERS = ("{}xh100", "{}xa100", "{}xh200")


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.full if seed == 1 else pytest.mark.proof("memory")) for seed in range(12)],
)
def test_who_follows_the_remedy_has_a_plan(seed, capsys):
    """One sentence suffices: with what it names the same command finds a plan, or prices the given one as it fits."""
    draw, followed = random.Random(seed), 0
    while followed < 2:
        name = draw.choice(CONFIGS)
        cluster, count = draw.choice(CLUSTERS), draw.choice((1, 2, 4, 8, 16, 64))
        overrides = [f"ppo.rollout_batch={draw.choice((96, 256, 1024, 1000))}"]
        overrides += draw.choice(([], ["compute.remat=products"], ["sleep.optimizer=host"]))
        colocated = ["--plan", "colocate", "mesh.data=1", "mesh.fsdp=-1", "mesh.tensor=1"]
        options = draw.choice((["--proposals", "1"], colocated))

        def run(count, *more):
            code = cli(["--config", name, "--cluster", cluster.format(count), *options, *overrides, *more])  # noqa: B023
            return code, capsys.readouterr().err.rpartition(": choose ")[2].strip()

        code, remedy = run(count)
        if not code or "fit" in remedy or remedy.startswith(("a smaller model", "a multiple", "another number")):
            continue  # it fits, or nothing that a setting changes would make it fit
        assert code == 2
        changes = [re.sub(r" of (\d+).*", r"=\1", change) for change in remedy.partition(" or ")[0].split(" with ")]
        more = next((int(change.split()[0]) for change in changes if change.endswith(" devices")), count)
        followed += 1
        assert run(more, *(change for change in changes if "=" in change))[0] == 0, (name, count, remedy)


def test_bad_input_is_one_sentence(capsys):
    cluster, few = "--cluster 8xh100", "--cluster 8xh100 --proposals 10"
    for arguments, sentence in (
        ("--cluster 16xh101", "cluster=16xh101 is of no known hardware"),
        ("--cluster 12xh100", "the nearest is 16xh100"),
        (f"{cluster} --seconds nan", "seconds=nan must be more than 0 and finite"),
        (f"{cluster} --proposals -1", "proposals=-1 must be more than 0"),
        (f"{cluster} --proposals 9999999999", "proposals=9999999999: it must be at most 2147483647"),
        (f"{cluster} --save .", "--save . is a directory: name a file in it"),
        (f"{cluster} --plan mine.yaml", "plan=mine.yaml is neither colocate,"),
        (f"{cluster} --plan split --seconds 1", "seconds=1.0 (--seconds) has no effect with plan=split"),
        (f"{cluster} --plan split stages=[sft]", "plan=split has no effect with stages=[sft]"),
        (f"{cluster} --mean-response 9e9", "mean_response=9e+09 must be from 1 to data.max_response=1024"),
        (f"{cluster} --sigma 1", "sigma=1 has no effect without asynchronous training or compute.score_rows"),
        (f"{cluster} --sigma 4 ppo.asynchronous.staleness=1", "sigma=4 must be from 0 to 3"),
        (f"{cluster} --sigma 1 ppo.asynchronous.staleness=1", "sigma=1 needs mean_response"),
        (f"{cluster} --plan split --overlap ppo.asynchronous.staleness=1", "overlap=True has no effect with ppo.async"),
        (f"{cluster} --processes 2 ppo.asynchronous.clock=wall", "asynchronous.clock=wall is for runs of one process"),
        (f"{few} ppo.asynchronous.staleness=1", "proposals=10 (--proposals) has no effect with ppo.asynch"),
        (f"{cluster} --processes 3", "processes=3 must divide the 8 devices: each has equally many"),
        (f"{cluster} --plot plan.txt", "must end in .svg, .png, .pdf"),
        (f"{few} --plot /proc/none/plan.svg", "cannot be written (No such file or directory): choose another place"),
        (f"{few} ppo.rolout_batch=512", "ppo.rolout_batch"),
        (f"--config quickstart-dpo {few} dpo.pipeline.stages=2", "dpo.pipeline has no place in a search of plans"),
        (
            "--cluster v5e-64 --plan colocate mesh.fsdp=-1",
            "choose a multiple of 2048, or take ppo.algorithm.micro_batches=1",
        ),
        (
            "--config arithmetic-grpo --cluster 1xh100 --plan colocate mesh.data=1 mesh.fsdp=1 "
            "grpo.algorithm.old_logprobs=rollout grpo.asynchronous.staleness=2",
            "devices of its own: set fleet.workers=1, which draws in another process, or leave",
        ),
    ):
        assert cli(["--config", "llama3-8b-ppo", *arguments.split()]) == 2, arguments  # the last --config counts
        error = capsys.readouterr().err
        assert error.startswith("error: ") and sentence in error and error.count("\n") == 1, (arguments, error)
