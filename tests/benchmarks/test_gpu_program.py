"""`benchmarks/gpu_program.py` and `gpu_texts.py` read what XLA writes about a program."""

import textwrap

import pytest
from helpers import benchmark

gpu, texts = benchmark("gpu_program"), benchmark("gpu_texts")

# A step of 6 ticks: a guarded forward with a loop of 3 layers, and an update with a loop of unknown
# length. The idle branch of the forward copies a ring, and each tick copies another one.
HLO = """\
HloModule jit_run_step, is_scheduled=true

%fused_add (p0: f32[4]) -> f32[4] {
  %p0 = f32[4]{0} parameter(0)
  ROOT %add.9 = f32[4]{0} add(%p0, %p0)
}

%fused_transpose (p1: bf16[1000,500]) -> bf16[500,1000] {
  %p1 = bf16[1000,500]{1,0} parameter(0)
  ROOT %transpose.9 = bf16[500,1000]{1,0} transpose(%p1), dimensions={1,0}
}

%fused_slice (p2: f32[1000,250], p3: f32[1,250], p4: s32[]) -> (f32[1000,250], f32[4]) {
  %p2 = f32[1000,250]{1,0} parameter(0)
  %p3 = f32[1,250]{1,0} parameter(1)
  %p4 = s32[] parameter(2)
  %dynamic-update-slice.9 = f32[1000,250]{1,0} dynamic-update-slice(%p2, %p3, %p4, %p4)
  %bitcast.9 = f32[1000,250]{1,0} bitcast(%dynamic-update-slice.9)
  %broadcast.9 = f32[4]{0} broadcast(%p4), dimensions={}
  ROOT %tuple.9 = (f32[1000,250]{1,0}, f32[4]{0}) tuple(%bitcast.9, %broadcast.9)
}

%layer (l: (f32[4])) -> (f32[4]) {
  %l = (f32[4]{0}) parameter(0)
  %get-tuple-element.1 = f32[4]{0} get-tuple-element(%l), index=0
  %gemm.1 = f32[4]{0} custom-call(%get-tuple-element.1), custom_call_target="__cublas$lt$matmul"
  %fusion.1 = f32[4]{0} fusion(%gemm.1), kind=kLoop, calls=%fused_add
  ROOT %tuple.1 = (f32[4]{0}) tuple(%fusion.1)
}

%layer_condition (c: (f32[4])) -> pred[] {
  %c = (f32[4]{0}) parameter(0)
  ROOT %lt.1 = pred[] constant(true)
}

%forward (f: (f32[4], f32[1000,250])) -> (f32[4], f32[1000,250]) {
  %f = (f32[4]{0}, f32[1000,250]{1,0}) parameter(0)
  %get-tuple-element.2 = f32[4]{0} get-tuple-element(%f), index=0
  %get-tuple-element.3 = f32[1000,250]{1,0} get-tuple-element(%f), index=1
  %while.1 = (f32[4]{0}) while(%get-tuple-element.2), condition=%layer_condition, body=%layer, backend_config={"known_trip_count":{"n":"3"}}, metadata={op_name="jit(run_step)/while/body/forward/stage1-2/cond/branch_1_fun/while"}
  %fusion.2 = (f32[1000,250]{1,0}, f32[4]{0}) fusion(%get-tuple-element.3, %get-tuple-element.2, %get-tuple-element.2), kind=kLoop, calls=%fused_slice
  ROOT %tuple.2 = (f32[4]{0}, f32[1000,250]{1,0}) tuple(%fusion.2)
}

%no_forward (n: (f32[4], f32[1000,250])) -> (f32[4], f32[1000,250]) {
  %n = (f32[4]{0}, f32[1000,250]{1,0}) parameter(0)
  %get-tuple-element.4 = f32[1000,250]{1,0} get-tuple-element(%n), index=1
  %copy.1 = f32[1000,250]{1,0} copy(%get-tuple-element.4)
  ROOT %tuple.3 = (f32[4]{0}, f32[1000,250]{1,0}) tuple(%get-tuple-element.4, %copy.1)
}

%part (q: (f32[4])) -> (f32[4]) {
  %q = (f32[4]{0}) parameter(0)
  ROOT %fusion.3 = f32[4]{0} fusion(%q), kind=kLoop, calls=%fused_add
}

%part_condition (r: (f32[4])) -> pred[] {
  %r = (f32[4]{0}) parameter(0)
  ROOT %lt.2 = pred[] constant(true)
}

%no_update (u: f32[4]) -> f32[4] {
  ROOT %u = f32[4]{0} parameter(0)
}

%update (v: f32[4]) -> f32[4] {
  %v = f32[4]{0} parameter(0)
  ROOT %while.2 = (f32[4]{0}) while(%v), condition=%part_condition, body=%part, metadata={op_name="jit(run_step)/while/body/update/cond/branch_1_fun/while"}
}

%tick (t: (f32[4], f32[1000,250])) -> (f32[4], f32[1000,250]) {
  %t = (f32[4]{0}, f32[1000,250]{1,0}) parameter(0)
  %get-tuple-element.5 = f32[4]{0} get-tuple-element(%t), index=0
  %get-tuple-element.6 = f32[1000,250]{1,0} get-tuple-element(%t), index=1
  %collective-permute-start.1 = (bf16[4,1000]{1,0}, bf16[4,1000]{1,0}) collective-permute-start(%get-tuple-element.5), backend_config={"collective_backend_config":{"is_sync":false}}
  %conditional.1 = (f32[4]{0}, f32[1000,250]{1,0}) conditional(%p, %t, %t), true_computation=%forward, false_computation=%no_forward, metadata={op_name="jit(run_step)/while/body/forward/stage1-2/cond"}
  %collective-permute-done.1 = bf16[4,1000]{1,0} collective-permute-done(%collective-permute-start.1)
  %conditional.2 = f32[4]{0} conditional(%i, %x, %x), branch_computations={%no_update, %update}, metadata={op_name="jit(run_step)/while/body/update/cond"}
  %copy.2 = f32[1000,250]{1,0} copy(%get-tuple-element.6)
  %copy.3 = f32[1000,250]{0,1} copy(%get-tuple-element.6)
  %fusion.4 = bf16[500,1000]{1,0} fusion(%get-tuple-element.6), kind=kInput, calls=%fused_transpose
  %collective-permute-start.2 = (f32[10]{0}, f32[10]{0}) collective-permute-start(%copy.2), backend_config={"collective_backend_config":{"is_sync":true}}
  %collective-permute-done.2 = f32[10]{0} collective-permute-done(%collective-permute-start.2)
  ROOT %tuple.4 = (f32[4]{0}, f32[1000,250]{1,0}) tuple(%get-tuple-element.5, %copy.2)
}

%tick_condition (w: (f32[4], f32[1000,250])) -> pred[] {
  %w = (f32[4]{0}, f32[1000,250]{1,0}) parameter(0)
  ROOT %lt.3 = pred[] constant(true)
}

ENTRY %main (a: f32[4], b: f32[1000,250]) -> (f32[4], f32[1000,250]) {
  %a = f32[4]{0} parameter(0)
  %b = f32[1000,250]{1,0} parameter(1)
  %tuple.5 = (f32[4]{0}, f32[1000,250]{1,0}) tuple(%a, %b)
  ROOT %while.3 = (f32[4]{0}, f32[1000,250]{1,0}) while(%tuple.5), condition=%tick_condition, body=%tick, backend_config={"known_trip_count":{"n":"6"}}, metadata={op_name="jit(run_step)/while"}
}
"""

