"""Times the ops of mesanet_kernels on the current device and measures their error.

    python kernels/benchmarks/bench.py --op mesa --shape 16x2048 --dtype bfloat16 --json out.json
    python kernels/benchmarks/bench.py --op mesa --shape 16x2048 --dtype bfloat16 --implementation all --keys hard
    --peer fla python kernels/benchmarks/bench.py --op all --shape demo

Prints a table with one line per op, shape and implementation: the median time of the forward pass and of forward and
backward together, by the clock of the host; TFLOP/s and GB/s of the forward pass, by the work that `work.py` counts
(for Mesa, with the iterations that were needed); the scratch memory of forward and backward; and the relative L2 errors
of the output and of the worst gradient against the reference in float64.

The errors are those of the timed call, in the first row of the batch and in two heads. For rows longer than 2048
tokens, only the output of the first 2048 is compared. Gradients of parameters, which are sums over rows, are compared
if the batch has one row.
"""

import argparse
import datetime
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import peer_fla
import work
from solver_steps import keys

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
# What `--implementation all` tries, besides the reference; an op runs those that it has.
IMPLEMENTATIONS = ("xla", "pallas_gpu", "pallas_tpu", "cudnn", "fft", "masked")
LONGEST = 2048  # the most tokens that the float64 reference, a scan over tokens, is run on
# Ops whose heads are independent of each other, so that two of them can be compared alone.
BY_HEAD = ("mesa", "gated_linear_attention", "gated_linear_attention_vector", "delta_rule", "mlstm")
# The columns of the table and their widths.
COLUMNS = {
    "op": 30,
    "shape": 11,
    "implementation": 16,
    "forward_ms": 12,
    "forward_backward_ms": 21,
    "tflop_s": 9,
    "gb_s": 8,
    "scratch_mib": 13,
    "error": 10,
    "gradient_error": 16,
}


def main() -> None:
    arguments = parse_arguments()
    names = list(OPS) if arguments.op == "all" else [arguments.op]
    known = {shape for op in names for shape in shapes.SHAPES[op]}
    if arguments.shape not in known | {"all"}:
        raise SystemExit(f"--shape={arguments.shape}: choose from {', '.join(sorted(known))}, all")
    print("".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    rows = []
    for op in names:
        for shape in shapes.SHAPES[op] if arguments.shape == "all" else [arguments.shape]:
            if shape in shapes.SHAPES[op]:
                for row in measure(op, shape, arguments):
                    rows.append(row)
                    print(line(row), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(environment(), arguments=vars(arguments), rows=rows), file, indent=1)


def line(row: dict) -> str:
    """Returns a line of the table; unknown values are shown as "-"."""

    def cell(value):
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        if value < 0.02:
            return f"{value:.1e}"
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"

    return "".join(f"{cell(row[name]):>{width}}" for name, width in COLUMNS.items())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=[*OPS, "all"], default="all")
    parser.add_argument("--shape", default="demo", help="a name in mesanet_kernels/shapes.py, or all")
    parser.add_argument("--implementation", default=None, help="a name, or all; default: the choice of the op")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--solver", default="cg", help="Mesa: cg or pcg")
    parser.add_argument("--max_iters", type=int, default=30, help="Mesa: the largest number of solver iterations")
    parser.add_argument("--tol", type=float, default=0.0, help="Mesa: the relative residual at which a token stops")
    parser.add_argument(
        "--keys", choices=["random", "hard"], default="random", help="hard: keys of low rank that are hardly forgotten"
    )
    parser.add_argument("--peer", choices=["fla"], default=None, help="also measure flash-linear-attention")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls; the table shows the median")
    parser.add_argument("--json", default=None, help="a file for the results")
    return parser.parse_args()


def measure(op, shape, arguments):
    """Yields a row for each implementation, and one for the peer."""
    inputs = cast(example(op, shapes.SHAPES[op][shape], arguments.keys), arguments.dtype)
    options = {}
    if op == "mesa":
        options = dict(max_iters=arguments.max_iters, tol=arguments.tol, solver=arguments.solver)
    chosen = IMPLEMENTATIONS if arguments.implementation == "all" else [arguments.implementation]
    cotangent, wanted = None, None
    for implementation in chosen:
        function = partial(OPS[op], implementation=implementation, **options)
        try:
            cotangent = random_cotangent(function, inputs)
        except (NotImplementedError, ValueError) as error:
            if arguments.implementation != "all":
                raise SystemExit(f"{op} {shape}: {error}") from error
            continue
        row, results = time_ours(function, inputs, cotangent, arguments.repeats)
        iterations = mean_iterations(inputs, options | dict(implementation=implementation)) if op == "mesa" else None
        wanted = wanted or reference(op, inputs, cotangent)
        yield described(op, shape, implementation or "chosen", row, results, wanted, inputs, iterations)
    if arguments.peer == "fla" and cotangent is not None:
        row = peer_fla.measure(op, inputs, cotangent, repeats=arguments.repeats, max_iters=arguments.max_iters)
        if row is not None:
            yield described(op, shape, "fla", row, row.pop("results"), wanted, inputs, arguments.max_iters)


