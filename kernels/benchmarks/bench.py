"""Times the ops of mesanet_kernels on the current device and measures their error.

    python kernels/benchmarks/bench.py --op mesa --shape 16x2048 --dtype bfloat16 --json out.json
    python kernels/benchmarks/bench.py --op all --shape demo

Prints a table: median milliseconds of the forward pass and of forward + backward, peak scratch memory of the
latter, and the relative L2 error of output and worst gradient against the float64 reference at a reduced shape.
"""

import argparse
import datetime
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import mesanet_kernels as mk
from mesanet_kernels import shapes

OPS = {
    "mesa": lambda inputs, **options: mk.mesa(**inputs, **options).o,
    "gated_linear_attention": lambda inputs, **options: mk.gated_linear_attention(**inputs, **options)[0],
    "gated_linear_attention_vector": lambda inputs, **options: mk.gated_linear_attention(**inputs, **options)[0],
    "delta_rule": lambda inputs, **options: mk.delta_rule(**inputs, **options)[0],
    "causal_conv1d": lambda inputs, **options: mk.causal_conv1d(**inputs, activation="silu", **options)[0],
    "attention": lambda inputs, **options: mk.attention(**inputs, **options),
    "mlstm": lambda inputs, **options: mk.mlstm(**inputs, **options)[0],
    "diagonal_ssm": lambda inputs, **options: mk.diagonal_ssm(**inputs, **options)[0],
    "linear_scan": lambda inputs, **options: mk.linear_scan(**inputs, **options)[0],
    "softmax_cross_entropy": lambda inputs, **options: mk.softmax_cross_entropy(**inputs, softcap=30.0, **options),
}
REDUCED = dict(B=1, T=150, H=2, J=2)  # the float64 reference is slow


def main():
    arguments = parse_arguments()
    names = list(OPS) if arguments.op == "all" else [arguments.op]
    print(f"{'op':<30}{'shape':<12}{'forward ms':>11}{'fwd+bwd ms':>11}{'MiB':>8}{'error':>10}{'grad error':>11}")
    rows = []
    for op in names:
        for shape in shapes.SHAPES[op] if arguments.shape == "all" else [arguments.shape]:
            if shape not in shapes.SHAPES[op]:
                continue
            row = measure(op, shape, arguments)
            rows.append(row)
            print(
                f"{op:<30}{shape:<12}{row['forward_ms']:>11.3f}{row['forward_backward_ms']:>11.3f}"
                f"{row['scratch_mib']:>8.0f}{row['error']:>10.1e}{row['gradient_error']:>11.1e}",
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(environment(), arguments=vars(arguments), rows=rows), file, indent=1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=[*OPS, "all"], default="all")
    parser.add_argument("--shape", default="demo", help="a name in mesanet_kernels/shapes.py, or all")
    parser.add_argument("--implementation", default=None, help="default: the op's own choice")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max_iters", type=int, default=30, help="Mesa's solver steps")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default=None, help="file to write the results to")
    return parser.parse_args()


def measure(op, shape, arguments):
    options = dict(implementation=arguments.implementation)
    if op == "mesa":
        options["max_iters"] = arguments.max_iters
    function = partial(OPS[op], **options)
    inputs = cast(shapes.example(op, shape), arguments.dtype)
    cotangent = random_cotangent(function, inputs)
    forward = jax.jit(function).lower(inputs).compile()
    backward = jax.jit(with_gradients(function)).lower(inputs, cotangent).compile()
    error, gradient_error = errors(op, shape, function, arguments.dtype)
    return dict(
        op=op,
        shape=shape,
        sizes=shapes.SHAPES[op][shape],
        forward_ms=median_ms(partial(forward, inputs), arguments.repeats),
        forward_backward_ms=median_ms(partial(backward, inputs, cotangent), arguments.repeats),
        scratch_mib=backward.memory_analysis().temp_size_in_bytes / 2**20,
        error=error,
        gradient_error=gradient_error,
    )


def with_gradients(function):
    """(inputs, cotangent of the output) -> (output, gradients with respect to the floating inputs)."""

    def run(inputs, cotangent):
        floating = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        output, gradients_of = jax.vjp(lambda floating: function(inputs | floating), floating)
        return output, gradients_of(cotangent.astype(output.dtype))[0]

    return run


def random_cotangent(function, inputs):
    """Given, not computed: XLA would compute it again in every product that reads it, and that would be timed."""
    output = jax.eval_shape(function, inputs)
    return jnp.asarray(np.random.default_rng(1).standard_normal(output.shape), output.dtype)


def errors(op, shape, function, dtype):
    """Relative L2 error of the output and of the worst gradient, at the shape cut to `REDUCED`."""
    sizes = {axis: min(size, REDUCED.get(axis, size)) for axis, size in shapes.SHAPES[op][shape].items()}
    inputs = cast(shapes.example(op, sizes), dtype)
    cotangent = random_cotangent(function, inputs)
    got = jax.jit(with_gradients(function))(inputs, cotangent)
    with jax.enable_x64(True):
        wide = {
            name: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in inputs.items()
        }
        wanted = jax.jit(with_gradients(partial(OPS[op], implementation="reference")))(wide, cotangent)
    output, gradients = jax.tree.map(relative_error, got, wanted)
    return output, max(gradients.values())


def relative_error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def cast(inputs, dtype):
    return {
        name: jnp.asarray(x, dtype if x.dtype == np.float32 and name not in shapes.WIDE else None)
        for name, x in inputs.items()
    }


def median_ms(call, repeats):
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def environment():
    return dict(
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        jaxlib=jax.lib.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


if __name__ == "__main__":
    main()
