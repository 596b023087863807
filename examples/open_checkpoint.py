"""Open a checkpoint and use its parts: the model, the parameters and the tokenizer. After `make demo`:

    python examples/open_checkpoint.py --workdir=runs/demo/mesanet --text="It is a truth universally"

Print the loss on the text and the likeliest next tokens. Takes about 20 seconds on a CPU.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.runtime import workdir
from mesanet_jax.training import checkpoint


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--workdir", default="runs/demo/mesanet", type=workdir.path, help="workdir of a training run")
    flags.add_argument("--text", default="It is a truth universally acknowledged", help="text to score and continue")
    flags.add_argument("--top", default=5, type=int, help="how many of the likeliest next tokens to print")
    args = flags.parse_args(argv)

    # The workdir holds the config; the config says where the prepared data are, and these hold the tokenizer.
    config = workdir.load(args.workdir, {})
    tokenizer = PackedRows(config.data.path, config.data.split).tokenizer

    # A model is a set of functions of its parameters, which are nested dictionaries of arrays.
    model = models.build(config.model)
    mesh = mesh_lib.make_mesh((1,), jax.devices()[:1])
    with mesh_lib.use_mesh(mesh):
        params, step = checkpoint.restore_params(args.workdir, model, mesh)
        print(f"{config.name}: {model.parameter_count():,} parameters, step {step}")

        tokens = np.concatenate([[tokenizer.bos_id], tokenizer.encode([args.text])[0]]).astype(np.int32)
        nats = jax.jit(model.loss)(params, one_document(tokens))[0]
        print(f"loss: {jnp.mean(nats):.3f} nats per token over {len(nats)} tokens")

        state = model.init_state(params, 1, max_length=len(tokens))
        logits, state = jax.jit(model.extend)(params, jnp.asarray(tokens)[None], state)
        print(f"likeliest tokens after {args.text!r}:")
        probabilities, likeliest = jax.lax.top_k(jax.nn.softmax(logits[0, -1]), args.top)
        for probability, token in zip(probabilities, likeliest):
            print(f"{probability:6.1%}  {tokenizer.decode([int(token)])!r}")


def one_document(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The batch whose only row is one document: each token but the first is a target."""
    inputs, targets = tokens[None, :-1], tokens[None, 1:]
    return {
        "inputs": inputs,
        "targets": targets,
        "segment_ids": np.zeros_like(inputs),
        "weights": np.ones(inputs.shape, np.float32),
    }


if __name__ == "__main__":
    main()
