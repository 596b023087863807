"""Tests what is counted in a compiled program: with a hand-written one in the TPU compiler's style, and real ones."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mesanet_jax.aot import collectives, hlo, matmuls
from mesanet_jax.aot.chips import CHIPS
from mesanet_jax.aot.estimate import estimate

# Two iterations of a loop over three layers, as the TPU compiler writes it: a product as a convolution, a
# reduce-scatter as a fusion, and an asynchronous all-gather that occurs twice.
PROGRAM = """HloModule jit_train, is_scheduled=true

%gather.start (p.1: bf16[16,32]) -> (bf16[16,32], bf16[32,32], u32[]) {
  %p.1 = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[32,32]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=1, dimensions={0}
  ROOT %call.1 = (bf16[16,32], bf16[32,32], u32[]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%gather.done (p.2: bf16[16,32], p.3: bf16[32,32]) -> bf16[32,32] {
  %p.2 = bf16[16,32]{1,0} parameter(0)
  %p.3 = bf16[32,32]{1,0} parameter(1)
  %all-gather.2 = bf16[32,32]{1,0} all-gather(%p.2), channel_id=1, dimensions={0}
  ROOT %custom-call.2 = bf16[32,32] custom-call(%p.2, %p.3, %all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (p.4: f32[32,32]) -> f32[16,32] {
  %p.4 = f32[32,32]{1,0:T(8,128)} parameter(0)
  ROOT %all-reduce.1 = f32[32,32]{1,0:T(8,128)} all-reduce(%p.4), channel_id=2, to_apply=%add
}

%product (p.5: bf16[64,32], p.6: bf16[32,32]) -> f32[64,32] {
  %p.5 = bf16[64,32]{1,0} parameter(0)
  %p.6 = bf16[32,32]{1,0} parameter(1)
  ROOT %convolution.1 = f32[64,32]{1,0:T(8,128)} convolution(%p.5, %p.6), dim_labels=bf_io->bf
}

%layer (p.7: (s32[], bf16[16,32])) -> (s32[], bf16[16,32]) {
  %p.7 = (s32[]{:T(128)}, bf16[16,32]{1,0}) parameter(0)
  %weights = bf16[16,32]{1,0} get-tuple-element(%p.7), index=1
  %start = (bf16[16,32]{1,0}, bf16[32,32]{1,0}, u32[]{:S(2)}) fusion(%weights), kind=kCustom, calls=%gather.start
  %whole = bf16[32,32]{1,0} get-tuple-element(%start), index=1
  %done = bf16[32,32]{1,0} fusion(%weights, %whole), kind=kCustom, calls=%gather.done
  %fusion.1 = f32[64,32] fusion(%weights, %done), calls=%product, backend_config={"estimated_cycles":"1000"}
  %fusion.2 = f32[16,32]{1,0} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter.1
  %kernel = f32[16,32]{1,0} custom-call(%fusion.2), custom_call_target="tpu_custom_call"
  %look-up = f32[16,32]{1,0} gather(%kernel, %p.7), offset_dims={1}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[16,32]{1,0}) tuple(%p.7, %weights)
}

%more (p.8: (s32[], bf16[16,32])) -> pred[] {
  %p.8 = (s32[]{:T(128)}, bf16[16,32]{1,0}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%p.8), index=0
  %end = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[]{:T(512)} compare(%counter, %end), direction=LT
}

%until (p.9: (s32[], bf16[16,32])) -> pred[] {
  %p.9 = (s32[]{:T(128)}, bf16[16,32]{1,0}) parameter(0)
  ROOT %any = pred[]{:T(512)} custom-call(%p.9), custom_call_target="residual"
}

%turn (p.10: (s32[], bf16[16,32])) -> (s32[], bf16[16,32]) {
  %p.10 = (s32[]{:T(128)}, bf16[16,32]{1,0}) parameter(0)
  %shard = bf16[16,32]{1,0} get-tuple-element(%p.10), index=1
  %one = s32[]{:T(128)} constant(1)
  %begin = s32[]{:T(128)} copy(%one)
  %tuple.2 = (s32[]{:T(128)}, /*index=1*/bf16[16,32]{1,0}) tuple(%begin, %shard)
  ROOT %while.1 = (s32[]{:T(128)}, bf16[16,32]{1,0}) while(%tuple.2), condition=%more, body=%layer
}

ENTRY %main (a: bf16[16,32]) -> f32[8] {
  %a = bf16[16,32]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %tuple.3 = (s32[], bf16[16,32]{1,0}) tuple(%zero, %a)
  %while.2 = (s32[], bf16[16,32]) while(%tuple.3), condition=%until, body=%turn, config={"known_trip_count":{"n":"2"}}
  %while.3 = (s32[], bf16[16,32]{1,0}) while(%tuple.3), condition=%until, body=%turn2
  %permute = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%vector), channel_id=3
  %vector = f32[8]{0} broadcast(%zero)
  ROOT %sum = f32[8]{0} all-reduce(%vector), channel_id=4, to_apply=%add
}

%turn2 (p.11: (s32[], bf16[16,32])) -> (s32[], bf16[16,32]) {
  ROOT %p.11 = (s32[], bf16[16,32]{1,0}) parameter(0)
}
"""


@pytest.fixture(scope="module")
def module():
    return hlo.parse(PROGRAM)


def test_loops_count_by_their_trips(module):
    """Three layers (from 1 below 4) in each of two iterations, and one loop whose length depends on its data."""
    times = {visit.instruction.name: visit.times for visit in hlo.walk(module)}
    assert (times["fusion.1"], times["convolution.1"], times["while.1"], times["sum"]) == (6, 6, 2, 1)
    assert hlo.unknown_loops(module) == 1


def test_collectives_by_kind(module):
    found = {each.kind: (each.count, each.bytes) for each in collectives.measure(module)}
    assert found == {
        "all-gather": (6, 6 * 32 * 32 * 2),  # counted once each, although its end repeats it
        "reduce-scatter": (6, 6 * 32 * 32 * 4),
        "all-reduce": (1, 8 * 4),
        "collective-permute": (1, 8 * 4 + 8),  # with its two flags
    }
    assert collectives.sent(collectives.measure(module)) == 6 * 6144 + 2 * 32 + 40


def test_estimate_by_cycles_and_trips(module):
    """Six products of 1000 cycles; the Pallas kernel and the gather have none, fusions around collectives need none."""
    chip = CHIPS["v5p"]
    guess = estimate(SimpleNamespace(topology=SimpleNamespace(chip=chip)), module)
    assert guess.computing == pytest.approx(6000 / 1.75e9)
    assert guess.transfers == pytest.approx((6 * 6144 + 64 + 40) / 600e9)
    assert (guess.kernels, guess.others) == (6, 6)
    assert guess.seconds == (guess.computing, guess.computing + guess.transfers)


def test_matmul_flops_of_a_convolution(module):
    assert matmuls.flops(module) == 6 * 2 * 64 * 32 * 32


CONVOLUTIONS = {
    "a batch of two products: holes between its entries, so that each meets only its own kernel": (
        ("f32[2,64,16]", "f32[2,16,8]", "f32[2,64,8]"),
        "window={size=2 lhs_dilate=2}, dim_labels=0bf_0io->0bf",
        2 * 64 * 16 * 8,
    ),
    "heads written as a window over padding": (
        ("f32[64,32,1]", "f32[2,16,32]", "f32[64,2,16]"),
        "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
        64 * 32 * 2 * 16,
    ),
    "a real convolution over time: 4 taps, padded on the left": (
        ("f32[3,100,8]", "f32[4,8,8]", "f32[3,100,8]"),
        "window={size=4 pad=3_0}, dim_labels=b0f_0io->b0f",
        3 * 8 * 8 * (4 * 100 - 6),
    ),
}


@pytest.mark.parametrize(("shapes", "attributes", "products"), CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolutions_count_the_taps_that_meet_a_value(shapes, attributes, products):
    left, right, out = shapes
    lines = [
        "ENTRY %main (a: f32[]) -> f32[] {",
        f"  %l = {left} parameter(0)",
        f"  %r = {right} parameter(1)",
        f"  ROOT %c = {out} convolution(%l, %r), {attributes}",
        "}",
    ]
    text = "\n".join(lines) + "\n"
    assert matmuls.flops(hlo.parse(text)) == 2 * products


def test_matmul_flops_of_a_compiled_scan():
    """A real program: a scanned layer has three products, forward and backward, in each of five iterations."""

    def loss(w_LDD, x_BD):
        return jax.numpy.sum(jax.lax.scan(lambda x, w: (x @ w, None), x_BD, w_LDD)[0])

    shapes = jax.ShapeDtypeStruct((5, 16, 16), np.float32), jax.ShapeDtypeStruct((8, 16), np.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    assert matmuls.flops(hlo.parse(compiled.as_text())) == 5 * 3 * 2 * 8 * 16 * 16


def test_collectives_of_a_compiled_scan():
    """A real program: each of five layers is gathered from four devices, inside the loop."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def run(w_LDD, x_BD):
        gathered = lambda w: jax.lax.all_gather(w, "fsdp", tiled=True)
        return jax.lax.psum(jax.lax.scan(lambda x, w: (jax.numpy.sin(x @ gathered(w)), None), x_BD, w_LDD)[0], "fsdp")

    call = jax.shard_map(
        run, mesh=mesh, in_specs=(jax.P(None, "fsdp"), jax.P("fsdp")), out_specs=jax.P(), check_vma=False
    )
    shapes = jax.ShapeDtypeStruct((5, 16, 16), np.float32), jax.ShapeDtypeStruct((8, 16), np.float32)
    module = hlo.parse(jax.jit(call).lower(*shapes).compile().as_text())
    found = {each.kind: (each.count, each.bytes) for each in collectives.measure(module)}
    assert found == {"all-gather": (5, 5 * 16 * 16 * 4), "all-reduce": (1, 2 * 16 * 4)}
