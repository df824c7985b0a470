from collections import Counter
from functools import partial

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jrlhf.meshes import collectives, make_mesh

# Lines as XLA prints them for CPU, GPU and TPU.
LINES = """
ENTRY %main (param: f32[16,8]) -> f32[64,8] {
  %all-gather = f32[64,8]{1,0} all-gather(%param), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %ag-start = (bf16[2,8]{1,0}, bf16[16,8]{1,0:T(8,128)}) all-gather-start(%param), channel_id=2, dimensions={0}
  %ag-done = bf16[16,8]{1,0} all-gather-done(%ag-start)
  all-reduce.3 = (f32[], f32[8]{0}) all-reduce(%all-gather, %b), to_apply=%add, metadata={op_name="all-to-all(x)"}
  %use = f32[8]{0} add(%all-gather, %all-reduce.3), metadata={op_name="jit(f)/reduce-scatter(y)"}
  %call = f32[8]{0} fusion(%all-gather), kind=kLoop, calls=%fused_all-gather
  ROOT %permute = f32[64,8]{1,0} collective-permute(%all-gather), source_target_pairs={{0,1}}
}
"""


def test_counts_instructions_and_neither_names_nor_second_halves():
    expected = Counter({"all-gather": 2, "all-reduce": 1, "collective-permute": 1})
    assert collectives(LINES) == expected


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (partial(lax.all_gather, axis_name="fsdp"), "all-gather"),
        (partial(lax.psum, axis_name="fsdp"), "all-reduce"),
        (partial(lax.psum_scatter, axis_name="fsdp"), "reduce-scatter"),
        (partial(lax.all_to_all, axis_name="fsdp", split_axis=0, concat_axis=0), "all-to-all"),
        (partial(lax.ppermute, axis_name="fsdp", perm=[(0, 1), (1, 0)]), "collective-permute"),
        (lambda x: 2 * x, None),
    ],
    ids=["all_gather", "psum", "psum_scatter", "all_to_all", "ppermute", "none"],
)
def test_counts_what_xla_compiles(operation, kind: str | None):
    mesh = make_mesh(fsdp=8)
    x = jax.ShapeDtypeStruct((64, 3), "float32", sharding=jax.NamedSharding(mesh, P("fsdp")))
    out_specs = P() if kind == "all-reduce" else P("fsdp")
    compiled = jax.jit(jax.shard_map(operation, mesh=mesh, in_specs=P("fsdp"), out_specs=out_specs)).lower(x).compile()
    expected = Counter() if kind is None else Counter({kind: 1})
    assert collectives(compiled) == collectives(str(compiled.as_text())) == expected