def example(op, sizes, kind):
    """Returns example inputs; `kind` is "random" or "hard"."""
    inputs = shapes.example(op, sizes)
    if kind == "hard" and op in BY_HEAD:
        rng = np.random.default_rng(2)
        length, size = sizes["T"], sizes["K"]
        of_rows = [[keys("low rank", rng, length, size) for _ in range(sizes["H"])] for _ in range(sizes["B"])]
        inputs["k"] = np.asarray(of_rows, np.float32).swapaxes(1, 2)
        inputs["log_decay"] *= 1e-3
    return inputs


def time_ours(function, inputs, cotangent, repeats):
    """Returns times and scratch memory, and the results of forward and backward as numpy arrays."""
    forward = jax.jit(function).lower(inputs).compile()
    backward = jax.jit(with_gradients(function)).lower(inputs, cotangent).compile()
    memory = backward.memory_analysis()
    assert memory is not None  # every backend used here reports it
    row = dict(
        forward_ms=median_ms(partial(forward, inputs), repeats),
        forward_backward_ms=median_ms(partial(backward, inputs, cotangent), repeats),
        scratch_mib=memory.temp_size_in_bytes / 2**20,
    )
    return row, jax.device_get(backward(inputs, cotangent))


def described(op, shape, implementation, row, results, wanted, inputs, iterations):
    """Returns a row: what was timed, rates and errors. `results` and `wanted` are (output, gradients by name)."""
    sizes, (output, gradients) = shapes.SHAPES[op][shape], results
    seconds = row["forward_ms"] / 1e3
    flop = work.flops(op, sizes, max_iters=iterations)
    wanted_output, wanted_gradients = wanted
    length = wanted_output.shape[1]
    errors = {name: relative_error(part(op, gradients[name], output), x) for name, x in wanted_gradients.items()}
    return dict(
        op=op,
        shape=shape,
        sizes=sizes,
        implementation=implementation,
        **row,
        iterations=iterations,
        tflop_s=flop and flop / seconds / 1e12,
        gb_s=work.moved_bytes(inputs, output) / seconds / 1e9,
        error=relative_error(part(op, output, output)[:, :length], wanted_output),
        gradient_error=max(errors.values(), default=None),
    )


def mean_iterations(inputs, options) -> float:
    """Returns the iterations of Mesa's solver, averaged over tokens and heads."""
    return float(jax.jit(lambda inputs: mk.mesa(**inputs, **options).iterations.mean())(inputs))


def part(op, x, output):
    """Returns the part of an array that is compared: the first row and, if heads are independent, two heads."""
    x = np.asarray(x)
    if x.shape[:2] == output.shape[:2]:
        x = x[:1]
        return x[:, :, :2] if op in BY_HEAD else x
    return x[:2] if op in BY_HEAD else x


def reference(op, inputs, cotangent):
    """Returns the output and the gradients by name, in float64, of the `part` that is compared."""
    length = min(cotangent.shape[1], LONGEST)
    by_row = {name: x.shape[:2] == cotangent.shape[:2] for name, x in inputs.items()}
    few = {name: part(op, x, cotangent) for name, x in inputs.items()}
    few = {name: x[:, :length] if by_row[name] else x for name, x in few.items()}

    def wide(x):
        return jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)

    with jax.enable_x64(True):
        few, cotangent_of_few = jax.tree.map(wide, (few, part(op, cotangent, cotangent)[:, :length]))
        run = jax.jit(with_gradients(partial(OPS[op], implementation="reference")))
        output, gradients = jax.device_get(run(few, cotangent_of_few))
    if length < cotangent.shape[1]:
        return output, {}
    return output, {name: x for name, x in gradients.items() if by_row[name] or len(cotangent) == 1}


def with_gradients(function):
    """Returns (inputs, cotangent of the output) -> (output, gradients of the floating inputs by name)."""

    def run(inputs, cotangent):
        floating = {name: x for name, x in inputs.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        output, gradients_of = jax.vjp(lambda floating: function(inputs | floating), floating)
        return output, gradients_of(cotangent.astype(output.dtype))[0]

    return run


def random_cotangent(function, inputs):
    """Returns a cotangent of the output. It is an array because XLA would recompute an expression for every use."""
    output = jax.eval_shape(function, inputs)
    return jnp.asarray(np.random.default_rng(1).standard_normal(output.shape), output.dtype)


def relative_error(got, wanted) -> float:
    """Returns the relative L2 error."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def cast(inputs, dtype):
    """Returns jax arrays in `dtype`, except for integers and for the inputs that stay float32 (`shapes.WIDE`)."""
    return {
        name: jnp.asarray(x, dtype if x.dtype == np.float32 and name not in shapes.WIDE else None)
        for name, x in inputs.items()
    }


def median_ms(call, repeats) -> float:
    """Returns the median time of a call in milliseconds, after one call to warm up."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def environment() -> dict[str, str]:
    """Returns the device, the versions and the date."""
    return dict(
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


if __name__ == "__main__":
    main()