# The ring is value 1. The copy of the idle branch goes to another buffer, that of the tick does not,
# and the fusion writes its slice in place.
ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 2000000, preallocated-temp:
 value: <1 get-tuple-element.3 @0> (size=1000000,offset=0): f32[1000,250]{1,0}
 value: <2 fusion.2{0} @0> (size=1000000,offset=0): f32[1000,250]{1,0}
 value: <3 copy.1 @0> (size=1000000,offset=1000000): f32[1000,250]{1,0}
 value: <4 copy.2 @0> (size=1000000,offset=0): f32[1000,250]{1,0}
"""
VALUES = """\
<1 get-tuple-element.3 @0>
 positions:
  get-tuple-element.3
 uses:
  fusion.2, operand 0
  copy.1, operand 0
  copy.2, operand 0
 from instruction: %get-tuple-element.3 = f32[1000,250]{1,0} get-tuple-element(%f), index=1
<3 copy.1 @0>
 positions:
  copy.1
 uses:
  tuple.3, operand 1
 from instruction: %copy.1 = f32[1000,250]{1,0} copy(%get-tuple-element.4)
"""

FORWARD_THUNKS = """\
003: kConditional
  false_branch:
    004: kWhile
condition:
        005: kKernel
      body:
        006: kGemm
        007: kKernel
    008: kKernel
  true_branch:
    009: kCopy
