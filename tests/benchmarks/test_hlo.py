from collections import Counter

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.hlo import Loop, Traffic, collective_traffic, collectives, loops
from jrlhf.meshes import make_mesh

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
    assert collectives(LINES) == Counter({"all-gather": 2, "all-reduce": 1, "collective-permute": 1})


# A loop of three trips on a GPU, one that a counter bounds by five as on TPUs, and one of unknown length.
PROGRAM = """
HloModule m

%fused_transpose (p: bf16[8,2]) -> bf16[2,8] {
  %p = bf16[8,2]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[2,8]{1,0} transpose(%p), dimensions={1,0}
}

%counted (arg.1: (s32[], f32[64])) -> (s32[], f32[64]) {
  %arg.1 = (s32[], f32[64]{0}) parameter(0)
  %x = f32[64]{0} get-tuple-element(%arg.1), index=1
  %rs = f32[16]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add
  %ag-start = (f32[16]{0}, f32[64]{0:T(128)}) all-gather-start(%rs), dimensions={0}
  %ag-done = f32[64]{0:T(128)} all-gather-done(%ag-start)
  %turned = bf16[2,8]{1,0} fusion(%y), kind=kLoop, calls=%fused_transpose
  %copy.1 = f32[64]{0} copy(%ag-done)
  ROOT %out = (s32[], f32[64]{0}) tuple(%i, %copy.1)
}

%unknown (arg.2: (pred[], s32[4])) -> (pred[], s32[4]) {
  %arg.2 = (pred[], s32[4]{0}) parameter(0)
  ROOT %reduced = (pred[], s32[4]{0}) all-reduce(%a, %b), to_apply=%add
}

%bounded (arg.3: (s32[], f32[64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5), metadata={op_name="cond/lt"}
  %arg.3 = (s32[]{:T(128)}, f32[64]{0}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%arg.3), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%either (arg.4: (pred[], s32[4])) -> pred[] {
  %arg.4 = (pred[], s32[4]{0}) parameter(0)
  ROOT %go = pred[] get-tuple-element(%arg.4), index=0
}

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %w.1 = (s32[], f32[64]{0}) while(%t), condition=%either, body=%counted, backend_config={"known_trip_count":{"n":"3"}}
  %w.2 = (s32[], f32[64]{0}) while(%t), condition=%bounded, body=%counted
  %w.3 = (pred[], s32[4]{0}) while(%u), condition=%either, body=%unknown
  ROOT %r = f32[64]{0} get-tuple-element(%w.2), index=1
}
"""


def test_traffic_counts_what_a_loop_repeats_and_loops_what_a_trip_launches_and_copies():
    gathered, reduced = Traffic(count=8, bytes=8 * 256), Traffic(count=1, bytes=1 + 16)
    assert collective_traffic(PROGRAM) == {"all-gather": gathered, "reduce-scatter": gathered, "all-reduce": reduced}
    copied = 64 * 4 + 2 * 8 * 2
    assert loops(PROGRAM) == [Loop(3, 4, copied), Loop(5, 4, copied), Loop(None, 1, 0)]


def test_traffic_of_a_compiled_scan():
    mesh = make_mesh(1, 8, 1)

    def gathered(x):
        def add(total, part):
            return total + lax.all_gather(part, "fsdp", tiled=True), None

        start = lax.pcast(jax.numpy.zeros(16), "fsdp", to="varying")
        return lax.scan(add, start, x)[0][:2]

    mapped = jax.shard_map(gathered, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P("fsdp"))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((5, 16), "float32", sharding=jax.NamedSharding(mesh, P(None, "fsdp")))
        compiled = jax.jit(mapped).lower(x).compile()
    assert collective_traffic(compiled) == {"all-gather": Traffic(count=5, bytes=5 * 16 * 4)}
