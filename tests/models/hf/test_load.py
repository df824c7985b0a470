"""Hugging Face directories onto a mesh: every bit in its place, and a sentence for every file that is not right."""

import json
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.models import export_hf, param_shardings
from jrlhf.models.hf import load_hf, read_config
from tests.models.shared import assert_stored
from tests.support.processes import free_port

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, fsdp=2, tensor=2)


def random_model(reference, config, head="lm"):
    """Random weights as a file can hold them: vocabulary tables end in zero rows."""
    params = reference.random_params(config, head)
    for table in {"embedding", "unembedding"} & params.keys():
        params[table][config.vocab_size :] = 0
    return params


def assert_same(loaded, params):
    if isinstance(loaded["layers"], list):
        loaded = {**loaded, "layers": jax.tree.map(lambda *layers: np.stack(layers), *jax.device_get(loaded["layers"]))}
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), loaded, params)


def rewrite(directory, change):
    weights = load_file(directory / SINGLE)
    change(weights)
    save_file(weights, directory / SINGLE, metadata={"format": "pt"})


# The others' tensors are named as these', and tests/models/test_parity.py loads and exports every family.
OFTEN = ("gemma3_text", "gpt2")
SELDOM = ("llama", "llama bands", "llama biased", "mistral", "qwen2", "qwen3", "gemma2")


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.proof("families")) for name in SELDOM)]
)
def test_every_bit_of_every_family_in_every_storage(reference, tmp_path, mesh, configs, name):
    """Progress counts every byte."""
    assert {*OFTEN, *SELDOM} == configs.keys()
    config = configs[name]
    params = random_model(reference, config)
    directory = export_hf(params, config, tmp_path / "model", eos_ids=(3,), shard_bytes=20_000)
    index, files = json.loads((directory / INDEX).read_text()), sorted(directory.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [weight.nbytes for file in files for weight in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(sizes) and len(index["weight_map"]) == len(sizes)
    assert all(file.stat().st_size < max(20_000, *sizes) + 5_000 for file in files)  # and a header
    for layout, target_mesh in ((TRAIN, mesh), (GENERATE, make_mesh(1, 4, 2, axis_type=AxisType.Auto))):
        calls: list[tuple[int, int]] = []
        hf, loaded = load_hf(directory, target_mesh, layout=layout, progress=lambda *call, own=calls: own.append(call))
        done, totals = zip(*calls, strict=True)
        assert set(totals) == {sum(sizes)} and (done[0], done[-1]) == (0, sum(sizes))
        assert list(done) == sorted(set(done)) and len(done) >= 2 + config.layers
        assert (hf.model, hf.family, hf.head, hf.eos_ids) == (config, name.split()[0], "lm", (3,))
        assert_same(loaded, params)
        assert_stored(loaded, param_shardings(config, target_mesh, layout))
        again = export_hf(loaded, config, tmp_path / "again", eos_ids=(3,), shard_bytes=20_000)
        for file in directory.iterdir():
            assert (again / file.name).read_bytes() == file.read_bytes()


def test_a_reward_model(reference, tmp_path, mesh, configs):
    config = configs["gpt2"]
    params = random_model(reference, config, "scalar")
    directory = export_hf(params, config, tmp_path / "model", pad_id=0)
    hf, loaded = load_hf(directory, mesh, head="scalar")
    assert hf.head == "scalar" and hf.model == config
    assert_same(loaded, params)  # with a bias that is not zero
    assert_stored(loaded, param_shardings(config, mesh, TRAIN, "scalar"))

    _, critic = load_hf(directory, mesh, head="scalar", keep_head=False)
    assert_same(critic, {**params, "value_head": jax.tree.map(np.zeros_like, params["value_head"])})
    with pytest.raises(ValueError, match="holds a reward model, which scores no tokens: choose a language model"):
        load_hf(directory, mesh)

    params["value_head"]["bias"] = np.zeros((), np.float32)
    directory = export_hf(params, config, tmp_path / "unbiased", pad_id=0)
    assert "score.bias" not in load_file(directory / SINGLE)
    assert_same(load_hf(directory, mesh, head="scalar")[1], params)


def test_a_critic_from_a_language_model(reference, tmp_path, mesh, configs):
    params = random_model(reference, configs["llama"])
    directory = export_hf(params, configs["llama"], tmp_path / "model")
    hf, loaded = load_hf(directory, mesh, head="scalar")
    assert hf.head == "lm"
    del params["unembedding"]
    head = {"kernel": np.zeros(32, np.float32), "bias": np.zeros((), np.float32)}
    assert_same(loaded, {**params, "value_head": head})
    assert_stored(loaded, param_shardings(configs["llama"], mesh, TRAIN, "scalar"))

    rewrite(directory, lambda weights: weights.update({"score.weight": np.ones((1, 32), np.float32)}))
    with pytest.raises(ValueError, match="holds 'score.weight', which a llama model has no use for"):
        load_hf(directory, mesh, head="scalar")


def test_dtypes(reference, tmp_path, mesh, configs):
    params = random_model(reference, configs["qwen2"])
    directory = export_hf(params, configs["qwen2"], tmp_path / "model", dtype=jnp.bfloat16)
    halved = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params)
    assert {array.dtype for array in load_file(directory / SINGLE).values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert_same(load_hf(directory, mesh)[1], jax.tree.map(lambda x: x.astype(np.float32), halved))
    hf, loaded = load_hf(directory, mesh, dtype=None)
    assert hf.dtype == "bfloat16"
    assert_same(loaded, halved)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    _, loaded = load_hf(directory, mesh, layout=GENERATE, dtype=jnp.bfloat16)
    layer = loaded["layers"][0]
    assert loaded["embedding"].dtype == layer["attention"]["wq"].dtype == layer["attention"]["bq"].dtype == jnp.bfloat16
    # Vectors are applied in float32.
    assert loaded["final_norm"]["scale"].dtype == layer["mlp_norm"]["scale"].dtype == jnp.float32
    assert_same(jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), loaded), halved)
    # Layers that differ: what holds the numbers of all.
    weights = load_file(directory / SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = params["layers"]["mlp"]["up"][1].T.copy()
    save_file(weights, directory / SINGLE)
    _, loaded = load_hf(directory, mesh, dtype=None)
    assert loaded["layers"]["mlp"]["up"].dtype == jnp.float32 and loaded["layers"]["mlp"]["gate"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded["layers"]["mlp"]["up"][1], params["layers"]["mlp"]["up"][1])


@pytest.mark.parametrize("name", ["llama bands", "gpt2"])
def test_what_other_writers_leave_out_and_add(reference, tmp_path, mesh, configs, name):
    params = random_model(reference, configs[name])
    directory = export_hf(params, configs[name], tmp_path / "model")

    def strip(weights):  # as the hub's gpt2, and as what AutoModel.save_pretrained writes
        for key in list(weights):
            weights[key.removeprefix("model.").removeprefix("transformer.")] = weights.pop(key)
        weights["lm_head.weight"] = weights["wte.weight" if name == "gpt2" else "embed_tokens.weight"].copy()
        if name == "gpt2":
            weights["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
            weights["h.1.attn.masked_bias"] = np.full(1, -1e4, np.float32)
        else:
            weights["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    rewrite(directory, strip)
    assert_same(load_hf(directory, mesh)[1], params)


# ---- what is not right


@pytest.fixture(scope="module")
def good(reference, tmp_path_factory, configs):
    root = tmp_path_factory.mktemp("good")
    params = random_model(reference, configs["llama"])
    export_hf(params, configs["llama"], root / "whole")
    export_hf(params, configs["llama"], root / "parts", shard_bytes=40_000)
    return root


@pytest.fixture
def whole(good, tmp_path):
    return shutil.copytree(good / "whole", tmp_path / "whole")


@pytest.fixture
def parts(good, tmp_path):
    return shutil.copytree(good / "parts", tmp_path / "parts")


def refused(directory, mesh, message, error: type[Exception] = ValueError):
    with pytest.raises(error, match=message) as caught:
        load_hf(directory, mesh)
    assert "\n" not in str(caught.value)


def with_header(path, change):
    """The file with another header, its data as it is."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


NORM, NEXT = "model.norm.weight", "model.layers.0.input_layernorm.weight"


def test_headers_that_lie(whole, mesh):
    content = (whole / SINGLE).read_bytes()
    cases: Any = (
        (lambda h: h[NORM].update(data_offsets=[0, 10**12]), "is cut short: 'model.norm.weight' ends at byte 10000000"),
        (lambda h: h[NORM].update(data_offsets=[-128, 0]), "bytes -128 to 0, which cannot be"),
        (lambda h: h[NORM].update(shape=[33]), r"gives 'model.norm.weight', F32 of shape \(33,\), 128 bytes"),
        (lambda h: h[NORM].update(shape=[-1, -32]), "which cannot be"),
        (lambda h: h[NORM].update(dtype="F4"), "in dtype 'F4', which is unknown"),
        (lambda h: h[NORM].update(data_offsets=h[NEXT]["data_offsets"]), "where the tensor before it ends at"),
        (lambda h: h[NORM].pop("shape"), "has no dtype, shape and data_offsets for 'model.norm.weight'"),
        (lambda h: h.pop(NORM), "tensor before it ends at|belong to no tensor"),
    )
    for change, message in cases:

        def changed(header, change=change):
            change(header)
            return header

        with_header(whole / SINGLE, changed)
        refused(whole, mesh, f"{SINGLE} .*({message}).*: fetch the file again")
        (whole / SINGLE).write_bytes(content)


def test_headers_that_are_none(whole, mesh):
    path = whole / SINGLE
    content = path.read_bytes()
    for text, message in (
        (b"{", "a header that is not JSON"),
        (b"[" * 99999, "a header that is not JSON"),
        (b"[]", "a header that is not an object"),
        (b"\xff\xfe", "a header that is not JSON"),
        (b'{"a": {}, "a": {}}', "a name twice in one object"),
    ):
        with_header(path, lambda _, text=text: text)
        refused(whole, mesh, message)
        path.write_bytes(content)
    for cut in (0, 7, 8, 1000):
        path.write_bytes(content[:cut])
        refused(whole, mesh, f"is no whole safetensors file: its {cut} bytes cannot hold the header")
    path.write_bytes(content[:-1])
    refused(whole, mesh, "is cut short: .* ends at byte")
    path.write_bytes(content + b"\0")
    refused(whole, mesh, "has 1 bytes that belong to no tensor")
    path.write_bytes(struct.pack("<Q", 2**63) + content[8:])
    refused(whole, mesh, "cannot hold the header of 9223372036854775808")


def test_an_index_that_is_wrong(parts, mesh):
    path = parts / INDEX
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    for place in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, "a\\b", "a\0b"):
        path.write_text(json.dumps({"weight_map": index["weight_map"] | {NORM: place}}))
        refused(parts, mesh, "places 'model.norm.weight' in .*, which is no name of a file beside it")
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        path.write_text(text)
        refused(parts, mesh, "is not an index with a weight_map")
    path.write_text('{"weight_map": {}}')
    refused(parts, mesh, "names no tensor")
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {NORM: files[0]}}))
    refused(parts, mesh, f"{files[0]} does not hold 'model.norm.weight'")
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"more": files[0]}}))
    refused(parts, mesh, "does not hold 'more'")
    path.write_text(json.dumps(index))
    content = (parts / files[-1]).read_bytes()
    (parts / files[-1]).unlink()
    refused(parts, mesh, f"names {files[-1]}, which is not there: fetch it", FileNotFoundError)
    (parts / files[-1]).write_bytes((parts / files[0]).read_bytes())
    refused(parts, mesh, f"{files[-1]} and {files[0]} both hold")
    (parts / files[-1]).write_bytes(content[:-4])
    refused(parts, mesh, f"{files[-1]} is cut short")


def test_tensors_that_do_not_belong(whole, mesh):
    original = (whole / SINGLE).read_bytes()

    def case(change, message):
        rewrite(whole, change)
        refused(whole, mesh, message)
        (whole / SINGLE).write_bytes(original)

    up = "model.layers.1.mlp.up_proj.weight"
    case(lambda w: w.pop(up), f"has no tensor '{up}', which a llama model of 3 layers has")
    case(lambda w: [w.pop(name) for name in list(w) if ".2." in name], r"has no tensor '.*\.2\..*' \(and 8 more\)")
    case(lambda w: w.update({up: w[up].T.copy()}), r"'model.layers.1.*' of shape \(32, 48\), .* asks for \(48, 32\)")
    case(lambda w: w.update({up: w[up].astype(np.float64)}), "in dtype F64: choose weights in F32, BF16, F16")
    case(lambda w: w.update({up: w[up].astype(ml_dtypes.float8_e4m3fn)}), "in dtype F8_E4M3: choose weights in")
    bias = "model.layers.0.self_attn.q_proj.bias"
    case(lambda w: w.update({bias: np.ones(64, np.float32)}), f"holds '{bias}', which a llama model has no use for")
    case(lambda w: w.update({"v_head.weight": np.ones(3, np.float32)}), "holds 'v_head.weight', which")
    case(lambda w: w.update({"model.layers.3.x": np.ones(3, np.float32), "y": np.ones(1)}), r"\(and 1 more\)")

    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused(whole, mesh, "'lm_head.weight' of its own, but config.json says tie_word_embeddings")
    rewrite(whole, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].copy()}))
    assert "unembedding" not in load_hf(whole, mesh)[1]
    (whole / "config.json").write_text(json.dumps(config | {"vocab_size": 199}))
    refused(whole, mesh, r"'model.embed_tokens.weight' of shape \(200, 32\), .* asks for \(199, 32\)")


def test_directories_without_safetensors(whole, mesh):
    (whole / SINGLE).rename(whole / "consolidated.safetensors")
    refused(whole, mesh, f"neither {SINGLE} nor {INDEX} .found: consolidated.safetensors", FileNotFoundError)
    (whole / "pytorch_model.bin").write_bytes(b"")
    refused(whole, mesh, "only as pytorch_model.bin, a pickle, .* save_pretrained", FileNotFoundError)


def test_a_config_read_before_may_be_changed(whole, mesh):
    config = read_config(whole)
    longer = replace(config, model=replace(config.model, max_positions=128))
    assert load_hf(whole, mesh, config=longer)[0].model.max_positions == 128
    odd = make_mesh(1, 1, 3, devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="heads=4 cannot be divided over tensor=3"):
        load_hf(whole, odd)


def test_unknown_arguments_are_named(whole, mesh):
    unknown: Any = "value"
    with pytest.raises(ValueError, match="^head='value' must be 'lm' or 'scalar'$"):
        load_hf(whole, mesh, head=unknown)
    for dtype in ("bf16", jnp.int8):
        with pytest.raises(ValueError, match="^dtype='(bf16|int8)' must be None or one of floats, such as"):
            load_hf(whole, mesh, dtype=dtype)


# ---- memory and processes

_MEASURE = """
import pathlib, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.models import ModelConfig, export_hf, init_sharded
from jrlhf.models.hf import load_hf

root = pathlib.Path(sys.argv[1])
mesh = make_mesh(fsdp=2)

def model(layers):
    return ModelConfig(16000, 1024, layers, 16, 8, 64, 2816, 64, tie_embeddings=False)

if sys.argv[2] == "write":
    for name, layers in (("large", 8), ("small", 1)):
        params = init_sharded(model(layers), jax.random.key(0), mesh)
        export_hf(params, model(layers), root / name, dtype=jnp.bfloat16, shard_bytes=100_000_000)
    raise SystemExit

def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

layout, dtype = {"train": (TRAIN, jnp.float32), "generate": (GENERATE, jnp.bfloat16)}[sys.argv[2]]
layout_mesh = make_mesh(fsdp=2) if layout is TRAIN else make_mesh(tensor=2)
load_hf(root / "small", layout_mesh, layout=layout, dtype=dtype)  # what compiling needs
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
_, params = load_hf(root / "large", layout_mesh, layout=layout, dtype=dtype)
arrays = sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
print((kilobytes("VmHWM") - before) * 1024 - arrays, arrays)
"""


@pytest.mark.proof("memory")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_host_never_holds_a_second_copy(tmp_path):
    def run(what):
        command = [sys.executable, "-c", _MEASURE, str(tmp_path), what]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout

    run("write")
    files = [path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors")]
    assert len(files) >= 3 and sum(files) > 2.5 * max(files)
    for what in ("train", "generate"):
        beyond, arrays = map(int, run(what).split())
        assert arrays >= sum(files) - 2**20
        assert beyond <= max(files), f"{what}: {beyond / 1e6:.0f} MB beyond the arrays"


_PROCESS = """
import sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[3]))
from jax.experimental import multihost_utils
from jrlhf.meshes import GENERATE, TRAIN, make_mesh
from jrlhf.models.hf import export_hf, load, load_hf

copied = 0
padded = load._padded

def count(*arguments):
    global copied
    piece = padded(*arguments)
    copied += piece.nbytes
    return piece

load._padded = count
root = sys.argv[1]
for name, layout, mesh in (("train", TRAIN, make_mesh(fsdp=4)), ("generate", GENERATE, make_mesh(tensor=2, fsdp=2))):
    copied = 0
    hf, params = load_hf(f"{root}/model", mesh, layout=layout)
    owned = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for shard in leaf.addressable_shards:
            owned[str(path), str(shard.index)] = shard.data.nbytes
    assert copied == sum(owned.values()), (name, copied, sum(owned.values()))
    assert copied < 0.8 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)) or name == "generate"
    export_hf(params, hf.model, f"{root}/{name}", eos_ids=hf.eos_ids)
"""


@pytest.mark.proof("processes")
def test_two_processes_copy_their_own_slices_and_write_one_model(reference, tmp_path, configs):
    params = random_model(reference, configs["qwen2"])
    directory = export_hf(params, configs["qwen2"], tmp_path / "model", eos_ids=(3,))
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path), address, str(index)], stderr=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    for name in ("train", "generate"):
        for file in directory.iterdir():
            assert (tmp_path / name / file.name).read_bytes() == file.read_bytes()
