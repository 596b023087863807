"""Times the ops of mesanet_kernels on the current device and measures their error.

    python kernels/benchmarks/bench.py --op mesa --shape 16x2048 --dtype bfloat16 --json out.json
    python kernels/benchmarks/bench.py --op mesa --shape 16x2048 --dtype bfloat16 --implementation all --keys hard \\
        --peer fla
    python kernels/benchmarks/bench.py --op all --shape demo

Prints a table: median milliseconds of the forward pass and of forward + backward, by the host's clock; TFLOP/s and
GB/s of the forward pass (of the work in `work.py`, Mesa's with the steps that it took); scratch memory of forward +
backward; and the relative L2 errors of the output and of the worst gradient against the float64 reference. The errors
are those of the timed call, in its first row and two heads; of rows longer than 2048, only the output's first tokens
are compared. Gradients of parameters add up over rows, so they are compared only where there is one row.
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
IMPLEMENTATIONS = (
    "xla",
    "pallas_gpu",
    "pallas_tpu",
    "cudnn",
    "fft",
    "masked",
)  # beside the reference; those that an op has
LONGEST = 2048  # tokens that the float64 reference goes through one by one
BY_HEAD = (
    "mesa",
    "gated_linear_attention",
    "gated_linear_attention_vector",
    "delta_rule",
    "mlstm",
)  # no head meets another


def main():
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


COLUMNS = {
    "op": 30, "shape": 11, "implementation": 16, "forward_ms": 12, "forward_backward_ms": 21, "tflop_s": 9, "gb_s": 8,
    "scratch_mib": 13, "error": 10, "gradient_error": 16,
}  # fmt: skip


def line(row) -> str:
    def cell(value):
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        return f"{value:.1e}" if value < 0.02 else f"{value:,.3f}" if value < 100 else f"{value:,.0f}"

    return "".join(f"{cell(row[name]):>{width}}" for name, width in COLUMNS.items())


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=[*OPS, "all"], default="all")
    parser.add_argument("--shape", default="demo", help="a name in mesanet_kernels/shapes.py, or all")
    parser.add_argument("--implementation", default=None, help="default: the op's own choice; all: each that there is")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--solver", default="cg", help="Mesa's")
    parser.add_argument("--max_iters", type=int, default=30, help="Mesa's solver steps")
    parser.add_argument("--tol", type=float, default=0.0, help="Mesa's residual at which a token rests")
    parser.add_argument(
        "--keys", choices=["random", "hard"], default="random", help="hard: low rank, and nothing forgotten"
    )
    parser.add_argument("--peer", choices=["fla"], default=None, help="measure flash-linear-attention too")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", default=None, help="file to write the results to")
    return parser.parse_args()


def measure(op, shape, arguments):
    """A row for each implementation, and for the peer."""
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
        iterations = steps(inputs, options | dict(implementation=implementation)) if op == "mesa" else None
        wanted = wanted or reference(op, inputs, cotangent)
        yield described(op, shape, implementation or "chosen", row, results, wanted, inputs, iterations)
    if arguments.peer == "fla" and cotangent is not None:
        row = peer_fla.measure(op, inputs, cotangent, repeats=arguments.repeats, max_iters=arguments.max_iters)
        if row is not None:
            yield described(op, shape, "fla", row, row.pop("results"), wanted, inputs, arguments.max_iters)


def example(op, sizes, kind):
    inputs = shapes.example(op, sizes)
    if kind == "hard" and op in BY_HEAD:
        rng = np.random.default_rng(2)
        length, size = sizes["T"], sizes["K"]
        of_rows = [[keys("low rank", rng, length, size) for _ in range(sizes["H"])] for _ in range(sizes["B"])]
        inputs["k"] = np.asarray(of_rows, np.float32).swapaxes(1, 2)
        inputs["log_decay"] *= 1e-3
    return inputs


def time_ours(function, inputs, cotangent, repeats):
    forward = jax.jit(function).lower(inputs).compile()
    backward = jax.jit(with_gradients(function)).lower(inputs, cotangent).compile()
    memory = backward.memory_analysis()
    assert memory is not None
    row = dict(
        forward_ms=median_ms(partial(forward, inputs), repeats),
        forward_backward_ms=median_ms(partial(backward, inputs, cotangent), repeats),
        scratch_mib=memory.temp_size_in_bytes / 2**20,
    )
    return row, jax.device_get(backward(inputs, cotangent))


def described(op, shape, implementation, row, results, wanted, inputs, iterations):
    """The row of a table: what was timed, rates, and errors."""
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


def steps(inputs, options) -> float:
    """What Mesa's solver took, mean over tokens and heads."""
    return float(jax.jit(lambda inputs: mk.mesa(**inputs, **options).iterations.mean())(inputs))


def part(op, x, output):
    """Of an array the first row, and two heads where heads are apart; of a parameter its heads or all of it."""
    x = np.asarray(x)
    if x.shape[:2] == output.shape[:2]:
        x = x[:1]
        return x[:, :, :2] if op in BY_HEAD else x
    return x[:2] if op in BY_HEAD else x


def reference(op, inputs, cotangent):
    """Output, and gradients by name, in float64, of the `part` that is compared."""
    length = min(cotangent.shape[1], LONGEST)
    by_row = {name: x.shape[:2] == cotangent.shape[:2] for name, x in inputs.items()}
    cut = lambda name, x: x[:, :length] if by_row[name] else x
    few = {name: cut(name, part(op, x, cotangent)) for name, x in inputs.items()}
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)
        few, cotangent_of_few = jax.tree.map(wide, (few, part(op, cotangent, cotangent)[:, :length]))
        run = jax.jit(with_gradients(partial(OPS[op], implementation="reference")))
        output, gradients = jax.device_get(run(few, cotangent_of_few))
    if length < cotangent.shape[1]:
        return output, {}
    return output, {name: x for name, x in gradients.items() if by_row[name] or len(cotangent) == 1}


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
        jaxlib=jax.lib.__version__,  # pyright: ignore[reportPrivateImportUsage]
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


if __name__ == "__main__":
    main()
