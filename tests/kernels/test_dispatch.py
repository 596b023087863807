"""How `implementation=None` chooses: a kernel only on its platform, and only for the calls that it supports."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import mesanet_kernels as mk
from mesanet_kernels import dispatch, shapes
from mesanet_kernels.dispatch import PlatformKernel
from tests.helpers import op_cases as cases


def choose(implementation=None, *, reason="", shortest_row=1):
    """An op with a default, and a kernel for CUDA; its result is the input times the static argument, or minus that."""

    def default(factor, x_BT):
        return factor * x_BT

    def kernel(factor, x_BT):
        return -factor * x_BT

    kernels = {"cuda": PlatformKernel(kernel, lambda *_: reason, shortest_row)}
    table = {"xla": default, "kernel": kernel}
    return dispatch.choose("op", implementation, table, default=default, kernels=kernels, static_arguments=1)


def lowered(run, platform):
    def op(x_BT):
        return run(3.0, x_BT)

    return jax.jit(op).trace(jnp.zeros((2, 8))).lower(lowering_platforms=(platform,)).as_text()


def test_the_kernel_runs_on_its_platform_only():
    assert "dense<-3.0" in lowered(choose(), "cuda")
    assert "dense<3.0" in lowered(choose(), "cpu") and "dense<-3.0" not in lowered(choose(), "cpu")
    assert choose()(3.0, jnp.ones((2, 8)))[0, 0] == 3


@pytest.mark.parametrize("unsupported", [{"reason": "needs a Hopper GPU"}, {"shortest_row": 9}])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_an_unsupported_call_takes_the_default_and_leaves_no_trace_of_a_choice(unsupported, platform):
    program = lowered(choose(**unsupported), platform)
    assert program == lowered(choose("xla"), platform)


def test_a_row_of_the_least_length_takes_the_kernel():
    assert "dense<-3.0" in lowered(choose(shortest_row=8), "cuda")


def test_an_implementation_that_is_named_runs_on_every_platform():
    assert choose("kernel")(3.0, jnp.ones((2, 8)))[0, 0] == -3
    with pytest.raises(NotImplementedError, match="op: no implementation 'nope'; choose from 'xla', 'kernel'"):
        choose("nope")


def test_require():
    dispatch.require("op", "kernel", "")
    with pytest.raises(NotImplementedError, match="op: 'kernel' needs a Hopper GPU"):
        dispatch.require("op", "kernel", "needs a Hopper GPU")


@pytest.mark.parametrize("op", [op for op in cases.ALL if hasattr(mk, op)])
def test_every_op_names_its_implementations(op):
    """Each name is known to the op: the call traces, or the error says why this machine does not support it."""
    names = mk.implementations(op)
    assert names[:2] == ("reference", "xla")
    for name in names:
        try:
            jax.eval_shape(partial(cases.ALL[op], implementation=name), shapes.example(op, "tiny"))
        except NotImplementedError as error:
            assert str(error).startswith(f"{op}: {name!r} ")
