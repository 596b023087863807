"""PHA, the parallel hybrid architecture (arXiv 2606.16093): blocks whose branches run side by side.

Only the paper's abstract and introduction were available. Each field below is a choice that they leave open, unless its
description ends in "(abstract)".
"""

from functools import partial

from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.models.feed_forward import NETWORKS
from mesanet_jax.models.language_model import LanguageModel
from mesanet_jax.models.mixture import WEIGHTS
from mesanet_jax.models.parallel_block import BLOCKS, FEED_FORWARDS
from mesanet_jax.schema import Config, Field


class ParallelHybrid(LanguageModel):
    """The model kind `pha`: the language model around blocks that each contain every mixer of `model.pattern`."""

    FIELDS = LanguageModel.FIELDS | {
        "composition": Field(
            "parallel",
            "branches of a block run side by side (abstract), or one after another for comparison",
            choices=tuple(BLOCKS),
            fixed=True,
        ),
        "mixing": Field(
            "normalized",
            "branch weights from learned scalars p: normalized is softplus(p) divided by its sum (abstract),"
            " raw is softplus(p), uniform is equal weights, none learned",
            choices=tuple(WEIGHTS),
            fixed=True,
        ),
        "auxiliary": Field(
            "inside",
            "where the second feed-forward network is: inside the feed-forward branch with its own two scalars,"
            " in a branch of its own, or nowhere",
            choices=tuple(FEED_FORWARDS),
            fixed=True,
        ),
        "auxiliary_mlp_ratio": Field(
            1.0, "width of the second feed-forward network, divided by dim", above=0.0, fixed=True
        ),
        "feed_forward": Field("gelu", "form of the feed-forward networks", choices=tuple(NETWORKS), fixed=True),
        "pre_norm": Field(True, "apply RMSNorm to what the branches read", fixed=True),
        "branch_norm": Field(True, "apply RMSNorm to the output of each branch (abstract)", fixed=True),
        "outer_norm": Field(
            True, "apply RMSNorm to the residual sum, as in DeepNet; without it the stream grows by alpha per layer",
            fixed=True,
        ),
        "alpha": Field(
            None, "factor on the stream in each residual sum; none: (2 layers)^(1/4) (abstract)", kind=float, above=0.0,
            fixed=True,
        ),
        "deepnorm_init": Field(
            True,
            "DeepNet's initial gain (8 layers)^(-1/4) on value, output and feed-forward projections",
            fixed=True,
        ),
    }  # fmt: skip

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError for a combination of fields that no PHA model can have."""
        if len(set(model.pattern)) < len(model.pattern):
            raise UserError(
                f"config.model.pattern={','.join(model.pattern)}: a block of pha can contain each mixer only once"
            )
        for name in ("mlp_ratio", "auxiliary_mlp_ratio"):
            if not round(model[name] * model.dim):
                raise UserError(
                    f"config.model.{name}={model[name]}: a feed-forward network of width"
                    f" {model[name]} x {model.dim} has no units; choose a larger ratio"
                )

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        block = partial(BLOCKS[model.composition], model, model.pattern)
        super().__init__(model, makers=[block], rngs=rngs)
