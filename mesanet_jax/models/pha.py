"""PHA, the parallel hybrid architecture (arXiv 2606.16093): blocks whose branches run side by side."""

from functools import partial

from mesanet_jax.errors import UserError
from mesanet_jax.models.feed_forward import NETWORKS
from mesanet_jax.models.language_model import LanguageModel
from mesanet_jax.models.mixture import WEIGHTS
from mesanet_jax.models.parallel_block import BLOCKS, FEED_FORWARDS
from mesanet_jax.schema import Field


class ParallelHybrid(LanguageModel):
    """The backbone around blocks that hold every mixer of `model.pattern`. Each field beyond it is a reading of the paper,
    of which abstract and introduction alone are known; a default marked (abstract) is stated there."""

    FIELDS = LanguageModel.FIELDS | {
        "composition": Field("parallel", "branches of a block: side by side (abstract), or one after another", choices=tuple(BLOCKS), fixed=True),
        "mixing": Field(
            "normalized",
            "weights of branches from learned scalars p (abstract): softplus(p) / its sum; raw: softplus(p); uniform: equal, none learned",
            choices=tuple(WEIGHTS), fixed=True,
        ),
        "auxiliary": Field("inside", "second feed-forward: inside that branch with two scalars of its own, a fourth branch, or none", choices=tuple(FEED_FORWARDS), fixed=True),
        "auxiliary_mlp_ratio": Field(1.0, "its width over dim", above=0.0, fixed=True),
        "feed_forward": Field("gelu", "form of the feed-forward networks", choices=tuple(NETWORKS), fixed=True),
        "pre_norm": Field(True, "RMSNorm of what the branches read", fixed=True),
        "branch_norm": Field(True, "RMSNorm of what each branch gives (abstract)", fixed=True),
        "outer_norm": Field(True, "RMSNorm of the sum, as DeepNet has it; without, the stream grows by alpha a layer", fixed=True),
        "alpha": Field(None, "factor of the stream in a residual; none: (2 layers)^(1/4) (abstract)", kind=float, above=0.0, fixed=True),
        "deepnorm_init": Field(True, "DeepNet's (8 layers)^(-1/4) on initial value, output and feed-forward projections", fixed=True),
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        if len(set(model.pattern)) < len(model.pattern):
            raise UserError(f"config.model.pattern={','.join(model.pattern)}: a block of pha has each mixer once")
        for name in ("mlp_ratio", "auxiliary_mlp_ratio"):
            if not round(model[name] * model.dim):
                raise UserError(f"config.model.{name}={model[name]}: no unit is left of {model.dim}")

    @staticmethod
    def block_makers(model):
        return (partial(BLOCKS[model.composition], model, model.pattern),)