"""
UPDATE_THUNKS = """\
011: kConditional
  branch_0:
    No thunks.
  branch_1:
    012: kWhile
condition:
        013: kKernel
      body:
        014: kKernel
015: kCopy
"""


def indented(thunks: str) -> str:
    """Thunks inside of another one. XLA does not indent "condition:"."""
    return textwrap.indent(thunks, "    ", lambda line: line != "condition:\n")


def in_command_buffer(thunks: str) -> str:
    return "010: kCommandBuffer\n" + indented(thunks)


def loop_over_ticks(tick: str) -> str:
    return (
        "000: kWhile\ncondition:\n    001: kKernel\n  body:\n" + "    002: kCollectivePermuteStart\n" + indented(tick)
    )


# The forward is outside of command buffers, the update inside of one.
THUNKS = loop_over_ticks(FORWARD_THUNKS + in_command_buffer(UPDATE_THUNKS))
FORWARD = gpu.Activity(frozenset({("forward", 2)}))


def step(thunks: str = THUNKS, hlo: str = HLO):
    # As XLA writes it.
    thunks = thunks.replace("No thunks.\n", "No thunks.")
    return gpu.Step(texts.Hlo(hlo), texts.Buffers(ASSIGNMENT, VALUES), texts.parse_thunks(thunks))


def test_work_of_a_tick():
    program = step()
    (loop,) = program.tick_loops()
    assert loop.name == "%while.3" and loop.trip_count == 6

    busy = program.tick(loop, FORWARD)
    # 3 layers, the slice, the transpose.
    assert (busy.kernels, busy.products) == (5, 3)
    assert (busy.copies, busy.copied) == (0, 0)
    assert busy.self_copied == 1.0
    assert busy.transposed == 2.0  # `copy.3` and `fusion.4`
    # 3 layers of 16 bytes, a row of the ring and 16 bytes, the transpose.
    assert busy.written == pytest.approx((3 * 16 + 1000 + 16 + 1e6) / 1e6)
    # The slice reads a row of the ring and a number; the transpose and two copies read and write the ring. Layers add.
    slice_and_ring = 1000 + 4 + 1000 + 16 + 6e6
    assert busy.moved == pytest.approx(slice_and_ring / 1e6)
    assert busy.traffic == pytest.approx((slice_and_ring + 3 * 32) / 1e6)
    assert busy.cast == 0
    assert busy.host_waits == 1  # the update's conditional is recorded

    idle = program.tick(loop, gpu.Activity())
    assert (idle.kernels, idle.products) == (1, 0)
    assert (idle.copies, idle.copied, idle.largest_copy) == (1, 1.0, 1.0)
    assert idle.self_copied == 1.0


def test_a_fusion_that_is_started_is_a_kernel():
    """XLA may start a fusion and wait for it later, so that it runs beside other kernels."""
    whole = "  %fusion.1 = f32[4]{0} fusion(%gemm.1), kind=kLoop, calls=%fused_add\n"
    started = whole.replace(
        "%fusion.1 = f32[4]{0} fusion(", "%fusion-start.1 = ((f32[4]{0}), f32[4]{0}, u32[]) fusion-start("
    )
    started += "  %fusion.1 = f32[4]{0} fusion-done(%fusion-start.1)\n"
    assert whole in HLO
    programs = [step(), step(hlo=HLO.replace(whole, started))]
    works = [program.tick(*program.tick_loops(), FORWARD) for program in programs]
    assert works[0] == works[1]


def test_an_operation_of_other_stages_is_not_taken():
    program = step()
    (loop,) = program.tick_loops()
    for other in (("forward", 3), ("backward", 2)):
        activity = gpu.Activity(frozenset({other}))
        assert program.tick(loop, activity) == program.tick(loop, gpu.Activity())


def test_what_all_stages_run_together():
    """A head of all stages is taken by a busy device, whatever its stage."""
    text = HLO.replace("forward/stage1-2/cond/branch_1_fun/while", "cond/branch_1_fun/head/while")
    program = step(hlo=text.replace("body/forward/stage1-2/cond", "body/cond"))
    (loop,) = program.tick_loops()
    activities = [gpu.Activity(frozenset({("backward", 3)})), FORWARD, gpu.Activity()]
    assert [program.tick(loop, activity).products for activity in activities] == [3, 3, 0]


def test_messages_of_other_stages_are_not_received():
    text = HLO.replace("forward/stage1-2/cond/branch_1_fun/while", "cond/branch_1_fun/receive/forward/for0,2/while")
    program = step(hlo=text.replace("body/forward/stage1-2/cond", "body/cond"))
    (loop,) = program.tick_loops()
    activities = [
        gpu.Activity(frozenset({("backward", stage)}), receives=frozenset({"forward"})) for stage in (0, 1, 2)
    ]
    before_backwards = activities[0]._replace(receives=frozenset({"backward"}))
    activities += [before_backwards, gpu.Activity()]
    assert [program.tick(loop, activity).products for activity in activities] == [3, 0, 3, 0, 0]


def test_a_slice_that_is_not_written_in_place_is_a_copy():
    elsewhere = ASSIGNMENT.replace(
        "fusion.2{0} @0> (size=1000000,offset=0)",
        "fusion.2{0} @0> (size=1000000,offset=1000000)",
    )
    program = gpu.Step(texts.Hlo(HLO), texts.Buffers(elsewhere, VALUES), texts.parse_thunks(THUNKS))
    (loop,) = program.tick_loops()
    assert program.tick(loop, FORWARD).copied == 1.0


@pytest.mark.parametrize(
    ("read", "written"),
    [
        ("dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,250}", 1000),
        ("dynamic-slice(%a, %j, %i), dynamic_slice_sizes={1,250}", 1e6),
        ("slice(%a), slice={[3:4], [0:250]}", 1e6),
    ],
)
def test_a_fusion_that_reads_the_array_elsewhere_writes_the_whole_array(read, written):
    program = texts.Hlo(f"""\
