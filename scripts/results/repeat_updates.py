"""Shows whether a loss that jumps is real: computes every update several times from the same state and batch.

    python -m scripts.results.repeat_updates --config=configs/transformer.py:440m --updates=30 --config.data.path=DATA

On a sound machine the forward pass gives the same loss each time, bit by bit, however large it is. A loss that is not
repeated was damaged by the hardware, a driver or a kernel. Gradients may differ in their last digits, because some
kernels add in no fixed order. Nothing is written. The exit status is 1 if a loss was not repeated.
"""

import jax
import jax.numpy as jnp

from mesanet_jax import cli, models
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax.data.loader import Batches
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.data import open_data


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--config", required=True, help="config file and size, such as configs/mesanet.py:140m")
    flags.add_argument("--updates", type=int, default=30, help="the number of updates, from a fresh model")
    flags.add_argument("--repeats", type=int, default=4, help="how often each update is computed")
    args, overrides = cli.parse(flags, argv)
    config = config_lib.load(args.config, overrides)
    rows, _ = open_data(config)
    mesh = mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES))
    program = step_lib.compile_program(config, models.build(config.model), mesh)
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))  # because an update consumes its state
    batches = Batches(rows, config.data.batch_size, seed=config.data.seed, steps=args.updates)
    damaged = 0
    with mesh_lib.use_mesh(mesh):
        state = program.init(jax.random.key(config.seed))
        for update, batch in enumerate(mesh_lib.placed(batches.iterate(0), mesh), start=1):
            before = state
            outcomes = []
            for _ in range(args.repeats):
                state, metrics = program.train(copy(before), batch)
                outcomes.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            losses, norms = zip(*outcomes, strict=True)
            same = len(set(losses)) == 1
            damaged += not same
            spread = max(norms) / min(norms) - 1
            verdict = "repeated" if same else f"NOT REPEATED {losses}"
            print(
                f"update {update}: loss {losses[0]:.4f} {verdict}; gradient norm {norms[0]:.3f}, spread {spread:.1e}",
                flush=True,
            )
    print(f"{args.updates} updates, {args.repeats} times each: {damaged} losses not repeated")
    return int(damaged > 0)


if __name__ == "__main__":
    cli.run(main)
