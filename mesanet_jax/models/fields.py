"""Groups of config fields that several kinds of model share; each kind joins them with its own (`FIELDS`)."""

from mesanet_jax.errors import UserError
from mesanet_jax.remat import POLICIES
from mesanet_jax.schema import Config, Field

VOCABULARY = {
    "vocab_size": Field(
        50_257, "number of tokens in the tokenizer's vocabulary; must match the data", at_least=2, fixed=True
    ),
    "vocab_multiple": Field(
        128,
        "tables are padded to a multiple of this number of rows; padding has no loss and no probability",
        at_least=1,
        fixed=True,
    ),
}
SIZES = {
    "dim": Field(768, "width of the residual stream", at_least=1, fixed=True),
    "layers": Field(
        14,
        "number of blocks, at least the length of the pattern; it need not be a multiple of that length",
        at_least=1,
        fixed=True,
    ),
    "heads": Field(6, "number of heads of each mixer", at_least=1, fixed=True),
    "head_dim": Field(128, "size of the queries, keys and values of one head", at_least=1, fixed=True),
    "norm_eps": Field(1e-6, "epsilon of every RMSNorm", above=0.0, fixed=True),
}
COMPUTATION = {
    "reset_at_documents": Field(
        True,
        "keep documents in a row apart: no state, convolution or attention crosses their boundaries",
        fixed=True,
    ),
    "compute_dtype": Field(
        "bfloat16", "dtype of activations; parameters are always float32", choices=("bfloat16", "float32")
    ),
    "remat": Field(
        "mixer",
        "what the backward pass recomputes (gradient checkpointing), from nothing to everything",
        choices=("none", *POLICIES),
    ),
    "scan_layers": Field(
        True, "run the layers in a loop; false is faster per step, but compilation time grows with depth"
    ),
}


def check_layers(model: Config) -> None:
    """Raises UserError if the model has fewer layers than its pattern has entries."""
    if model.layers < len(model.pattern):
        raise UserError(
            f"config.model.layers={model.layers}: fewer than the {len(model.pattern)} blocks of config.model.pattern"
        )