%fused (a: f32[1000,250], i: s32[], j: s32[]) -> f32[1000,250] {{
  %a = f32[1000,250]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %j = s32[] parameter(2)
  %old = f32[1,250]{{1,0}} {read}
  %new = f32[1,250]{{1,0}} add(%old, %old)
  ROOT %dus = f32[1000,250]{{1,0}} dynamic-update-slice(%a, %new, %i, %i)
}}

ENTRY %main (x: f32[1000,250], y: s32[]) -> f32[1000,250] {{
  %x = f32[1000,250]{{1,0}} parameter(0)
  %y = s32[] parameter(1)
  ROOT %fusion = f32[1000,250]{{1,0}} fusion(%x, %y, %y), kind=kLoop, calls=%fused
}}
""")
    (result,) = program.results(program.by_name["%fusion"])
    assert result.written == written


@pytest.mark.parametrize(
    ("computed", "traffic", "only_moves"),
    [
        # A row of 250 numbers of four bytes is read, and one of two bytes is written.
        ("%old = f32[1,250]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,250}", 1000 + 500, True),
        ("%old = f32[1,250]{1,0} dynamic-slice(%a, %k, %i), dynamic_slice_sizes={1,250}", 1000 + 500, True),
        ("%b = f32[1000,250]{1,0} negate(%a)\n  %old = f32[1,250]{1,0} slice(%b)", 1e6 + 500, False),
    ],
)
def test_bytes_of_a_cast(computed, traffic, only_moves):
    program = texts.Hlo(f"""\
%fused (a: f32[1000,250], i: s32[]) -> bf16[1,250] {{
  %a = f32[1000,250]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %k = s32[] add(%i, %i)
  {computed}
  ROOT %new = bf16[1,250]{{1,0}} convert(%old)
}}

ENTRY %main (x: f32[1000,250], y: s32[]) -> bf16[1,250] {{
  %x = f32[1000,250]{{1,0}} parameter(0)
  %y = s32[] parameter(1)
  ROOT %fusion = bf16[1,250]{{1,0}} fusion(%x, %y), kind=kLoop, calls=%fused
}}
""")
    fusion = program.by_name["%fusion"]
    assert program.traffic(fusion) == pytest.approx(traffic, abs=4)  # and the number of the row
    assert program.only_moves(fusion) == only_moves


def test_permutes():
    program = step()
    (loop,) = program.tick_loops()
    assert program.permutes(loop, FORWARD) == [
        (0.008, True, 4, 3),
        (4e-5, False, 0, 0),
    ]
    assert program.permutes(loop, gpu.Activity())[0] == (0.008, True, 0, 0)


COLLECTIVES = """\
  %all-gather-start.1 = ((bf16[1000]{0}, f32[5]{0}), (bf16[2000]{0}, f32[10]{0})) all-gather-start(%get-tuple-element.2, %get-tuple-element.2)
  %gemm.2 = f32[4]{0} custom-call(%get-tuple-element.2), custom_call_target="__cublas$lt$matmul"
  %all-gather-done.1 = (bf16[2000]{0}, f32[10]{0}) all-gather-done(%all-gather-start.1)
  %fusion-start.1 = ((f32[500]{0}), f32[500]{0}) fusion-start(%get-tuple-element.2), kind=kCustom, calls=%fused_sum
  %fusion.7 = f32[4]{0} fusion(%get-tuple-element.2), kind=kLoop, calls=%fused_add
  %fusion-done.1 = f32[500]{0} fusion-done(%fusion-start.1)
  %async-start.1 = ((f32[4]{0}), f32[250]{0}, s32[]) async-start(%get-tuple-element.2), calls=%scattered
  %gemm.3 = f32[4]{0} custom-call(%get-tuple-element.2), custom_call_target="__cublas$lt$matmul"
  %async-done.1 = f32[250]{0} async-done(%async-start.1)
  %all-reduce.1 = f32[250]{0} all-reduce(%get-tuple-element.2), to_apply=%fused_add
