"""The memory of Maglev and LRT: each position leaves its final state, and the next position reads it in every layer.

Such a model is recurrent in time. Training gives each position a memory that is computed in parallel, in a way that
differs between models; the resulting loss is called "lifted". Decoding reads the memory that the model itself has left;
this loss is called "deployed" (`mesanet_jax.models.deployment`).
"""

import dataclasses

import jax
from flax import nnx

from mesanet_jax.layers import Linear
from mesanet_jax.models.injection import injection_fields
from mesanet_jax.schema import Config, Field


def memory_fields(
    *, gate_channels: int | None = None, mix_keys: str = "normed", memory_scale: float | None = None
) -> dict[str, Field]:
    """The config fields of a memory; the arguments are defaults, which differ between Maglev and LRT."""
    return injection_fields(gate_channels=gate_channels, mix_keys=mix_keys) | {
        "memory_scale_init": Field(
            memory_scale,
            "also add the memory to the stream of each layer, times a scalar with this initial value; none: do not",
            kind=float,
            fixed=True,
        ),
        "memory_at_documents": Field(
            "as_attention",
            "at the start of a document the memory flows on or is zeroed; as_attention: as reset_at_documents says",
            choices=("as_attention", "flows", "zeroed"),
            fixed=True,
        ),
        "forget_gate": Field(
            False,
            "leave f memory + (1 - f) state instead of the final state, where f is a gate per channel of that state",
            fixed=True,
        ),
        "deployed_by": Field(
            "sweeps",
            "how the deployed loss is computed: approximated by parallel sweeps, or exactly, one step per token",
            choices=("sweeps", "steps"),
        ),
        # The default is above the rounding error of bfloat16, 0.004, at which sweeps need not settle.
        "sweep_tolerance": Field(
            1e-2,
            "end the sweeps when no position's memory changes by more than this root mean square (its size is 1)",
            at_least=0.0,
        ),
        "max_sweeps": Field(
            None,
            "largest number of sweeps; none: as many as a row has tokens, which makes the result exact",
            kind=int,
            at_least=1,
        ),
    }


@dataclasses.dataclass(frozen=True)
class MemoryRules:
    """How a memory behaves, without parameters.

    Attributes:
      resets: whether the memory is zeroed where a document starts.
      deployed_by: "sweeps" or "steps", as the config field says.
      tolerance: the change of the memory at which sweeps end.
      max_sweeps: the largest number of sweeps; None for as many as a row has tokens.
    """

    resets: bool
    deployed_by: str
    tolerance: float
    max_sweeps: int | None

    @classmethod
    def of(cls, model: Config) -> "MemoryRules":
        """The rules of a `config.model`."""
        resets = {"as_attention": model.reset_at_documents, "flows": False, "zeroed": True}
        return cls(
            resets=resets[model.memory_at_documents],
            deployed_by=model.deployed_by,
            tolerance=model.sweep_tolerance,
            max_sweeps=model.max_sweeps,
        )


def forget_gate(model: Config, *, rngs: nnx.Rngs) -> Linear:
    """The projection of the forget gate, which starts at 0: half of the memory is kept."""
    zeros = jax.nn.initializers.zeros
    return Linear(model.dim, model.dim, axes=("embed", None), rngs=rngs, init=zeros, bias_init=zeros)