"""
CALLED = """\
%fused_sum (p5: f32[500]) -> f32[500] {
  %p5 = f32[500]{0} parameter(0)
  ROOT %all-reduce.9 = f32[500]{0} all-reduce(%p5), to_apply=%fused_add
}

%scattered (p6: f32[4]) -> f32[250] {
  %p6 = f32[4]{0} parameter(0)
  ROOT %reduce-scatter.9 = f32[250]{0} reduce-scatter(%p6), to_apply=%fused_add
}

"""


def test_collectives():
    """A gather under a product, a sum in a kernel of XLA, a scatter under a product, and a sum that is waited for."""
    loop_over_layers = "  %while.1 = "
    text = HLO.replace(loop_over_layers, COLLECTIVES + loop_over_layers).replace("%layer (l", CALLED + "%layer (l")
    program = step(hlo=text)
    (loop,) = program.tick_loops()
    busy, before = program.tick(loop, FORWARD), step().tick(loop, FORWARD)
    assert (before.collectives, before.exchanged, before.bare) == (0, 0, 0)
    assert (busy.collectives, busy.bare) == (4, 2)
    assert busy.exchanged == pytest.approx((4000 + 40 + 2000 + 1000 + 1000) / 1e6)
    # Beside them one kernel, which reads and writes 16 bytes, and two products.
    assert (busy.kernels, busy.products) == (before.kernels + 1, before.products + 2)
    assert busy.traffic == pytest.approx(before.traffic + 32e-6)
    assert program.tick(loop, gpu.Activity()).collectives == 0


def test_host_waits_of_a_step():
    assert step().host_waits(num_updates=1) == 6
    # Without command buffers: two conditionals per tick, and the loop of the update, which asks
    # twice for one turn.
    thunks = loop_over_ticks(FORWARD_THUNKS + UPDATE_THUNKS)
    assert step(thunks).host_waits(num_updates=1) == 6 * 2 + 2
    assert step().unknown_loops() == 1


def test_one_command_buffer():
    assert not step().one_command_buffer
    program = step(in_command_buffer(loop_over_ticks(FORWARD_THUNKS + UPDATE_THUNKS)))
    assert program.one_command_buffer
    assert program.host_waits(num_updates=1) == 0


def test_thunks_of_another_program_are_refused():
    with pytest.raises(ValueError, match="thunk sequence does not fit %main"):
        step("000: kConditional\n  false_branch:\n    001: kKernel\n")


def test_guarding_loop():
    text = HLO.replace(
        "true_computation=%forward, false_computation=%no_forward",
        "condition=%tick_condition, body=%forward",
    ).replace("= (f32[4]{0}, f32[1000,250]{1,0}) conditional(%p", "= (f32[4]{0}) while(%p")
    text = text.replace('forward/stage1-2/cond"', 'forward/stage1-2/while"')
    forward = FORWARD_THUNKS.replace("kConditional", "kWhile", 1)
    forward = forward.replace("  false_branch:", "condition:\n    099: kKernel\n  body:")
    forward = forward[: forward.index("  true_branch:")]
    thunks = loop_over_ticks(forward + UPDATE_THUNKS)
    program = gpu.Step(texts.Hlo(text), texts.Buffers(ASSIGNMENT, VALUES), texts.parse_thunks(thunks))
    (loop,) = program.tick_loops()
    busy, idle = (program.tick(loop, a) for a in (FORWARD, gpu.Activity()))
    assert (busy.products, idle.products) == (3, 0)
    # The host asks before each turn, and once more; and for the update's conditional.
    assert (busy.host_waits, idle.host_waits) == (2 + 1, 1 + 1)
